"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define


def _embed(table: Tensor, ids: Tensor, scale: float = 1.0, position_table: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    inside = ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < table.shape[0])
    check(inside, "embed", "a token id", ids.tolist()[:8], f"0 to {table.shape[0] - 1}")
    if position_table is not None:
        check(positions is not None, "embed", "positions", None, "one position per token")
        assert positions is not None
        inside = positions.numel() == 0 or (int(positions.min()) >= 0 and int(positions.max()) < len(position_table))
        check(inside, "embed", "a position", positions.tolist()[:8], f"0 to {len(position_table) - 1}")
    return reference.embed(table, ids, scale, position_table, positions)


_embed_op = define(
    "embed(Tensor table, Tensor ids, float scale=1.0, Tensor? position_table=None, Tensor? positions=None) -> Tensor",
    fake=lambda table, ids, scale=1.0, position_table=None, positions=None: table.new_empty(
        ids.shape[0], table.shape[1], dtype=torch.float32
    ),
    reference=_embed,
)


def embed(
    table: Tensor, ids: Tensor, *, scale: float = 1.0, position_table: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Rows `ids` int32 `(T,)` of table `(V, H)` f16, bf16 or f32, times `scale` -> f32 `(T, H)`.

    Learned positions: the rows `positions` int32 `(T,)` of `position_table` `(max_pos, H)` are added. An id or position outside its table
    raises.
    """
    return _embed_op(table, ids, scale, position_table, positions)
