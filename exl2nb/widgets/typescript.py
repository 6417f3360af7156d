"""The protocol as TypeScript: its types as tuples, interfaces and unions by their exported names, and constants of both halves.

`python -m exl2nb.widgets.typescript FOLDER` writes the two modules.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from exl2nb import widgets
from exl2nb.core.show import BIT_COLOURS, DIVERGING_COLOURS, SIZE_UNITS
from exl2nb.llm.memory import PART_COLOURS, PLAN_PARTS, PLAN_TERMS
from exl2nb.llm.split_plan import DEVICE_COLOURS, SHARE_TERMS
from exl2nb.widgets import protocol, static

GENERATED_HEADER = "// Generated from exl2nb/widgets/protocol.py by `npm run protocol`; edit that file, not this one."
MAX_LINE_CHARACTERS = 120  # characters; longer lists are written row by row
_PRIMITIVE_TYPES = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def module(exported: Mapping[str, Any], *, records: Sequence[type] = ()) -> str:
    """A TypeScript module that declares each of `exported`.

    Args:
        exported: types by name.
        records: NamedTuples among `exported` that travel as objects.

    Raises:
        TypeError: an annotation has no TypeScript spelling.
    """
    lines = [GENERATED_HEADER]
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
    lines = [GENERATED_HEADER]
    for name, (kind, value) in values.items():
        text = json.dumps(value, ensure_ascii=False)
        if len(text) > MAX_LINE_CHARACTERS and isinstance(value, Sequence):
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
    if hint in _PRIMITIVE_TYPES:
        return _PRIMITIVE_TYPES[hint]
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


def state_types() -> dict[str, Any]:
    """Return the type of the state that each public widget synchronises, by the widget's name."""
    return {name: getattr(widgets, name)._state_type for name in widgets.__all__}


def _exported() -> dict[str, Any]:
    """Types by name: those of the protocol, those of the modules whose widgets declare their state there, and the two directions.

    Every message that the kernel does not send is one that it takes.
    """
    declared_apart = (state.__module__ for state in state_types().values() if typing.is_typeddict(state))
    modules = dict.fromkeys([protocol.__name__, *declared_apart])
    found: dict[str, Any] = {"Status": protocol.Status}
    for module_name in modules:
        declared = vars(sys.modules[module_name])
        found |= {name: kind for name, kind in declared.items() if getattr(kind, "__module__", "") == module_name and _is_type(kind)}
    sent = get_args(protocol.FromKernel)
    taken = [kind for kind in found.values() if "type" in getattr(kind, "__annotations__", {}) and kind not in sent]
    return {**found, "FromKernel": protocol.FromKernel, "ToKernel": reduce(or_, taken)}


def _is_type(kind: Any) -> bool:
    return typing.is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, tuple))


def typescript() -> str:
    """The TypeScript module that `widgets/src/protocol.gen.ts` must equal: types alone, so bundles do not change with them."""
    return module(_exported(), records=protocol.RECORD_TYPES)


def typescript_constants() -> str:
    """The TypeScript module that `widgets/src/constants.gen.ts` must equal."""
    terms = "readonly (readonly [name: string, term: unknown])[]"
    values = {
        "PROTOCOL_VERSION": ("", protocol.PROTOCOL_VERSION),
        "BIT_COLOURS": ("", BIT_COLOURS),
        "DIVERGING_COLOURS": ("", DIVERGING_COLOURS),
        "SIZE_UNITS": ("", SIZE_UNITS),
        "SURPRISE_LIMITS": ("", static.SURPRISE_LIMITS),
        "KL_LIMITS": ("", static.KL_LIMITS),
        "OWNER_COLOURS": ("", protocol.OWNER_COLOURS),
        "PLAN_COLOURS": ("", PART_COLOURS),
        "DEVICE_COLOURS": ("", DEVICE_COLOURS),
        "SHOWN_TOKENS": ("", protocol.SHOWN_TOKENS),
        "LINE_PROB": ("", protocol.LINE_PROB),
        "PLAN_PARTS": ("", PLAN_PARTS),
        "PLAN_TERMS": (terms, PLAN_TERMS),
        "SHARE_TERMS": (terms, SHARE_TERMS),
    }
    return constants(values)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "protocol.gen.ts").write_text(typescript(), encoding="utf-8")
    (folder / "constants.gen.ts").write_text(typescript_constants(), encoding="utf-8")
