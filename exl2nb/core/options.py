"""Options as keyword-only frozen dataclasses, whose fields say all there is to know about an option, and named choices.

A field is declared with `option`. The command line, the server, the widgets, checks and docstrings read what it says with `options_of`.
An unknown name is an error that lists the known ones or the nearest of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from exl2nb.core.errors import Exl2Error, OptionError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
TYPE_OF_KIND: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


class Slider(NamedTuple):
    """What the slider of a number covers: from `low` to `high` in steps of `step`."""

    low: float
    high: float
    step: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionField:
    """An option: the field of a dataclass, and what `option` said about it.

    Args:
        name: of the field.
        default: of the field.
        kind: int, float, bool or str; None for any other type, which the dataclass checks itself.
        optional: None is a value, too.
        help: what the option does, in one line; the command line prints it.
        about: what a docstring adds to it.
        range: least and largest value.
        not_zero: what to do in place of 0, which the range includes and the option refuses.
        choices: the values of a text.
        label: the name of its control in widgets; empty: widgets have no control.
        hint: the line under the control.
        slider: of the control of a number.
        common: widgets and the command line show it among the first ones.
        one_row: the effect shows on one row of logits, so that the sampler microscope has a control.
        aliases: other names that requests to the server may use.
        server: a field of requests is made from it.
        flag: how the command line spells it; None: no flag is made from it.
        metavar: of the flag.
        flag_help: in place of `help`, where the flag does something else than the field.
    """

    name: str
    default: Any
    kind: type | None
    optional: bool
    help: str
    about: str = ""
    range: tuple[float, float] | None = None
    not_zero: str = ""
    choices: tuple[str, ...] = ()
    label: str = ""
    hint: str = ""
    slider: Slider | None = None
    common: bool = False
    one_row: bool = True
    aliases: tuple[str, ...] = ()
    server: bool = True
    flag: str | None = None
    metavar: str | None = None
    flag_help: str = ""

    def check(self, value: object, *, where: str = "") -> None:
        """Raise OptionError unless `value` has the type of the option and lies in its range.

        Args:
            value: what was given.
            where: the public call, named in the message.
        """
        name = f"{where}: {self.name}" if where else self.name
        if value is None and self.optional:
            return
        if self.kind is bool:
            check_flag(name, value)
        elif self.choices and value not in self.choices:
            raise OptionError(f"{name} is {shown(value)}; expected one of {', '.join(self.choices)}")
        elif self.range is not None and self.kind is int:
            check_integer(name, value, *self.range)  # type: ignore[arg-type]
        elif self.range is not None:
            check_range(name, value, *self.range)  # type: ignore[arg-type]


def option(default: Any, help: str, *, flag: bool | str = True, slider: tuple[float, float, float] | None = None, **more: Any) -> Any:
    """Declare the field of an options dataclass; `OptionField` documents what can be said of it.

    Args:
        default: of the field.
        help: what the option does, in one line.
        flag: False: the command line has no flag of its own for it. A text: the flag, where it is not the name of the field.
        slider: least and largest value, and the step of its slider.
        more: other fields of `OptionField`.
    """
    said = {"help": help, "flag": flag, "slider": None if slider is None else Slider(*slider), **more}
    return dataclasses.field(default=default, metadata={"option": said})


@cache
def options_of(cls: type) -> dict[str, OptionField]:
    """The fields of a dataclass that `option` declared, by name and in order."""
    made = {}
    for one in dataclasses.fields(cls):
        if (said := one.metadata.get("option")) is None:
            continue
        kind, *others = (one.type if isinstance(one.type, str) else one.type.__name__).split(" | ")
        flag = {True: "--" + one.name.replace("_", "-"), False: None}.get(said["flag"], said["flag"])
        made[one.name] = OptionField(
            name=one.name,
            default=one.default,
            kind=TYPE_OF_KIND.get(kind) if others in ([], ["None"]) else None,
            optional="None" in others,
            **{**said, "flag": flag},
        )
    return made


@cache
def _checked(cls: type) -> tuple[OptionField, ...]:
    return tuple(one for one in options_of(cls).values() if one.range is not None or one.choices or one.kind is bool)


def check_options(options: Any, *, where: str = "") -> None:
    """Check every field of an options dataclass that `option` declared; OptionError names the first one that is wrong.

    Args:
        options: the dataclass.
        where: the public call, named in the message.
    """
    values = vars(options)
    for one in _checked(type(options)):
        value = values[one.name]
        if value is not one.default:  # requests leave most of them alone
            one.check(value, where=where)


def documented(cls: type[T]) -> type[T]:
    """Write the fields of an options dataclass into its docstring, before "Raises:" or at the end."""
    wrap = {"width": 116, "initial_indent": " " * 8, "subsequent_indent": " " * 12}
    lines = ["    Args:", *(textwrap.fill(f"{one.name}: {_described(one)}", **wrap) for one in options_of(cls).values())]
    before, raises, after = (cls.__doc__ or "").partition("    Raises:")
    cls.__doc__ = f"{before.rstrip()}\n\n" + "\n".join(lines) + f"\n\n{raises}{after}".rstrip() + "\n"
    return cls


def _described(one: OptionField) -> str:
    parts = [one.help, one.about, "" if "default" in one.help else f"default {one.default!r}"]
    if one.range is not None:
        low, high = one.range
        parts.append(f"{'above' if one.not_zero else 'from'} {low} to {high}")
    if one.choices:
        parts.append(f"one of {', '.join(one.choices)}")
    return "; ".join(part for part in parts if part)


def make(cls: type[T], kwargs: Mapping[str, Any], *, where: str = "") -> T:
    """Build the options dataclass `cls` from keywords.

    Args:
        cls: a frozen dataclass whose `__post_init__` checks ranges.
        kwargs: what the caller gave.
        where: the public call, named in the message.

    Raises:
        OptionError: a keyword that `cls` does not have; the message names the nearest one.
    """
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    check_keywords(kwargs, known, where=where or cls.__name__)
    return cls(**kwargs)


def shown(value: object) -> str:
    """A value in a message: its repr, cut where it is long; whole numbers of thousands of digits have none."""
    try:
        text = repr(value)
    except Exception:  # the caller's object, whose repr may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def several(value: object) -> list[Any]:
    """A list of the elements of a collection; a text or any other single value becomes a list of one."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]


