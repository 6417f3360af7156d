"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them: packing reproduced from its documentation, sharing no code with the package.

Weights lie on a grid that is found again exactly: every column has a step that is a power of two. So a model whose weights were put on the
grid, then renamed and fused as real files are, can be quantised without a loss, and Transformers runs the very same weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from exl2nb.io.safetensors import save as save_tensors
from exl2nb.model.archs import parse_config
from exl2nb.model.layout import model_linears
from exl2nb.model.store import open_store


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is quantised and written."""

    bits: int = 4
    group_size: int = 32
    sym: bool = True
    act_order: bool = False
    version: str = "gptq"
    quantizer: str = ""
    g_idx: bool = True
    zero_biases: bool = False
    separate_config: bool = False
    scale_type: torch.dtype = torch.float16
    extra: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """What quantize_config.json says."""
        found = {"bits": self.bits, "group_size": self.group_size, "desc_act": self.act_order, "sym": self.sym, "lm_head": False}
        if self.version != "gptq":
            found["checkpoint_format"] = self.version
        if self.quantizer:
            found["meta"] = {"quantizer": [self.quantizer]}
        return {**found, **self.extra}


def on_grid(weight: Tensor, recipe: Recipe) -> Tensor:
    """An nn.Linear weight `(N, K)` rounded to a grid that `encode` finds again."""
    half = 1 << (recipe.bits - 1)
    zero = torch.full((len(weight), 1), half)
    if not recipe.sym:
        zero += torch.arange(len(weight))[:, None] % 3 - 1
    step = torch.exp2(torch.round(torch.log2(weight.abs().amax(1, keepdim=True) / half)))
    return step * (torch.round(weight / step) + zero).clamp(0, 2 * half - 1).sub(zero)


def encode(weight: np.ndarray, recipe: Recipe, seed: int = 0) -> dict[str, np.ndarray]:
    """Matrix `(K, N)` on the grid -> codes uint `(K, N)`, zeros and scales `(G, N)`, g_idx `(K,)`."""
    K, N = weight.shape
    size = K if recipe.group_size == -1 else recipe.group_size
    g_idx = np.arange(K) // size
    if recipe.act_order:
        g_idx = g_idx[np.random.default_rng(seed).permutation(K)]
    groups, top = -(-K // size), (1 << recipe.bits) - 1
    codes, zeros, scales = np.zeros((K, N), np.int64), np.zeros((groups, N), np.int64), np.zeros((groups, N), np.float64)
    for g in range(groups):
        block = weight[g_idx == g].astype(np.float64)
        step = _largest_step(block)
        levels = np.round(block / step).astype(np.int64)
        zero = np.full(N, top // 2 + 1) if recipe.sym else np.maximum(-levels.min(0), 0 if recipe.version == "gptq_v2" else 1)
        assert (levels + zero >= 0).all() and (levels + zero <= top).all()
        codes[g_idx == g], zeros[g], scales[g] = levels + zero, zero, step
    return {"codes": codes, "zeros": zeros, "scales": scales, "g_idx": g_idx}


def _largest_step(block: np.ndarray) -> np.ndarray:
    """The largest power of two of each column that divides all its values; 1 for a column of zeros."""
    whole = np.round(np.abs(block) * 2.0**40).astype(np.int64)
    bits = np.bitwise_or.reduce(whole, 0)
    return np.where(bits == 0, 2.0**40, bits & -bits) / 2.0**40


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes `(K, N)` -> int32 words: the bits of all codes of a column in a row, lowest first; at 3 bits a code may lie in two words."""
    K, N = codes.shape
    stream = (codes[:, None] >> np.arange(bits)[None, :, None]) & 1
    stream = np.pad(stream.reshape(K * bits, N), ((0, -K * bits % 32), (0, 0))).reshape(-1, 32, N)
    return (stream << np.arange(32)[None, :, None]).sum(1).astype(np.uint32).view(np.int32)


def pack_zeros(zeros: np.ndarray, recipe: Recipe) -> np.ndarray:
    """True zeros `(G, N)` -> int32 `(G, words)`."""
    bits = recipe.bits
    if recipe.version == "gptq_v2":
        return np.ascontiguousarray(pack_rows(zeros.T, bits).T)
    if "gptqmodel" in recipe.quantizer and bits != 3:  # borrows from the whole word
        words = np.ascontiguousarray(pack_rows(zeros.T, bits).T).view(np.uint32)
        return (words - np.uint32(sum(1 << shift for shift in range(0, 32, bits)))).view(np.int32)
    return np.ascontiguousarray(pack_rows((zeros - 1).T % (1 << bits), bits).T)


