"""Which method a checkpoint was quantised with, from config.json and the files that older tools wrote beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl2nb.core.errors import ConfigError
from exl2nb.io.hf_config import read_json

READ = ("exl2", "gptq")
# where GPTQ tools leave their settings; what stands in the first ones wins
_BESIDE = ("quantize_config.json", "quant_config.json")
_ORIGINAL = "take the original unquantised model, and convert it with exl2nb where you want it small"
# quant_method in config.json: name of the format, and what to do
_REFUSED = {
    "aqlm": ("AQLM", _ORIGINAL),
    "auto-round": ("AutoRound", f"take its export in GPTQ format, or {_ORIGINAL}"),
    "awq": ("AWQ", f"take a GPTQ or EXL2 version, or {_ORIGINAL}"),
    "bitblas": ("BitBLAS", _ORIGINAL),
    "bitnet": ("BitNet", "its ternary weights need an engine of their own"),
    "bitsandbytes": ("bitsandbytes", _ORIGINAL),
    "compressed-tensors": ("compressed-tensors", _ORIGINAL),
    "eetq": ("EETQ", _ORIGINAL),
    "exl3": ("EXL3", f"ExLlamaV3 reads it; here: {_ORIGINAL}"),
    "fbgemm_fp8": ("FP8 (FBGEMM)", f"take a bf16 version, or {_ORIGINAL}"),
    "fp8": ("FP8", f"take a bf16 version, or {_ORIGINAL}"),
    "fp_quant": ("FP-Quant", _ORIGINAL),
    "gguf": ("GGUF", f"llama.cpp reads it; here: {_ORIGINAL}"),
    "higgs": ("HIGGS", _ORIGINAL),
    "hqq": ("HQQ", _ORIGINAL),
    "modelopt": ("ModelOpt", _ORIGINAL),
    "mxfp4": ("MXFP4", f"take a bf16 version, or {_ORIGINAL}"),
    "quanto": ("Quanto", _ORIGINAL),
    "quark": ("Quark", _ORIGINAL),
    "spqr": ("SpQR", _ORIGINAL),
    "torchao": ("torchao", _ORIGINAL),
    "vptq": ("VPTQ", _ORIGINAL),
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
        ConfigError: another format, or files that name different ones; says which file names what, and what to do.
    """
    directory = Path(directory)
    blocks = {name: read_json(directory / name) for name in reversed(_BESIDE) if (directory / name).is_file()}
    own = config.get("quantization_config")
    blocks = {**({"config.json": own} if own else {}), **blocks}
    if not blocks:
        return dict(config)
    methods = {name: _method(name, block) for name, block in blocks.items()}
    if len(set(methods.values())) > 1:
        said = ", ".join(f"{name} says {method}" for name, method in methods.items())
        raise ConfigError(f"{directory}: {said}; expected one method for one model: remove the file that does not belong to these weights")
    merged = {key: value for block in blocks.values() for key, value in block.items()}
    method = next(iter(methods.values()))
    refuse(directory / next(iter(methods)), method)
    return {**config, "quantization_config": {**merged, "quant_method": method}}


def refuse(where: object, method: str) -> None:
    """Raise ConfigError for a format we do not read; `where` is what named it."""
    if method in READ:
        return
    name, remedy = _REFUSED.get(method, (repr(method[:40]), _ORIGINAL))
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
