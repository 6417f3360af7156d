"""One draw from a row of logits with tokens taken out of it for this one position. Knows no text."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from exl2nb.core.errors import GenerationError
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.draw import Sampled, highest_logit, report
from exl2nb.sampling.state import SamplerState


def choose(
    row: np.ndarray, state: SamplerState, *, top: int = 0, banned: Collection[int] = (), allowed: np.ndarray | None = None
) -> tuple[Sampled, bool]:
    """Draw a token and push it to the state.

    Args:
        row: f32 `(V,)`, raw logits; not changed.
        state: of the request.
        top: alternatives to report.
        banned: ids that must not be drawn here.
        allowed: int64 ids; the only ones that may be drawn. None = all.

    Returns:
        The choice, its log probability and rank under the raw row; and whether the masks or the structure left only this one.

    Raises:
        GenerationError: the masks leave nothing.
    """
    if not banned and allowed is None:
        return sample_row(row, state, top=top), state.forced
    masked = row.copy() if allowed is None else np.full_like(row, -np.inf)
    if allowed is not None:
        masked[allowed] = row[allowed]
    if banned:
        masked[list(banned)] = -np.inf
    left = int(np.isfinite(masked).sum())
    if not left:
        raise GenerationError(f"every token is ruled out at one place ({len(banned)} by banned_strings or min_tokens); ban fewer texts")
    chosen = sample_row(masked, state)
    return report(row, highest_logit(row), chosen.id, top), left == 1
