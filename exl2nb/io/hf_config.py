"""config.json as a strict JSON object of limited size, and the quantisation format that it names. Knows no architecture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from exl2nb.core.errors import ConfigError, ModelNotFound
from exl2nb.core.files import placeholder, read_regular

LIMIT_BYTES = 16 << 20
_KEY_TYPES: dict[str, type | tuple[type, ...]] = {
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
    for key, kind in _KEY_TYPES.items():
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
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    fail(f"the key {key[:200]!r} twice", "each key once")
                seen.add(key)
        return found

    def constant(text: str) -> Any:
        fail(f"the constant {text}", "strict JSON numbers")

    try:
        raw = read_regular(path, limit_bytes)
    except OSError as problem:
        fail(f"a file that cannot be read ({problem.strerror})", "a readable one")
    if len(raw) > limit_bytes:
        fail(f"more than {limit_bytes} bytes", f"at most {limit_bytes}")
    if (found := placeholder(raw)) is not None:
        raise error(f"{path}: found {found}")
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


READABLE_METHODS = ("exl2", "gptq")
_GPTQ_CONFIG_FILES = ("quantize_config.json", "quant_config.json")  # where GPTQ tools leave their settings
# settings that change how GPTQ tensors are read, with all their names
_GPTQ_SETTINGS: dict[str, tuple[str, ...]] = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format"),
    "sym": ("sym",),
    "desc_act": ("desc_act",),
    "pack_dtype": ("pack_dtype",),
    "dynamic": ("dynamic",),
}
_CONVERT_ORIGINAL_HINT = "take the original unquantised model, and convert it with exl2nb where you want it small"
# quant_method in config.json: name of the format, and what to do
_REFUSED_METHODS = {
    "aqlm": ("AQLM", _CONVERT_ORIGINAL_HINT),
    "auto-round": ("AutoRound", f"take its export in GPTQ format, or {_CONVERT_ORIGINAL_HINT}"),
    "awq": ("AWQ", f"take a GPTQ or EXL2 version, or {_CONVERT_ORIGINAL_HINT}"),
    "bitblas": ("BitBLAS", _CONVERT_ORIGINAL_HINT),
    "bitnet": ("BitNet", "its ternary weights need an engine of their own"),
    "bitsandbytes": ("bitsandbytes", _CONVERT_ORIGINAL_HINT),
    "compressed-tensors": ("compressed-tensors", _CONVERT_ORIGINAL_HINT),
    "eetq": ("EETQ", _CONVERT_ORIGINAL_HINT),
    "exl3": ("EXL3", f"ExLlamaV3 reads it; here: {_CONVERT_ORIGINAL_HINT}"),
    "fbgemm_fp8": ("FP8 (FBGEMM)", f"take a bf16 version, or {_CONVERT_ORIGINAL_HINT}"),
    "fp8": ("FP8", f"take a bf16 version, or {_CONVERT_ORIGINAL_HINT}"),
    "fp_quant": ("FP-Quant", _CONVERT_ORIGINAL_HINT),
    "gguf": ("GGUF", f"llama.cpp reads it; here: {_CONVERT_ORIGINAL_HINT}"),
    "higgs": ("HIGGS", _CONVERT_ORIGINAL_HINT),
    "hqq": ("HQQ", _CONVERT_ORIGINAL_HINT),
    "modelopt": ("ModelOpt", _CONVERT_ORIGINAL_HINT),
    "mxfp4": ("MXFP4", f"take a bf16 version, or {_CONVERT_ORIGINAL_HINT}"),
    "quanto": ("Quanto", _CONVERT_ORIGINAL_HINT),
    "quark": ("Quark", _CONVERT_ORIGINAL_HINT),
    "spqr": ("SpQR", _CONVERT_ORIGINAL_HINT),
    "torchao": ("torchao", _CONVERT_ORIGINAL_HINT),
    "vptq": ("VPTQ", _CONVERT_ORIGINAL_HINT),
}
# ends of tensor names that only these formats have: for files whose config does not say
FOREIGN_TENSORS = {
    "weight_packed": "compressed-tensors",
    "weight.absmax": "bitsandbytes",
    "weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    "weight.quant_state.bitsandbytes__fp4": "bitsandbytes",
    "SCB": "bitsandbytes",
    "weight_scale_inv": "fp8",
    "W_q": "hqq",
    "codebooks": "aqlm",
    "trellis": "exl3",
    "weight_blocks": "mxfp4",
}


def with_quantization(directory: str | os.PathLike[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete `quantization_config`, and refuse a model in a format we do not read.

    Args:
        directory: the model directory; quantize_config.json and quant_config.json in it count.
        config: the content of its config.json.

    Returns:
        The config with `quantization_config` and a `quant_method` in it, "exl2" or "gptq"; without both for a plain model.

    Raises:
        ConfigError: another format, or two statements of one setting that differ; says which file states what, and what to do.
    """
    directory = Path(directory)
    blocks = {name: read_json(directory / name) for name in reversed(_GPTQ_CONFIG_FILES) if (directory / name).is_file()}
    own = config.get("quantization_config")
    blocks = {**({"config.json": own} if own else {}), **blocks}
    if not blocks:
        return dict(config)
    methods = {name: _method(name, block) for name, block in blocks.items()}
    if len(set(methods.values())) > 1:
        said = ", ".join(f"{name} says {method}" for name, method in methods.items())
        raise ConfigError(f"{directory}: {said}; expected one method for one model: remove the file that does not belong to these weights")
    method = next(iter(methods.values()))
    refuse(directory / next(iter(methods)), method)
    if method == "gptq":
        _check_agreement(directory, blocks)
    merged: dict[str, Any] = {}
    for block in blocks.values():
        merged |= {key: value for key, value in block.items() if value is not None or key not in merged}  # null states nothing
    return {**config, "quantization_config": {**merged, "quant_method": method}}