def tensors(prefix: str, weight: np.ndarray, recipe: Recipe, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of one module, `weight` `(K, N)`."""
    parts = encode(weight, recipe, seed)
    found = {
        f"{prefix}.qweight": torch.from_numpy(pack_rows(parts["codes"], recipe.bits)),
        f"{prefix}.qzeros": torch.from_numpy(pack_zeros(parts["zeros"], recipe)),
        f"{prefix}.scales": torch.from_numpy(parts["scales"]).to(recipe.scale_type),
    }
    if recipe.g_idx or recipe.act_order:
        found[f"{prefix}.g_idx"] = torch.from_numpy(parts["g_idx"].astype(np.int32))
    return found


def _matrix(name: str) -> bool:
    return "norm" not in name.replace("norm_attn_norm", "")


def put_on_grid(model: Any, recipe: Recipe) -> None:
    """Round every matrix of the layers of a Transformers model, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() in (2, 3) and any(part in name for part in (".layers.", ".h.", ".blocks.")) and _matrix(name):
                turned = "GPT2LM" in type(model).__name__
                rows = parameter.T if turned else parameter.flatten(0, -2)  # experts may lie in one tensor, one after the other
                if name.endswith("experts.mlp.w2"):  # DBRX: each (inputs, outputs)
                    experts = parameter.view(model.config.ffn_config.moe_num_experts, -1, parameter.shape[-1]).transpose(1, 2)
                    value = on_grid(experts.flatten(0, 1), recipe).view(experts.shape).transpose(1, 2)
                    parameter.copy_(value.reshape(parameter.shape))
                    continue
                value = on_grid(rows, recipe)
                parameter.copy_(value.T if turned else value.view(parameter.shape))


def split_experts(dense: Path, directory: Path) -> Path:
    """DBRX as the GPTQ tools want it ("converted"): a linear for each expert, and q, k and v apart, under DBRX's own names."""
    raw = json.loads((dense / "config.json").read_text())
    config = parse_config(raw)
    with open_store(config, dense) as store:
        found = {name: store.read(name) for name in store.names()}
    for old, new in reversed(config.files.renames):
        found = {name.replace(new, old): tensor for name, tensor in found.items()}
    directory.mkdir(parents=True)
    save_tensors(directory / "model.safetensors", found)
    (directory / "config.json").write_text(json.dumps({**raw, "model_type": "dbrx_converted"}))
    return directory


def write_gptq(dense: Path, directory: Path, recipe: Recipe, *, shards: int = 1, head: bool = False) -> Path:
    """Quantise the layers (and the head) of a dense checkpoint whose weights lie on the grid."""
    raw = json.loads((dense / "config.json").read_text())
    config = parse_config(raw)
    keys = {linear.key for linear in model_linears(config) if linear.role != "head" or head}
    source: dict[str, Tensor] = {}
    for path in sorted(dense.glob("*.safetensors")):
        source |= load_file(path)
    with open_store(config, dense) as store:
        names = store.names()
        homes = {store.source(name) for name in names if name.endswith(".weight") and name.removesuffix(".weight") in keys}
        biased = {store.source(name) for name in names if name.endswith(".bias")}
    out: dict[str, Tensor] = {}
    for n, (name, tensor) in enumerate(source.items()):
        stem = name.removesuffix(".weight")
        if name not in homes:
            out[name] = tensor
            continue
        matrix = tensor if config.files.transposed else tensor.T
        out |= tensors(stem, matrix.float().numpy(), recipe, seed=n // 8)
        if recipe.zero_biases and f"{stem}.bias" not in biased:
            out[f"{stem}.bias"] = torch.zeros(matrix.shape[1], dtype=torch.float16)
    directory.mkdir(parents=True, exist_ok=True)
    settings = recipe.settings()
    if recipe.separate_config:
        (directory / "quantize_config.json").write_text(json.dumps(settings))
    else:
        raw["quantization_config"] = {"quant_method": "gptq", **settings}
    (directory / "config.json").write_text(json.dumps(raw))
    names = list(out)
    table = {}
    for i in range(shards):
        file = "gptq_model-4bit.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_tensors(directory / file, {name: out[name].contiguous() for name in part})
        table |= dict.fromkeys(part, file)
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return directory
