"""Random adapters for a loaded model, as PEFT writes them."""

import json
from pathlib import Path

import torch

from exl2nb.io.safetensors import save
from exl2nb.model.layout import layer_linears


def write_lora(directory: Path, config, *, seed: int = 0, rank: int = 4, alpha: float = 8.0, size: float = 0.5, roles=None) -> Path:
    """A directory with a random adapter of every matrix of every layer, or of some roles. size: of the change, against the weights'."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for role, linear in layer_linears(config, layer).items():
            if roles is None or role in roles:
                stem, (n, k) = f"base_model.model.{linear.key}", linear.shape
                tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, k, generator=g) * k**-0.5
                tensors[f"{stem}.lora_B.weight"] = size * torch.randn(n, rank, generator=g) * (rank / alpha)
    directory.mkdir(parents=True, exist_ok=True)
    save(directory / "adapter_model.safetensors", {name: tensor.half() for name, tensor in tensors.items()})
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}))
    return directory