def _check_agreement(directory: Path, blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError where a setting is stated twice with different values, in two files or under two names.

    Other loaders disagree about which file wins. A wrong checkpoint_format shifts every zero point by one and gives noise without an error.
    """
    for setting, names in _GPTQ_SETTINGS.items():
        stated = [(file, name, block[name]) for file, block in blocks.items() for name in names if block.get(name) is not None]
        values = [str(value).removeprefix("torch.") if setting == "pack_dtype" else value for _, _, value in stated]
        if all(value == values[0] and isinstance(value, bool) == isinstance(values[0], bool) for value in values):
            continue
        said = ", ".join(f"{file} says {name} {str(value)[:60]}" for file, name, value in stated)
        raise ConfigError(
            f"{directory}: {said}; expected one value of {setting} for one model: correct or remove the statement that does not "
            "belong to these weights"
        )
    quantizers = {file: str(meta.get("quantizer")) for file, block in blocks.items() if isinstance(meta := block.get("meta"), Mapping)}
    if len({"gptqmodel" in quantizer.lower() for quantizer in quantizers.values()}) > 1:  # decides how zero points are unpacked
        said = ", ".join(f"{file} says meta.quantizer {quantizer[:60]}" for file, quantizer in quantizers.items())
        raise ConfigError(
            f"{directory}: {said}; expected one quantizer for one model: remove the file that does not belong to these weights"
        )


def refuse(where: object, method: str) -> None:
    """Raise ConfigError for a format we do not read; `where` is what named it."""
    if method in READABLE_METHODS:
        return
    name, remedy = _REFUSED_METHODS.get(method, (repr(method[:40]), _CONVERT_ORIGINAL_HINT))
    raise ConfigError(f"{where}: the weights are in format {name} ({method[:40]}); expected exl2, gptq or plain fp16/bf16/fp32: {remedy}")


def foreign_format(names: list[str]) -> str | None:
    """The format that these tensor names give away, as `refuse` calls it, or None."""
    for name in names:
        for end, method in FOREIGN_TENSORS.items():
            if name.endswith(f".{end}"):
                return method
    return None


def _method(file: str, block: Mapping[str, Any]) -> str:
    """What one file calls its method; older tools leave it to the name of the file."""
    for key in ("quant_method", "method", "quant_type"):
        value = block.get(key)
        if isinstance(value, str) and value:
            known = value.lower().replace("_", "-") if key == "quant_method" else value.lower()
            known = {"intel/auto-round": "auto-round", "fbgemm-fp8": "fbgemm_fp8", "fp-quant": "fp_quant"}.get(known, known)
            return "gptq" if known.startswith("gptq") else known
    if block.get("load_in_8bit") or block.get("load_in_4bit"):
        return "bitsandbytes"
    if block.get("version") in ("gemm", "gemv", "GEMM", "GEMV") or "zero_point" in block:
        return "awq"
    if file == "config.json" and not {"bits", "w_bit", "wbits"} & set(block):
        return "an unnamed one"
    return "gptq"
