"""Dead ends of schemas and grammars: places that an answer can reach and from which no text is complete.

The mask engine finds most of them when it compiles: a leaf that no value satisfies makes its property forbidden, or the schema an error.
Two kinds are left. An object may have patterns whose names are all taken, so that nothing can follow its comma. A rule may need itself,
so that its text never ends. `without_dead_ends` rewrites schemas that have them. `find_dead_end` searches what was compiled.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from exl2nb.core.errors import StructureError

MAX_STALE_STEPS = 100  # of a search that only repeats choices
WIDE_OPTIONS = 48  # more allowed characters than this are free text
STRUCTURAL_CHARACTERS = '"}],:{[)>\n'  # ends of free text come first, or a search spends its steps inside one string
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE_SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")


class DeadEnd(NamedTuple):
    """Where a search ended.

    Args:
        text: the answer up to the place.
        message: the engine's error.
    """

    text: str
    message: str


# ---- schemas


def without_dead_ends(schema: dict[str, Any], probe: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Rewrite the parts of a schema that the mask engine compiles into dead ends.

    A reference that needs itself becomes `false`. A pattern of `patternProperties` that matches only names of `properties` is removed, and
    its schema is added to these properties.

    Args:
        schema: a JSON schema, checked by `structure.json_schema`.
        probe: compiles a schema; returns a matcher over bytes, or None where the schema cannot be used.

    Raises:
        StructureError: every text of the schema would need another one inside it.
    """
    parts = list(_parts(schema))
    if any(isinstance(one.get("$ref"), str) for one in parts):
        schema = _without_endless_references(schema, parts)
    if any(isinstance(one.get("patternProperties"), Mapping) for one in parts):
        schema = _mapped(schema, lambda one: _without_taken_patterns(one, probe))
    return schema


def may_have_dead_ends(schema: Any) -> bool:
    """Whether a schema joins parts in a way that only the compiled grammar shows."""
    keys = {key for one in _parts(schema) for key in one}
    return "allOf" in keys and ("$ref" in keys or "patternProperties" in keys)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and every schema inside it, without the data of `const`, `enum` and `default`."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += _inside(one)


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if key in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            yield from value.values()
        elif (key in _SCHEMA_LIST_KEYWORDS or key in _SINGLE_SCHEMA_KEYWORDS) and isinstance(value, list):
            yield from value
        elif key in _SINGLE_SCHEMA_KEYWORDS:
            yield value


def _mapped(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """A copy of a schema with every schema inside it changed, the innermost first."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            made[key] = {name: _mapped(one, change) for name, one in value.items()}
        elif (key in _SCHEMA_LIST_KEYWORDS or key in _SINGLE_SCHEMA_KEYWORDS) and isinstance(value, list):
            made[key] = [_mapped(one, change) for one in value]
        else:
            made[key] = _mapped(value, change) if key in _SINGLE_SCHEMA_KEYWORDS else value
    return change(made)


def _without_endless_references(schema: dict[str, Any], parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Replace references by `false` whose every text would hold another text of the same reference."""
    targets: dict[str, Any] = {}
    for one in parts:
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in targets and (found := _resolved(schema, reference)) is not None:
            targets[reference] = found
    endless = set(targets)
    while ending := [reference for reference in endless if not _is_endless(targets[reference], endless)]:
        endless.difference_update(ending)
    if not endless:
        return schema
    if _is_endless(schema, endless):
        raise StructureError(
            f"schema cannot be satisfied: {sorted(endless)[0]!r} needs itself, so that no text is complete; make a property optional, "
            "or write anyOf with null"
        )
    return _mapped(schema, lambda one: False if one.get("$ref") in endless else one)


def _resolved(schema: dict[str, Any], reference: str) -> Any:
    """The part of a schema that a reference like `#/$defs/name` points to, or None."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: Any = schema
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _is_endless(schema: Any, endless: set[str]) -> bool:
    """Whether no text satisfies a schema, where none satisfies the references of `endless`."""
    if not isinstance(schema, dict):
        return schema is False

    def one_of(parts: Any) -> bool:
        return isinstance(parts, list) and any(_is_endless(one, endless) for one in parts)

    if schema.get("$ref") in endless or one_of(schema.get("allOf")):
        return True
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options and all(_is_endless(one, endless) for one in options):
            return True
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            return one_of([properties[name] for name in required if isinstance(name, str) and name in properties])
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems", 0), (int, float)) and least > 0:
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        return one_of(first[: int(least)]) or (least > len(first) and _is_endless(schema.get("items"), endless))
    return False


def _without_taken_patterns(schema: dict[str, Any], probe: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Move the patterns that match only names of properties into these properties."""
    patterns = schema.get("patternProperties")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list):
        return schema
    names = list(dict.fromkeys([*properties, *(name for name in required if isinstance(name, str))]))
    left, moved = dict(patterns), dict(properties)
    for pattern, inner in patterns.items():
        if not _only_matches(pattern, names, probe):
            continue
        del left[pattern]
        for name in names:
            if probe({"enum": [name], "pattern": pattern}) is not None:
                moved[name] = {"allOf": [moved[name], inner]} if name in moved else inner
    if len(left) == len(patterns):
        return schema
    made = {key: value for key, value in schema.items() if key not in ("patternProperties", "properties")}
    return {**made, "properties": moved, **({"patternProperties": left} if left else {})}


