"""Tiny random models: written by Transformers, with every feature a test asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

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


def twin(kind: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A random Transformers model of `kind` in fp32, biases and norms included, on the eager attention path."""
    import transformers

    stem = CLASSES[kind]
    config = getattr(transformers, f"{stem}Config")(**{**BASE, **changes}, attn_implementation="eager")
    config.architectures = [f"{stem}ForCausalLM"]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5 if "embed" not in name else 1.0))
    return model


def save(model: Any, directory: Path, *, dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    """Write `model` as Transformers writes it; returns the directory."""
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
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
