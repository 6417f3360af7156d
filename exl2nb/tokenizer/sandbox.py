"""Renders chat templates; runs in the helper process of `tokenizer/template.py`.

A chat template is a program that came with a model file. Jinja's sandbox keeps it from Python's objects, and the helper's limits bound its
time and memory, parsing and compiling included: checks between its steps cannot, since one comparison of nested lists or one padded format
can take hours or gigabytes.
"""

from __future__ import annotations

import json
import pprint  # noqa: F401  (for jinja2, which imports these when a filter needs them: by then the helper opens no file any more)
import textwrap  # noqa: F401
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.debug
import jinja2.optimizer
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Render `template` with `variables`; returns `text`."""
    return {"text": _compile(request["template"]).render(request["variables"])}


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return Sandbox().from_string(source)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. Names as chat templates expect them: raise_exception, strftime_now, tojson, namespace, loop controls, generation."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Names)
        self.filters["tojson"] = _tojson


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


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_compile(r"{% for m in messages %}{{ '\n' + m | upper }}{% endfor %}")  # loads the codec of escapes, and so on
