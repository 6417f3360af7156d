"""Attention of whole rows in plain products, for gradients that are the same every time. Knows nothing of what learns.

On a GPU torch's fused kernels sum gradients in an order that varies; its unfused path also computes masked scores, and passes over all of
them more often. On a CPU its fused kernel takes twice as long as these products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl2nb.model.config import ModelConfig

QUERIES = 256  # that attend at once, to the keys up to the last of them


class DenseAttention:
    """Causal attention of rows of `length` tokens, all from position 0 on; `past` of `reference.block`, though nothing is cached."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        self._config, self.context = config, length
        self.positions = torch.arange(length, device=device)
        self._masks: dict[tuple[int, ...], Tensor] = {}  # kept as long as this: a recorded step reads them

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the reference does, `(B, Hq, S, D)`; query heads of a KV head are more queries of it."""
        config, groups, window = self._config, q.shape[1] // k.shape[1], self._config.windows[layer]
        cap, found = config.attention_softcap, []
        q = (q * config.attention_scale).unflatten(1, (k.shape[1], groups))
        for first in range(0, self.context, QUERIES):
            last = min(first + QUERIES, self.context)
            begin = max(0, first - window + 1) if window > 0 else 0
            keys, values = k[:, :, begin:last], v[:, :, begin:last]
            scores = q[:, :, :, first:last].flatten(2, 3) @ keys.transpose(2, 3)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            probabilities = scores.add_(self._mask(begin, first, last, window, groups)).softmax(-1)
            found.append((probabilities @ values).unflatten(2, (groups, last - first)))
        return torch.cat(found, dim=3).flatten(1, 2)

    def _mask(self, begin: int, first: int, last: int, window: int, groups: int) -> Tensor:
        """What keeps queries `first` to `last` of each head from keys that they may not see: f32 `(groups * n, last - begin)`."""
        made = self._masks.get((begin, first, last, window, groups))
        if made is None:
            query, key = self.positions[first:last, None], self.positions[begin:last]
            hidden = (key > query) | (key <= query - window) if window > 0 else key > query
            made = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf).repeat(groups, 1)
            self._masks[begin, first, last, window, groups] = made
        return made
