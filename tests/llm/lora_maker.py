"""Random adapters for a loaded model, as PEFT writes them."""

from pathlib import Path

import torch

from exl2nb.model.layout import layer_linears
from exl2nb.model.lora import save_lora


def write_lora(directory: Path, config, *, seed: int = 0, rank: int = 4, alpha: float = 8.0, size: float = 0.5) -> Path:
    """A directory with a random adapter of every matrix of every layer. size: of the change, against the weights'."""
    g = torch.Generator().manual_seed(seed)
    pairs = {}
    for layer in range(config.num_layers):
        for linear in layer_linears(config, layer).values():
            n, k = linear.shape
            a, b = torch.randn(rank, k, generator=g) * k**-0.5, size * torch.randn(n, rank, generator=g) * (rank / alpha)
            pairs[linear.key] = (a.half(), b.half())
    return save_lora(directory, pairs, alpha=alpha)
