"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define


def _embed(table: Tensor, ids: Tensor) -> Tensor:
    inside = ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < table.shape[0])
    check(inside, "embed", "a token id", ids.tolist()[:8], f"0 to {table.shape[0] - 1}")
    return reference.embed(table, ids)


_embed_op = define(
    "embed(Tensor table, Tensor ids) -> Tensor",
    fake=lambda table, ids: table.new_empty(ids.shape[0], table.shape[1], dtype=torch.float32),
    reference=_embed,
)


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` int32 `(T,)` of table `(V, H)` f16, bf16 or f32 -> f32 `(T, H)`. An id outside the table raises."""
    return _embed_op(table, ids)
