"""config.json as a strict JSON object of limited size. Knows no architecture; `model.config` reads the fields."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from exl2nb.core.errors import ConfigError, ModelNotFound

LIMIT_BYTES = 16 << 20
_KINDS: dict[str, type | tuple[type, ...]] = {
    "model_type": str,
    "text_config": dict,
    "quantization_config": dict,
    "tie_word_embeddings": bool,
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
}


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read `config.json` of a model directory.

    Returns:
        The JSON object as it stands, `architectures` being a list of one string, and the common fields of the right JSON type where they
        are present (null counts as absent).

    Raises:
        ModelNotFound: no such directory, or it has no config.json.
        ConfigError: not strict JSON, too large, or a field of the wrong type.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        raise ModelNotFound(
            f"{directory}: no such directory; give the folder that holds config.json and the .safetensors files, or a hub id"
        )
    if not path.is_file():
        raise ModelNotFound(
            f"{directory}: not a model directory, it has no config.json ({_contents(directory)}); give the folder that holds it"
        )
    config = read_json(path)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or not names[0]:
        raise ConfigError(
            f"{path}: architectures is {str(names)[:120]}; expected a list of exactly one class name, as Transformers writes it"
        )
    check_kinds(path, config)
    return config


def check_kinds(path: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError for a common field of the wrong JSON type, `text_config` included."""
    for key, kind in _KINDS.items():
        value = config.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            name = getattr(kind, "__name__", str(kind))
            raise ConfigError(f"{path}: {key} is {str(value)[:80]!r}; expected a JSON {_JSON_NAMES.get(name, name)}")
    if config.get("text_config"):
        check_kinds(path, {key: value for key, value in config["text_config"].items() if key != "text_config"})


_JSON_NAMES = {"str": "string", "dict": "object", "bool": "boolean", "int": "integer"}


def read_json(path: Path, *, limit_bytes: int = LIMIT_BYTES, error: Callable[[str], Exception] = ConfigError) -> dict[str, Any]:
    """Read a file that must be one strict JSON object: UTF-8, no key twice, no NaN or Infinity.

    Raises:
        ConfigError: (or `error`) anything else; names the file, what was found and what was expected.
    """

    def fail(found: str, expected: str) -> NoReturn:
        raise error(f"{path}: found {found}, expected {expected}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            fail(f"the key {next(k for k in keys if keys.count(k) > 1)!r} twice", "each key once")
        return dict(pairs)

    def constant(text: str) -> Any:
        fail(f"the constant {text}", "strict JSON numbers")

    try:
        with open(path, "rb") as file:
            raw = file.read(limit_bytes + 1)
    except OSError as problem:
        fail(f"a file that cannot be read ({problem.strerror})", "a readable one")
    if len(raw) > limit_bytes:
        fail(f"more than {limit_bytes} bytes", f"at most {limit_bytes}")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ConfigError, type(error("x"))):
        raise
    except (ValueError, RecursionError) as problem:
        fail(f"invalid JSON ({str(problem)[:120]})", "a JSON object in UTF-8")
    if not isinstance(value, dict):
        fail(f"a JSON {type(value).__name__}", "a JSON object")
    return value


def _contents(directory: Path) -> str:
    names = sorted(entry.name for entry in os.scandir(directory))
    return "it is empty" if not names else f"it has {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}"
