"""One choice as seen by functions that watch sampling: what it was made from, and a way to change it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from exl2nb.core.errors import GenerationError, OptionError

if TYPE_CHECKING:
    from exl2nb.sampling.explanation import Explanation
    from exl2nb.sampling.state import SamplerState


class Draw:
    """What a `post_sampling` function is given, after the draw and before the token is taken. Runs on the engine's thread: be quick.

    Attributes:
        id: the token that was drawn; an earlier function may have changed it. logits: f32 `(V,)`, raw; to be copied, not kept or changed.
        index: which new token of its request it is, from 0.
    """

    def __init__(self, token_id: int, logits: np.ndarray, state: SamplerState) -> None:
        self.id, self.logits, self.index = token_id, logits, state.count
        self._state = state

    @cached_property
    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int64, ascending) and probabilities (f64) of the tokens it was drawn from."""
        last = self.explain().steps[-2 if self._state.params.greedy else -1]
        return last.ids, last.after

    @property
    def prob(self) -> float:
        """Probability of the token among the candidates; 0 if it is none of them."""
        ids, probs = self.candidates
        return float(probs[ids == self.id].sum())

    def explain(self) -> Explanation:
        """Every step from the logits to the token."""
        from exl2nb.sampling.explainer import explain_state

        return explain_state(self.logits, self._state)


def after_draw(token_id: int, logits: np.ndarray, state: SamplerState) -> int:
    """Ask the request's functions, in order; each may return another id.

    Raises:
        OptionError: one returned what is no id. GenerationError: the grammar does not allow what it returned, or it raised
        what is no Exception (SystemExit, KeyboardInterrupt).
    """
    draw = Draw(token_id, logits, state)
    for hook in state.params.post_sampling:
        try:
            answer = hook(draw)
        except Exception:
            raise
        except BaseException as error:  # SystemExit and its like: meant for this request, not for the engine's thread
            raise GenerationError(f"a post_sampling function raised {type(error).__name__}: {error}") from error
        if answer is None:
            continue
        if isinstance(answer, bool) or not isinstance(answer, (int, np.integer)) or not 0 <= answer < len(logits):
            raise OptionError(f"a post_sampling function returned {answer!r}; expected None or a token id from 0 to {len(logits) - 1}")
        draw.id = int(answer)
        draw.__dict__.pop("candidates", None)
    if draw.id != token_id and state.constraint is not None and draw.id not in state.allowed():
        raise GenerationError(
            f"a post_sampling function chose token {draw.id}, which the structure does not allow here; return None instead"
        )
    return draw.id