def check_keywords(kwargs: Mapping[str, Any], known: list[str], *, where: str) -> None:
    """Raise OptionError for the first keyword that is not in `known`."""
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise OptionError(f"{where}: unknown keyword {shown(name)}; {hint}")


def check_flag(name: str, value: object) -> None:
    """Raise OptionError unless `value` is True or False: a text such as "no" would count as yes."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {shown(value)}; expected True or False")


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise OptionError unless `value` is an integer (a bool is none) with `low <= value <= high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} is {shown(value)}; expected an integer from {low} to {high}")


def check_path(name: str, value: object, expected: str = "a path") -> None:
    """Raise OptionError unless `value` is a text or a path of one."""
    if not isinstance(value, str) and not (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)):
        raise OptionError(f"{name} is {shown(value)}; expected {expected}")


def check_range(name: str, value: float, low: float, high: float, *, where: str = "") -> None:
    """Raise OptionError unless `low <= value <= high` (NaN never passes)."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok:
        raise OptionError(f"{where + ': ' if where else ''}{name} is {shown(value)}; expected a number from {low:g} to {high:g}")


def spelled_out(options: type, defaults: Mapping[str, Any] = {}) -> Callable[[F], F]:
    """Spell out the `**options` of a function in its signature, so that notebooks complete them and `help` lists them.

    Args:
        options: a TypedDict of them.
        defaults: of those that have one; None is shown for the others.
    """

    def decorate(function: F) -> F:
        function.__signature__ = signature_with(inspect.signature(function), options.__annotations__, defaults)  # type: ignore[attr-defined]
        return function

    return decorate


def signature_with(signature: inspect.Signature, annotations: Mapping[str, Any], defaults: Mapping[str, Any]) -> inspect.Signature:
    """A signature whose `**options` are keywords of these names; a keyword that it has already stays as it is."""
    kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {one.name for one in kept}
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=getattr(kind, "__forward_arg__", kind)
        )
        for name, kind in annotations.items()
        if name not in names
    ]
    return signature.replace(parameters=[*kept, *more])


class Registry(Generic[T]):
    """A table of named objects that refuses an unknown name by listing the known ones.

    Args:
        what: the kind of object, for messages.
        error: the class that is raised for an unknown name.
    """

    def __init__(self, what: str, error: type[Exl2Error]) -> None:
        self._what, self._error = what, error
        self._items: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: file an object under `names`; a name is given once only."""

        def put(item: T) -> T:
            for name in names:
                assert name not in self._items, f"{self._what} {name!r} registered twice"
                self._items[name] = item
            return item

        return put

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise self._error(f"unknown {self._what} {name!r}; known: {', '.join(sorted(self._items))}")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))