def _only_matches(pattern: str, names: Sequence[str], probe: Callable[[dict[str, Any]], Any]) -> bool:
    """Whether a pattern matches none but these names: whether an object without them, but with a name of the pattern, has a dead end."""
    matcher = probe(
        {
            "type": "object",
            "properties": dict.fromkeys(names, False),
            "patternProperties": {pattern: {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 1,
        }
    )
    return matcher is not None and (not matcher.consume_token(ord("{")) or not any(matcher.compute_bitmask()) or matcher.is_error())


# ---- what was compiled


def find_dead_end(matcher: Any, alphabet: Mapping[int, str], steps: int) -> DeadEnd | None:
    """Search for a dead end by writing texts that the matcher allows, choosing at each place what was chosen least there.

    The search is bounded and finds no dead end behind a place that it does not reach. Places with equal masks count as one.

    Args:
        matcher: at the beginning of an answer; it does not change.
        alphabet: ids of tokens with their texts, of one character each, from which texts are written where the mask allows.
        steps: masks to compute at most.

    Returns:
        The first dead end, or None.
    """
    ids = np.fromiter(alphabet, np.int64, len(alphabet))
    structural = np.fromiter((text in STRUCTURAL_CHARACTERS for text in alphabet.values()), np.bool_, len(alphabet))
    chosen: dict[bytes, Counter[int]] = {}
    rng, stale = random.Random(0), 0
    while steps > 0 and stale < MAX_STALE_STEPS:
        here, text = matcher.deep_copy(), ""
        while steps > 0 and stale < MAX_STALE_STEPS and not here.is_stopped():
            steps -= 1
            mask = here.compute_bitmask()
            if here.is_error() or not any(mask):
                return _dead_end(here, text)
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = bits[ids].astype(np.bool_)
            wide = allowed.sum() > WIDE_OPTIONS
            if wide and (allowed & structural).any() and rng.random() < 0.75:
                allowed &= structural
            options = [int(i) for i in ids[allowed]] or [int(i) for i in np.flatnonzero(bits)[:64]]
            counts = chosen.setdefault(bytes(mask), Counter())
            token = min(options, key=lambda one: (counts[one], alphabet.get(one, "") not in STRUCTURAL_CHARACTERS, rng.random()))
            stale = 0 if not counts or (counts[token] == 0 and not wide) else stale + 1
            counts[token] += 1
            if not here.consume_token(token):
                return _dead_end(here, text + alphabet.get(token, ""))
            text += alphabet.get(token, "")
    return None


def _dead_end(matcher: Any, text: str) -> DeadEnd | None:
    message = matcher.get_error()
    if "lexer" in message.split("<state>")[0].lower():  # states of a regex: a search writes longer texts than answers are
        return None
    return DeadEnd(text, message)


def quoted(text: str) -> str:
    """The end of a text, as JSON."""
    return json.dumps(text if len(text) <= 60 else "..." + text[-57:], ensure_ascii=False)
