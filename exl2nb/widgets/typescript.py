"""Python types as TypeScript: tuples, interfaces and unions, by their exported names. Knows no message."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

GENERATED = "// Generated from exl2nb/widgets/protocol.py by `npm run protocol`; edit that file, not this one."
LINE = 120  # characters; longer lists are written row by row
_PRIMITIVE = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def module(exported: Mapping[str, Any], *, records: Sequence[type] = ()) -> str:
    """A TypeScript module that declares each of `exported`.

    Args:
        exported: types by name.
        records: NamedTuples among `exported` that travel as objects.

    Raises:
        TypeError: an annotation has no TypeScript spelling.
    """
    lines = [GENERATED]
    for name, kind in exported.items():
        doc = (getattr(kind, "__doc__", None) or "").strip()
        lines.append("")
        if isinstance(kind, type) and doc:
            lines.append(_comment(doc))
        lines.append(_declaration(name, kind, exported, records))
    return "\n".join(lines) + "\n"


def constants(values: Mapping[str, tuple[str, Any]]) -> str:
    """A TypeScript module of constants.

    Args:
        values: name -> type and JSON value; type "": that of the value as it is written.
    """
    lines = [GENERATED]
    for name, (kind, value) in values.items():
        text = json.dumps(value, ensure_ascii=False)
        if len(text) > LINE and isinstance(value, Sequence):
            text = f"[\n{''.join(f'  {json.dumps(row, ensure_ascii=False)},{chr(10)}' for row in value)}]"
        lines += ["", f"export const {name}{kind and ': '}{kind} = {text}{'' if kind else ' as const'};"]
    return "\n".join(lines) + "\n"


def _comment(doc: str) -> str:
    lines = [line.strip() for line in doc.splitlines()]
    return f"/** {doc} */" if len(lines) == 1 else "\n".join(["/**", *(f" * {line}".rstrip() for line in lines), " */"])


def _declaration(name: str, kind: Any, exported: Mapping[str, Any], records: Sequence[type]) -> str:
    if isinstance(kind, type) and issubclass(kind, tuple) and kind not in records:
        parts = ", ".join(f"{field}: {spelling(hint, exported)}" for field, hint in get_type_hints(kind).items())
        return f"export type {name} = [{parts}];"
    if typing.is_typeddict(kind) or kind in records:
        body = "".join(f"  {field}: {spelling(hint, exported)};\n" for field, hint in get_type_hints(kind).items())
        return f"export interface {name} {{\n{body}}}"
    return f"export type {name} = {spelling(kind, exported, inline=True)};"


def spelling(hint: Any, exported: Mapping[str, Any], *, inline: bool = False) -> str:
    """TypeScript spelling of one annotation; a type that has an exported name is written by that name unless `inline`."""
    if not inline:
        for name, kind in exported.items():
            if kind is hint or (get_origin(hint) is Literal and kind == hint):
                return name
    if hint in _PRIMITIVE:
        return _PRIMITIVE[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in args)
    if origin in (Union, types.UnionType):
        return " | ".join(spelling(arg, exported) for arg in args)
    if origin is list:
        inner = spelling(args[0], exported)
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    if origin is dict and args[0] is str:
        return f"Record<string, {spelling(args[1], exported)}>"
    raise TypeError(
        f"protocol: no TypeScript spelling for {hint!r}; use str, int, float, bool, None, list, dict, Literal, a NamedTuple or a TypedDict"
    )
