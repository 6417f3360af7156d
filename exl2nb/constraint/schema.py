"""From what describes an object in Python to a JSON schema, and from JSON back to the object. Knows no masks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from exl2nb.core.errors import MissingDependency, StructureError

MAX_DEPTH = 100


def json_schema(source: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """The schema that `source` stands for, and a function from JSON text to a value.

    Args:
        source: a JSON schema as dict or JSON text (the value is then plain data); or a pydantic model, a dataclass, a TypedDict, an Enum or
            any type that pydantic can check, such as `list[int]` (the value is then an object of it).

    Raises:
        StructureError: it is none of these, or pydantic cannot make a schema of it. MissingDependency: pydantic is needed for it.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise StructureError(f"schema is a text, but no JSON ({error}); give a JSON schema, a dict or a type") from error
    if isinstance(source, Mapping):
        return _rewritten(dict(source), 0, close=False), json.loads
    if not isinstance(source, type) and not hasattr(source, "__origin__") and not hasattr(source, "__args__"):
        raise StructureError(
            f"schema is {str(source)[:80]!r}; expected a JSON schema (a dict), a pydantic model, a dataclass or another type"
        )
    try:
        import pydantic
    except ImportError as error:
        raise MissingDependency(
            "a schema given as a type needs the package pydantic, which is not installed; pip install 'exl2nb[structured]', "
            "or give a JSON schema"
        ) from error
    try:
        adapter: Any = pydantic.TypeAdapter(source)
        schema = adapter.json_schema()
    except Exception as error:
        raise StructureError(f"schema: pydantic cannot make a JSON schema of {source!r}: {str(error)[:300]}") from error
    return _rewritten(schema, 0, close=True), adapter.validate_json


def _rewritten(value: Any, depth: int, *, close: bool) -> Any:
    """The schema in a form that mask engines can do and models come to an end with.

    `oneOf` whose branches a discriminator keeps apart becomes `anyOf`, then the same. With `close`, objects that do not say whether
    they may have more properties may not: a class has the fields that it has, and a small model would go on inventing some.
    """
    if depth > MAX_DEPTH:
        raise StructureError(f"schema is nested more than {MAX_DEPTH} levels deep; use $defs and $ref")
    if isinstance(value, float) and not math.isfinite(value):
        raise StructureError(f"schema holds the number {value}, which JSON does not have; leave it out")
    if isinstance(value, Mapping):
        if "oneOf" in value and "discriminator" in value and "anyOf" not in value:
            value = {"anyOf" if k == "oneOf" else k: v for k, v in value.items() if k != "discriminator"}
        if close and value.get("uniqueItems") is True:  # a set: it keeps once what the answer has twice
            value = {key: one for key, one in value.items() if key != "uniqueItems"}
        if close and value.get("type") == "object" and isinstance(value.get("properties"), Mapping):
            value = {"additionalProperties": False, **value}
        if not all(isinstance(key, str) for key in value):
            raise StructureError("schema holds a key that is no text; expected a JSON schema")
        return {key: _rewritten(one, depth + 1, close=close) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rewritten(one, depth + 1, close=close) for one in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise StructureError(f"schema holds {str(value)[:80]!r}, which JSON cannot express; expected a JSON schema, or a type for the whole")
