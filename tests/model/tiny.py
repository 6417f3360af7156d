"""Tiny random models: written by Transformers, with every feature a test asks for."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exl2nb.io.safetensors import SafetensorsFile
from exl2nb.io.safetensors import save as save_tensors
from exl2nb.model.archs import parse_config
from exl2nb.model.layout import model_linears
from exl2nb.quant.exl2 import Exl2Tensors, encode

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
CASES = {
    "llama": ("llama", {}),
    "llama-mha-biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 24}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("mistral", {"sliding_window": 13}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
}


def twin(kind: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A random Transformers model of `kind` in fp32, biases and norms included, on the eager attention path."""
    import transformers

    stem = CLASSES[kind]
    config = getattr(transformers, f"{stem}Config")(**{**BASE, **changes}, attn_implementation="eager")
    config.architectures = [f"{stem}ForCausalLM"]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    return randomize(model, seed)


@torch.no_grad()
def randomize(model: Any, seed: int, *, norm: float = 1.0, inputs: int = -1) -> Any:
    """Random parameters: norms around `norm`, biases, embeddings, and matrices scaled by the size of their dim `inputs`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        elif "norm" in name.replace("norm_attn_norm", "") or ".ln_" in name:
            parameter.copy_(norm + 0.2 * noise)
        else:
            parameter.copy_(noise * (1.0 if any(part in name for part in ("embed", ".wte", ".wpe")) else parameter.shape[inputs] ** -0.5))
    return model


def save(model: Any, directory: Path, *, dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    """Write `model` as Transformers writes it; its parameters are rounded to `dtype` on the way. Returns the directory."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def raw_config(model: Any) -> dict[str, Any]:
    """What its config.json holds."""
    return json.loads(model.config.to_json_string(use_diff=False))


def ids_of(vocab: int, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids `(rows, length)` int64."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def truth(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Transformers' logits f32."""
    return model(ids, use_cache=False).logits.float()


def random_exl2(in_features: int, out_features: int, widths: Sequence[int], *, seed: int, size: float = 0.02) -> Exl2Tensors:
    """A matrix of random codes and scales: one group of 32 rows per width in turn (falling), random permutation."""
    generator = torch.Generator().manual_seed(seed)
    chosen = sorted((widths[g % len(widths)] for g in range(in_features // 32)), reverse=True)
    codes = torch.cat([torch.randint(0, 1 << bits, (32, out_features), generator=generator) for bits in chosen]).to(torch.uint8)
    index = torch.randint(0, 16, (len(chosen), out_features), generator=generator).to(torch.uint8)
    # the same spread of weights at every width: a b-bit code reaches 2^(b-1) steps
    scale_max = torch.tensor([size * 8 / (1 << (bits - 1)) for bits in chosen]) * (0.5 + torch.rand(len(chosen), generator=generator))
    perm = torch.randperm(in_features, generator=generator)
    return encode(codes, index, scale_max.half(), [(bits, 32) for bits in chosen], perm)


def save_exl2(model: Any, directory: Path, *, seed: int = 0, widths: Sequence[int] = (8, 6, 5, 4, 3, 2), head: bool = True) -> Path:
    """Replace every linear of `model` by a random EXL2 matrix and write it; `model` then holds the reconstructed weights."""
    config = parse_config(raw_config(model))
    tensors = {name: value.half() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if head and config.tie_word_embeddings:  # the file then has a head of its own
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for n, linear in enumerate(model_linears(config)):
        if linear.role == "head" and not head:
            continue
        exl2 = random_exl2(linear.in_features, linear.out_features, widths, seed=seed * 1000 + n)
        tensors.pop(f"{linear.key}.weight", None)
        tensors |= exl2.tensors(linear.key)
        model.get_submodule(linear.key).weight.data = exl2.reconstruct()[:, : linear.out_features].T.float().contiguous()
    model.load_state_dict({name: value for name, value in tensors.items() if not name.rpartition(".")[2].startswith("q_")}, strict=False)
    raw = raw_config(model) | {"tie_word_embeddings": config.tie_word_embeddings, "quantization_config": {"quant_method": "exl2"}}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_tensors(directory / "output.safetensors", tensors)
    return directory


def edit(directory: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """Replace, add or (None) remove tensors of a directory with one file."""
    (path,) = directory.glob("*.safetensors")
    with SafetensorsFile(path) as file:
        tensors = {name: file.read(name).clone() for name in file.names()} | changes
    save_tensors(path, {name: value for name, value in tensors.items() if value is not None})
    return directory


def configure(directory: Path, **changes: Any) -> Path:
    """Change keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory
