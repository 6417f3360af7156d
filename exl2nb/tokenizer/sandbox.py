"""A Jinja environment for untrusted templates: no attributes beyond plain data, no files, bounded work and bounded size.

A chat template is a program that came with a model file. It may read the messages it is given and build a string. Every loop turn, call
and filter costs one step of a budget, and no value may grow past a limit, so that neither an endless loop nor a doubling string hangs the
kernel.

A deadline around jinja2's `ImmutableSandboxedEnvironment` is not enough: between two checks one operation can fill the memory. With a
deadline alone '%1000000000d' took 5 s and 2 GiB, a doubling string 4 s and 1 GiB, where this stops both in 0.3 s without growing. A
conversation of 1000 messages takes 18 ms here and 10 ms without the budget (benchmarks/libraries.py, 2026-11).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 500_000  # loop turns, calls and filters of one rendering; a conversation of 1000 messages takes some 20 000
MAX_SECONDS = 2.0
MAX_WEIGHT = 4_000_000  # characters in one value; an element of a list or dict counts as ELEMENT of them
ELEMENT = 16
MAX_INTEGER = 10_000  # an integer argument of a call or filter, which could produce a huge result from few characters
_WIDTH = re.compile(r"[0-9]{5,}|%[-+ #0-9.]*\*")
_PADDING = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "maketrans", "to_bytes", "from_bytes", "format_map"))


class Budget:
    """Steps and seconds left for one rendering."""

    def __init__(self) -> None:
        self._steps, self._deadline = MAX_STEPS, time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Use one; SecurityError when none is left."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"the template took more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"the template ran longer than {MAX_SECONDS:g} s")


_budget: ContextVar[Budget | None] = ContextVar("exl2nb_template_budget", default=None)


def _step() -> None:
    budget = _budget.get()
    if budget is not None:
        budget.step()


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Run a template of `Sandbox` within a fresh budget.

    Raises:
        jinja2.TemplateError: the template failed or was stopped.
    """
    token = _budget.set(Budget())
    try:
        return template.render(**variables)
    finally:
        _budget.reset(token)


def weigh(*values: Any, limit: int = MAX_WEIGHT) -> None:
    """Raise SecurityError where the values weigh more than `limit` characters, shared parts counted each time."""
    stack: list[Any] = list(values)
    total = 0
    while stack:
        value = stack.pop()
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, dict):
            total += ELEMENT * len(value)
            stack += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            total += ELEMENT * len(value)
            stack += value
        elif isinstance(value, int) and value.bit_length() > 4096:
            raise SecurityError("a template's number has more than 4096 bits")
        if total > limit:
            raise SecurityError(f"a template's value is larger than {limit} characters")


def _check_arguments(args: Iterable[Any]) -> None:
    for value in args:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise SecurityError(
                f"the template passes the number {value if value.bit_length() < 200 else 'of more than 200 bits'} to a call"
            )


def _check_format(pattern: Any) -> None:
    if isinstance(pattern, str) and _WIDTH.search(pattern):
        raise SecurityError("the template formats with a width of five or more digits, or one that is computed")


def _check_replace(text: Any, args: tuple[Any, ...]) -> None:
    if isinstance(text, str) and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        hits = len(text) + 1 if not args[0] else text.count(args[0])
        if hits * len(args[1]) > MAX_WEIGHT:
            raise SecurityError(f"the template replaces into more than {MAX_WEIGHT} characters")


def _check_join(separator: Any, items: Any) -> None:
    if isinstance(items, (list, tuple)) and isinstance(separator, str) and len(separator) * len(items) > MAX_WEIGHT:
        raise SecurityError(f"the template joins into more than {MAX_WEIGHT} characters")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts as a step and weighs what goes in and out."""
    passes = 1 if hasattr(function, "jinja_pass_arg") else 0

    def guarded(*args: Any, **kwargs: Any) -> Any:
        _step()
        own = args[passes:]
        _check_arguments((*own[1:], *kwargs.values()))
        weigh(*own, *kwargs.values())
        if name == "format":
            _check_format(own[0])
        elif name == "replace":
            _check_replace(own[0], own[1:])
        elif name == "join" and len(own) > 1:
            _check_join(own[1], own[0])
        result = function(*args, **kwargs)
        weigh(result)
        return result

    if passes:
        guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return guarded


class _Generator(CodeGenerator):
    """`a ~ b` goes through the sandbox too."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. Names as chat templates expect them: raise_exception, strftime_now, tojson, namespace, loop controls, generation."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize)
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Names)
        self.filters["tojson"] = _tojson
        for name in ("pprint", "urlize", "random", "xmlattr", "filesizeformat", "center", "wordwrap"):
            self.filters.pop(name, None)
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.concat = self.concatenate  # type: ignore[assignment, method-assign]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None))
            loop.body.insert(0, tick.set_lineno(loop.lineno).set_environment(self))
        return tree

    def tick(self) -> None:
        """One turn of a loop: the call itself is the step."""

    def concatenate(self, parts: Iterable[Any]) -> str:
        """Join output, `~` and captured blocks."""
        parts = [part if isinstance(part, str) else _checked_str(part) for part in parts]
        if sum(map(len, parts)) > MAX_WEIGHT:
            raise SecurityError(f"the template builds more than {MAX_WEIGHT} characters")
        return "".join(parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Plain data only, without the methods that pad."""
        return attr not in _PADDING and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` with checked widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__)
            _check_arguments((*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make a large value from small ones."""
        _step()
        weigh(left, right)
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int) and len(one) * other > MAX_WEIGHT:
                    raise SecurityError(f"the template repeats a value to more than {MAX_WEIGHT} elements")
        elif operator == "**" and (abs(right) > 64 or (isinstance(left, int) and abs(left) > 2**32)):
            raise SecurityError("the template raises a number to a power above 64, or a number above 2**32")
        elif operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """One step; arguments and result are weighed."""
        _step()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, (str, bytes)):
            _check_arguments((*args, *kwargs.values()))
            weigh(owner, *args)
            if name == "replace":
                _check_replace(owner, args)
            elif name == "join" and args:
                _check_join(owner, args[0])
        result = super().call(context, obj, *args, **kwargs)
        weigh(result)
        return result


class _Names(Namespace):
    """`namespace(...)` without underscore names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        if any(name.startswith("_") for name in kwargs):
            raise SecurityError("a template's namespace has no names that begin with an underscore")
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("a template's namespace has no names that begin with an underscore")
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _checked_str(value: Any) -> str:
    weigh(value)
    return str(value)


def _finalize(value: Any) -> Any:
    if not isinstance(value, str):
        weigh(value)
    return value


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    _check_format(pattern)
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
