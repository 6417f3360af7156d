"""Text that the dense model writes, many rows at once: the reference network with keys and values kept. Knows nothing of files.

What a model writes at temperature 1 is text of the distribution that it learned, and there is no end of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.model import reference
from exl2nb.model.config import ModelConfig

BEGINNING = 8  # tokens of a text that a row begins with
BYTES = {"cpu": 1 << 29, "cuda": 8 << 30}  # of keys, values and predictions: rows that are written together are as many as fit
MOST = 4096  # rows at once


def rows_at_once(config: ModelConfig, length: int, device: torch.device) -> int:
    """Rows of `length` tokens that are written together."""
    most = BYTES[device.type]
    if device.type == "cuda" and torch.cuda.is_available():
        most = min(most, torch.cuda.get_device_properties(device).total_memory // 4)
    return max(1, min(MOST, most // _row_bytes(config, length, device)))


def writing_bytes(config: ModelConfig, length: int, device: torch.device) -> int:
    """Memory that rows which are written together take, the model's weights not counted."""
    return rows_at_once(config, length, device) * _row_bytes(config, length, device)


def _row_bytes(config: ModelConfig, length: int, device: torch.device) -> int:
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * length * _dtype(device).itemsize
    return cache + 12 * config.vocab_size + 4 * (8 * config.hidden_size + 4 * config.intermediate_size)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.float16


class _Past:
    """Keys and values of all layers, `(B, Hkv, S, D)` each (reference.Past)."""

    def __init__(self, config: ModelConfig, rows: int, context: int, device: torch.device) -> None:
        self._config, self.context, self.length = config, context, 0
        shape = (config.num_layers, 2, rows, config.num_kv_heads, context, config.head_dim)
        self._held = torch.empty(shape, dtype=_dtype(device), device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One more token of every row; all query heads of a KV head attend as if they were queries of one."""
        config, held, last = self._config, self._held[layer], self.length + 1
        held[0, :, :, self.length], held[1, :, :, self.length] = k[:, :, 0], v[:, :, 0]
        first = max(0, last - config.windows[layer]) if config.windows[layer] > 0 else 0
        keys, values = held[:, :, :, first:last]
        queries = q[:, :, 0].unflatten(1, (k.shape[1], -1)).to(held.dtype)  # (B, Hkv, Hq / Hkv, D)
        if config.attention_softcap:
            cap = config.attention_softcap
            scores = cap * torch.tanh((queries @ keys.transpose(-1, -2)).float() * (config.attention_scale / cap))
            mixed = scores.softmax(-1).to(held.dtype) @ values
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, scale=config.attention_scale)
        return mixed.float().flatten(1, 2)[:, :, None]


def write_rows(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    beginnings: Tensor,
    length: int,
    seed: int,
    step: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """Continue every row at temperature 1, nothing filtered.

    Args:
        weights: of the dense model, by name.
        beginnings: int `(R, P)`, what each row begins with.
        length: tokens of a row when it is finished.
        step: called with the number of tokens that were added, again and again.

    Returns:
        int32 `(R, length)` on the CPU; the same for the same arguments on the same machine.
    """
    device = weights[f"{config.names.embed}.weight"].device
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for begin in beginnings.split(rows_at_once(config, length, device)):
        ids = torch.empty(len(begin), length, dtype=torch.int64, device=device)
        ids[:, : begin.shape[1]] = begin.to(device)
        past = _Past(config, len(begin), length, device)
        for at in range(length - 1):
            x = reference.embed(config, weights, ids[:, at : at + 1], at)
            for layer in range(config.num_layers):
                x = reference.block(config, layer, weights, x, past=past)
            past.length += 1
            if at + 1 >= begin.shape[1]:
                logits = reference.head(config, weights, reference.final_norm(config, weights, x[:, 0]))
                ids[:, at + 1] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            step(len(begin))
        made.append(ids.to(torch.int32).cpu())
    return torch.cat(made) if made else torch.empty(0, length, dtype=torch.int32)
