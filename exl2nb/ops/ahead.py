"""Steps of the CPU engine that draw their own tokens. Knows nothing about models.

`step_draw` runs a step to its end and draws. `draw_ahead` begins a step and returns at once; what it returned is written when `join_ahead`
has returned, which takes part in the step instead of waiting for it. Steps run in the order in which they were begun, so a step may ask for
what the one before it draws. The torch reference, which has no threads, runs the step at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops._library import REFERENCES, check, define, dynamic_size

_BATCH = (
    "Tensor program, Tensor ids, Tensor positions, Tensor slots, Tensor block_table, Tensor cu_seqlens, Tensor context_lens, "
    "Tensor logit_rows, Tensor(a!)[] k_pools, Tensor(b!)[] v_pools, Tensor settings, int top"
)
_OPTIONS = "Tensor? lora=None, Tensor? adapters=None, int? columns=None"
MOST_ROWS = 32
"""Tokens of a step at most."""


def _step_draw(*arguments: Any) -> tuple[Tensor, Tensor]:
    batch, (settings, top, *options) = arguments[:10], arguments[10:]
    logits = REFERENCES["decode_step"](*batch, *options[:2])
    return REFERENCES["draw_rows"](logits, settings, None, min(top, logits.shape[1]), *options[2:]), logits


def _draw_ahead(program: Tensor, ids: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    batch, (settings, top, feed, previous, *options) = arguments[:8], arguments[8:]  # batch: as `decode_step` takes it
    check(len(ids) <= MOST_ROWS, "draw_ahead", "tokens", len(ids), f"at most {MOST_ROWS}")
    check((feed is None) == (previous is None), "draw_ahead", "feed and previous", "one of them", "both or none")
    if feed is not None and previous is not None:
        check(bool((feed < len(previous)).all()), "draw_ahead", "feed", feed.tolist(), f"-1 to {len(previous) - 1}")
        drawn = previous[:, 0].clamp(min=0).to(torch.int32)
        ids = torch.where(feed >= 0, drawn[feed.clamp(min=0).long()], ids)
    logits = REFERENCES["decode_step"](program, ids, *batch, *options[:2])
    return REFERENCES["draw_rows"](logits, settings, None, top, *options[2:]), logits


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows, settings, top = arguments[7].shape[0], arguments[10], arguments[11]
    return settings.new_empty(rows, 4 + 2 * top), torch.empty(rows, dynamic_size())


step_draw = define(f"step_draw({_BATCH}, {_OPTIONS}) -> (Tensor, Tensor)", fake=_fake, reference=_step_draw)
"""`decode_step`, then `draw_rows` of its logits with at most `top` alternatives: what that returns, and the logits.

columns: as `draw_rows` takes it.
"""

draw_ahead = define(
    f"draw_ahead({_BATCH}, Tensor? feed, Tensor? previous, {_OPTIONS}) -> (Tensor, Tensor)", fake=_fake, reference=_draw_ahead
)
"""Begin a `decode_step` whose tokens are drawn as `draw_rows` draws them: what that returns, and the logits.

feed: int32 `(T,)` or None. feed[t] = r: the token is the one of row r of `previous`, what the step begun before this one returned; -1: it
is `ids[t]`. columns: as `draw_rows` takes it. The batch's tensors may change as soon as this returns; what the program's addresses lead
to must live until `join_ahead`.
"""

join_ahead = define("join_ahead(Tensor(a!) drawn) -> ()", fake=lambda drawn: None, reference=lambda drawn: None)
"""Wait until the step that returned `drawn` is complete; harmless when repeated."""
