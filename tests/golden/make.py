"""Golden files of the public surface: `--help` of every command, the server's OpenAPI document, signatures of public names.

`python tests/golden/make.py` writes them. `test_golden.py` beside it compares them with what the package says now.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HELP_COLUMNS = 100
SHARED: dict[str, None] = {}
_shared: dict[str, int] = {}


def cli_help() -> str:
    """`--help` of `exl2nb` and of every command."""
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    from exl2nb.cli.commands import COMMAND_HELP, build_parser

    texts = [build_parser("").format_help()]
    for name in COMMAND_HELP:
        commands = next(action.choices for action in build_parser(name)._actions if isinstance(action.choices, dict))
        texts.append(f"==== {name}\n{commands[name].format_help()}")
    return "\n".join(texts).replace(str(Path.home()), "~")


def openapi() -> str:
    """The server's fields: one line per route and per field of a body. What FastAPI adds by itself is left out."""
    from types import SimpleNamespace

    from exl2nb.server.app import application
    from exl2nb.server.server_options import ServerOptions

    document = application(SimpleNamespace(options=ServerOptions())).openapi()  # type: ignore[arg-type]
    lines = [f"{document['info']['title']}: {document['info']['description']}"]
    for path, methods in sorted(document["paths"].items()):
        for method, about in sorted(methods.items()):
            inputs = [about.get("parameters"), about.get("requestBody")]
            lines.append(f"{method} {path} {_json([one for one in inputs if one])} -> {', '.join(sorted(about['responses']))}")
    bodies: dict[str, list[str]] = {}
    for name, schema in sorted(document["components"]["schemas"].items()):
        if name in ("HTTPValidationError", "ValidationError"):
            continue
        lines.append(f"{name} {_json({key: value for key, value in schema.items() if key != 'properties'})}")
        for field, about in schema.get("properties", {}).items():
            bodies.setdefault(f"{field}: {_json(about)}", []).append(name)
    return "\n".join([*lines, *(f"{line}  [{', '.join(names)}]" for line, names in sorted(bodies.items()))]) + "\n"


def signatures() -> str:
    """Signatures of what `exl2nb.__all__` holds, of its modules and of the public methods of its classes."""
    import exl2nb
    from exl2nb.llm.request_options import SamplingOptions

    global SHARED
    SHARED = dict.fromkeys(sorted(SamplingOptions.__annotations__))
    _shared.clear()
    lines = list(_of_module(exl2nb, "exl2nb"))
    return "\n".join([*lines, *(f"sampling options {number}: {text}" for text, number in _shared.items())]) + "\n"


def _of_module(module: types.ModuleType, path: str) -> Iterator[str]:
    for name in getattr(module, "__all__", None) or [one for one in vars(module) if not one.startswith("_")]:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            if value.__name__.startswith("exl2nb"):
                yield from _of_module(value, f"{path}.{name}")
        elif inspect.isclass(value):
            yield from _of_class(value, f"{path}.{name}")
        elif callable(value):
            yield f"{path}.{name}{_signature(value)}"


def _of_class(cls: type, path: str) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {path}({bases})"
    if "__init__" in vars(cls) and (not dataclasses.is_dataclass(cls) or cls.__dataclass_params__.init):  # type: ignore[attr-defined]
        yield f"  __init__{_signature(cls)}"
    for name in sorted(dir(cls)):
        value = inspect.getattr_static(cls, name)
        owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
        if name.startswith("_") or not owner.__module__.startswith("exl2nb"):
            continue
        bound = getattr(cls, name) if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(bound) or inspect.ismethod(bound):
            yield f"  {name}{_signature(bound)}"
        elif isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"  {name}: property"


def _signature(function: Callable[..., Any]) -> str:
    """Keyword-only parameters in alphabetical order. Options of sampling, which many functions take, stand once at the end of the file."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    keywords = {one.name: one for one in found.parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    others = [one for one in found.parameters.values() if one.name not in keywords]
    shared = ""
    if len(keywords) > len(SHARED) and SHARED.keys() <= keywords.keys():
        taken = ", ".join(str(keywords.pop(name)) for name in SHARED)
        shared = f" + sampling options {_shared.setdefault(taken, len(_shared) + 1)}"
    more = [one for one in others if one.kind is inspect.Parameter.VAR_KEYWORD]
    parameters = [one for one in others if one not in more] + sorted(keywords.values(), key=lambda one: one.name) + more
    text = str(found.replace(parameters=parameters)) + shared
    return re.sub(r" at 0x[0-9a-f]+", "", text).replace(str(Path.home()), "~")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


FILES: dict[str, Callable[[], str]] = {"help.txt": cli_help, "openapi.txt": openapi, "signatures.txt": signatures}

if __name__ == "__main__":
    for name, made in FILES.items():
        (HERE / name).write_text(made(), encoding="utf-8")
        print(f"wrote tests/golden/{name}")
