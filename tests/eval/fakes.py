"""A model whose logits are a fixed function of token and position: what evaluation must get right is then plain arithmetic."""

from types import SimpleNamespace

import torch

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec


class TableModel:
    """logits(token, position) = table[token] + position * slope."""

    def __init__(self, table, *, slope=0.0, context=64):
        self.table, self.slope, self.context, self.device, self.rope_switch = table, slope, context, "cpu", None
        self.config = SimpleNamespace(vocab_size=table.shape[1])
        self.calls = []

    def cache_spec(self, num_tokens, *, mode="fp16"):
        assert mode == "fp32", "evaluation runs on an FP32 cache"
        return CacheSpec(1, 1, 8, -(-num_tokens // 256), mode)

    def new_cache(self, spec):
        return KVCache(spec)

    def forward(self, batch, cache):
        positions = batch.positions.tolist()
        self.calls.append((positions[0], len(positions), int(batch.context_lens[0])))
        bias = torch.arange(self.config.vocab_size) * self.slope
        return self.table[batch.input_ids.long()] + batch.positions[:, None] * bias


def random_table(seed, vocab=11):
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))
