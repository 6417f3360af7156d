"""A step on the GPU that shows what passes, under the names that the readable forward uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import Batch
from exl2nb.ops import gpu_prefill


def watched(program: ops.Program, batch: Batch, cache: KVCache, observe: Callable[[str, Tensor], None] | None) -> Tensor:
    """Logits f32 `(R, V)` of a batch on the GPU, before the softcap. observe: see `Model.forward_by_ops`."""
    names = ("input_ids", "positions", "slot_mapping", "block_table", "cu_seqlens", "context_lens", "logit_rows")
    inputs = gpu_prefill.Inputs(*[getattr(batch, name) for name in names])
    sequences = gpu_prefill.Sequences(batch.cu_seqlens.tolist(), batch.context_lens.tolist())
    watch = None if observe is None else _Points(observe)
    return gpu_prefill.prefill(program, inputs, sequences, cache.k, cache.v, watch=watch)


class _Points:
    """Knows where in a program the points are: a layer adds to the residual stream twice, after attention and after its MLP."""

    def __init__(self, observe: Callable[[str, Tensor], None]) -> None:
        self._observe = observe
        self._layer = self._added = 0

    def __call__(self, name: str, arguments: dict[str, Any], x: Tensor, mixed: Tensor | None) -> None:
        if name == "embed":
            self._observe("embedding", x)
        elif name == "paged_attention" and mixed is not None:
            self._layer, self._added = arguments["layer"], 0
            self._observe(f"layers.{self._layer}.attention", mixed)
        elif name in ("linear_residual", "routed_mlp"):
            self._added += 1
            self._observe(f"layers.{self._layer}.{'middle' if self._added == 1 else 'output'}", x)
