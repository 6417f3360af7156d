"""An answer whose logits were kept, drawn again: every choice of it can be explained, also under other settings. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.options import make
from exl2nb.sampling.explainer import Pieces, explain_state
from exl2nb.sampling.explanation import Explanation
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.rng import fresh_seed
from exl2nb.sampling.state import SamplerState


@dataclass(frozen=True, eq=False, kw_only=True)
class Replay:
    """The rows of logits that an answer was drawn from, and all else that its choices depend on.

    logits: f32 `(n, V)`, raw, one row per place. new_ids: the tokens that stand there; one fewer than rows where the last is still to be
    drawn. prompt_ids: what stood before them. tokenizer: names tokens, and tells which of them DRY, XTC and min_tokens treat apart.

    Raises:
        OptionError: logits of another shape, or new_ids of another number.
    """

    logits: np.ndarray
    new_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    tokenizer: Pieces | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        rows, count = self.logits, len(self.new_ids)
        if rows.ndim != 2 or not rows.size or count not in (len(rows), len(rows) - 1):
            raise OptionError(f"logits have the shape {rows.shape} beside {count} tokens; expected one row (V,) for each, or one row more")

    @classmethod
    def of(
        cls, logits: np.ndarray | Tensor, new_ids: Iterable[int] = (), prompt_ids: Iterable[int] = (), *, tokenizer: Pieces | None = None
    ) -> Replay:
        """From a row `(V,)`, whose token is the next one, or from all rows `(n, V)` of an answer."""
        rows = logits.detach().to("cpu").float().numpy() if isinstance(logits, Tensor) else np.asarray(logits, np.float32)
        ids = tuple(new_ids)
        if rows.ndim == 1:
            rows = np.concatenate([np.zeros((len(ids), len(rows)), np.float32), rows[None]])
        return cls(logits=rows, new_ids=ids, prompt_ids=tuple(prompt_ids), tokenizer=tokenizer)

    def __len__(self) -> int:
        return len(self.logits)

    def explain(self, at: int, params: SamplingParams | None = None, **options: Any) -> Explanation:
        """How the token at place `at` is chosen under these settings, after the tokens that stand before it.

        With the settings and the seed of the answer, it is the token of the answer. Settings of mirostat, which remembers, are carried
        through all places before.

        Raises:
            OptionError: no such place, or settings that contradict each other. GenerationError: no token is left.
        """
        if not 0 <= at < len(self):
            raise OptionError(f"at is {at}; expected 0 to {len(self) - 1}")
        params = make(SamplingParams, options, where="explain") if params is None else params
        params.check_vocabulary(self.logits.shape[1], where="explain")
        ends = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        state = SamplerState(params, self.prompt_ids, tokenizer=self.tokenizer, end_ids=ends)
        for place in range(at):
            if params.mirostat and self.logits[place].any():
                prob = explain_state(self.logits[place], state).steps[-1].prob_of(self.new_ids[place])
                if prob > 0:  # under other settings it may be none of the candidates
                    state.drawn(prob)
            state.push(self.new_ids[place])
        return explain_state(self.logits[at], state, tokenizer=self.tokenizer)


def seeded(params: SamplingParams) -> SamplingParams:
    """The same settings with a seed, so that looking twice shows the same."""
    return params if params.seed is not None else replace(params, seed=fresh_seed() >> 32)
