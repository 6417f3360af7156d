"""Rules for the arguments of calls in the notation of Gemma 4 (`tokenizer.gemma_arguments`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from exl2nb.core.errors import StructureError
from exl2nb.tokenizer.gemma_arguments import QUOTE

_NUMBER = r"/-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?/"
_INTEGER = r"/-?(0|[1-9][0-9]{0,39})/"
_KNOWN = {
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "description",
    "title",
    "default",
    "additionalProperties",
    "nullable",
    "minLength",
    "maxLength",
}
_DEPTH = 16


def gemma_rules(name: str, schema: Mapping[str, Any], literal: Callable[[str], str]) -> list[str]:
    """The rules of an object without its outer braces.

    Args:
        name: The rule of the object; the names of all others begin with it.
        schema: Its JSON schema.
        literal: Writes a text, with special tokens by their id.

    Raises:
        StructureError: The schema has a keyword that these rules cannot express; names it.
    """
    rules = _Rules(name, literal)
    return [f"{name}: {rules.members(schema, 0)}", *rules.made]


class _Rules:
    def __init__(self, name: str, literal: Callable[[str], str]) -> None:
        self._name, self._literal = name, literal
        self.made: list[str] = []
        self._any, self._texts = "", dict[tuple[int, int | None], str]()

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        """The members of an object, in the order of their keys; those that are not required may be left out."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties:
            if schema.get("additionalProperties") is False:
                return json.dumps("")
            pair = f"/[A-Za-z0-9_.$-]+/ {json.dumps(':')} {self.anything()}"
            return f"({pair} ({json.dumps(',')} {pair})*)?"
        parts: list[tuple[str, bool]] = []
        for key in sorted(properties):
            part = f"{self._literal(key + ':')} {self.value(properties[key], depth + 1)}"
            parts.append((part, key in required))
        return self._list(parts)

    def _list(self, parts: list[tuple[str, bool]]) -> str:
        """The parts with commas between those that are there: one rule for each place, with and without something before it."""
        comma, rest = json.dumps(","), ("", "")  # rules of what follows: nothing was written before, something was
        for part, needed in reversed(parts):
            first, later = f"{part} {rest[1]}".strip(), f"{comma} {part} {rest[1]}".strip()
            if not needed:
                first = f"({first} | {rest[0] or json.dumps('')})"
                later = f"({later} | {rest[1] or json.dumps('')})"
            rest = (self._rule(first), self._rule(later))
        return rest[0]

    def value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self.anything()
        if unknown := sorted(set(schema) - _KNOWN):
            raise StructureError(f"the keyword {unknown[0]!r} in this model's notation of calls")
        if depth > _DEPTH:
            raise StructureError(f"a schema of more than {_DEPTH} levels in this model's notation of calls")
        choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
        kind = schema.get("type")
        if choices:
            found = "(" + " | ".join(self._constant(choice) for choice in choices) + ")"
        elif isinstance(kind, list):
            found = "(" + " | ".join(self.value({**schema, "type": one}, depth) for one in kind) + ")"
        elif kind == "string":
            found = self.text(int(schema.get("minLength", 0)), schema.get("maxLength"))
        elif kind in ("integer", "number"):
            found = _INTEGER if kind == "integer" else _NUMBER
        elif kind == "boolean":
            found = '("true" | "false")'
        elif kind == "null":
            found = '"null"'
        elif kind == "array":
            item = self._rule(self.value(schema.get("items", {}), depth + 1))
            found = f'"[" ({item} ("," {item})*)? "]"'
        elif kind == "object":
            found = f'"{{" {self.members(schema, depth)} "}}"'
        else:
            found = self.anything()
        return f'({found} | "null")' if schema.get("nullable") is True else found

    def text(self, least: int = 0, most: int | None = None) -> str:
        """A text between quotes, of so many characters."""
        key = least, most
        if key not in self._texts:
            quote, times = self._literal(QUOTE), f"{{{least},{'' if most is None else int(most)}}}"
            if quote.startswith("<["):
                self._texts[key] = self._rule(f"{quote} /(.|\\n){times}/ {quote}")
            else:
                end = "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in QUOTE)
                name = f"{self._name}_quoted_{len(self._texts)}"
                self.made.append(f"{name}[lazy]: /(.|\\n){times}{end}/")
                self._texts[key] = self._rule(f"{quote} {name}")
        return self._texts[key]

    def anything(self) -> str:
        """Any value."""
        if not self._any:
            self._any = f"{self._name}_any"
            pair = f'/[A-Za-z0-9_.$-]+/ ":" {self._any}'
            self.made.append(
                f'{self._any}: {self.text()} | {_NUMBER} | "true" | "false" | "null" | "[" ({self._any} ("," {self._any})*)? "]" '
                f'| "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return self._any

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._literal(f"{QUOTE}{value}{QUOTE}")
        if isinstance(value, (bool, int, float)) or value is None:
            return json.dumps(json.dumps(value))
        raise StructureError("an enum of objects in this model's notation of calls")

    def _rule(self, body: str) -> str:
        name = f"{self._name}_{len(self.made)}"
        self.made.append(f"{name}: {body}")
        return name
