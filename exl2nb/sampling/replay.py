"""Run the chain slowly, on whole rows, and record each step: for one row (`explain`), for every token of an answer (`Replay`), for a
`post_sampling` function (`Draw`). Draws what generation draws; changes no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exl2nb.core.errors import GenerationError, OptionError
from exl2nb.core.options import make
from exl2nb.sampling.constraint import Constraint
from exl2nb.sampling.draw import check_left, highest_logit, inverse_cdf
from exl2nb.sampling.explanation import Explanation, FilterStep
from exl2nb.sampling.filters import ALL_TOKENS, entropy_temperature, filters_of
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.sampler_state import SamplerState, Words, fresh_seed


class PieceNames(Words, Protocol):
    """The part of a tokenizer that also names tokens."""

    def piece(self, token_id: int, /) -> str:
        """The text of a token."""
        ...


def explain(
    logits: np.ndarray | Tensor,
    params: SamplingParams | None = None,
    *,
    prompt_ids: Iterable[int] = (),
    new_ids: Iterable[int] = (),
    tokenizer: PieceNames | None = None,
    constraint: Constraint | None = None,
    **options: Any,
) -> Explanation:
    """Show what each filter does to one row of logits, and which token is drawn.

    Args:
        logits: f32 `(V,)`, raw.
        params: the settings; or give them as keywords, as for `generate`.
        prompt_ids: counted by the penalties and DRY.
        new_ids: tokens generated since; they also decide which random number of the seed is used.
        constraint: a grammar, at its beginning; it takes in `new_ids`.

    Returns:
        Every step with its survivors and probabilities, and the token: for the same row, settings, history and seed, what generation draws.

    Raises:
        OptionError: settings out of range, or logits that are no row. GenerationError: the row has no distribution, or no token is left.

    Example:
        >>> found = explain(np.log(np.float32([0.5, 0.3, 0.15, 0.05])), top_p=0.6, temperature=1.0, seed=1)
        >>> [(step.name, step.survivors) for step in found.steps]
        [('logits', 4), ('top_p', 2)]
    """
    if params is not None and options:
        raise OptionError(f"explain: got params and also {', '.join(options)}; put all of them into one")
    try:
        row = logits.detach().to("cpu", torch.float32).numpy() if isinstance(logits, Tensor) else np.asarray(logits, np.float32)
    except (TypeError, ValueError):
        raise OptionError(f"explain: logits are {str(logits)[:80]!r}; expected one row of numbers (V,)") from None
    if row.ndim != 1 or not len(row):
        raise OptionError(f"explain: logits have the shape {tuple(row.shape)}; expected one row (V,): give logits[i]")
    params = SamplingParams.of(where="explain", **options) if params is None else params
    params.check_vocabulary(len(row), where="explain")
    ends = tokenizer.eos_ids if tokenizer is not None else ()
    state = SamplerState(params, prompt_ids, tokenizer=tokenizer, end_ids=ends, constraint=constraint)
    for token in new_ids:
        state.push(token)
    return explain_state(row, state, tokenizer=tokenizer)


def explain_state(row: np.ndarray, state: SamplerState, *, tokenizer: PieceNames | None = None) -> Explanation:
    """`explain` for a request as it stands: f32 `(V,)`, and the state before the token is pushed. Neither is changed."""
    highest_logit(row)
    recorder = _StepRecorder(row)
    logits = row
    for step in filters_of(state, len(row)):
        check_left(logits.max())
        heat = _division(step.name, logits, state)
        logits = step.apply(logits, state, ALL_TOKENS)
        recorder.add(step.name, {name: getattr(state.params, name) for name in step.fields}, logits, heat)
    greedy = state.params.greedy
    uniform = None if greedy else state.uniform()
    token = int(logits.argmax()) if uniform is None else inverse_cdf(logits, uniform)
    if greedy:
        only = np.full_like(logits, -np.inf)
        only[token] = logits[token]
        recorder.add("greedy", {}, only, 1.0)
    names = tokenizer.piece if tokenizer is not None else None
    return Explanation(
        steps=tuple(recorder.steps),
        token=token,
        uniform=uniform,
        seed=state.seed,
        index=state.count,
        params=state.params,
        names=names,
    )


class _StepRecorder:
    """Turns rows of logits into steps."""

    def __init__(self, row: np.ndarray) -> None:
        self.steps: list[FilterStep] = []
        self._probs, self._heat = _softmax(row), 1.0
        self._add("logits", {}, row, self._probs)

    def add(self, name: str, settings: dict[str, Any], logits: np.ndarray, heat: float) -> None:
        """The row after one more filter, which divided by `heat`."""
        before, self._probs = self._probs, _softmax(logits)
        self._heat *= heat
        self._add(name, settings, logits, before)

    def _add(self, name: str, settings: dict[str, Any], logits: np.ndarray, before: np.ndarray) -> None:
        alive = logits > -np.inf
        was = self.steps[-1].ids if self.steps else np.flatnonzero(alive)
        removed = was[~alive[was]]
        ids = np.flatnonzero(alive)
        self.steps.append(
            FilterStep(
                name=name,
                settings=settings,
                ids=ids,
                logits=logits[ids].copy(),
                before=before[ids],
                after=self._probs[ids],
                removed=removed,
                removed_mass=float(before[removed].sum()),
                temperature=self._heat,
            )
        )


def _softmax(logits: np.ndarray) -> np.ndarray:
    alive = np.flatnonzero(logits > -np.inf)  # after the cuts a few of many
    probs = np.zeros(len(logits))
    if len(alive):
        weights = logits[alive].astype(np.float64)
        weights -= weights.max()
        np.exp(weights, out=weights)
        probs[alive] = weights / max(weights.sum(), 1e-300)
    return probs


def _division(name: str, logits: np.ndarray, state: SamplerState) -> float:
    p = state.params
    if name == "temperature" and not p.greedy:
        return p.temperature
    return entropy_temperature(logits, p.min_temp, p.max_temp, p.temp_exponent) if name == "dynamic_temperature" else 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Replay:
    """The rows of logits that an answer was drawn from, and all else that its choices depend on.

    logits: f32 `(n, V)`, raw, one row per place. new_ids: the tokens that stand there; one fewer than rows where the last is still to be
    drawn. prompt_ids: the tokens before them. tokenizer: names tokens, and gives the special ones of DRY, XTC and min_tokens.

    Raises:
        OptionError: logits of another shape, or new_ids of another number.
    """

    logits: np.ndarray
    new_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    tokenizer: PieceNames | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        rows, count = self.logits, len(self.new_ids)
        if rows.ndim != 2 or not rows.size or count not in (len(rows), len(rows) - 1):
            raise OptionError(f"logits have the shape {rows.shape} for {count} tokens; expected one row (V,) for each, or one row more")

    @classmethod
    def of(
        cls,
        logits: np.ndarray | Tensor,
        new_ids: Iterable[int] = (),
        prompt_ids: Iterable[int] = (),
        *,
        tokenizer: PieceNames | None = None,
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
    """The same settings with a seed, so that two explanations of it agree."""
    return params if params.seed is not None else replace(params, seed=fresh_seed() >> 32)


class Draw:
    """What a `post_sampling` function is given, after the draw and before the token is taken. Runs on the engine's thread: be quick.

    Attributes:
        id: the token that was drawn; an earlier function may have changed it. logits: f32 `(V,)`, raw; to be copied, not kept or changed.
        index: which new token of its request it is, from 0. columns: ids from here on have no token and cannot be taken.
    """

    def __init__(self, token_id: int, logits: np.ndarray, state: SamplerState) -> None:
        self.id, self.logits, self.index = token_id, logits, state.count
        self.columns = len(logits) if state.columns is None else min(state.columns, len(logits))
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
        return explain_state(self.logits, self._state)


def after_draw(token_id: int, logits: np.ndarray, state: SamplerState) -> int:
    """Call the request's `post_sampling` functions in order; each may return another id.

    Raises:
        OptionError: one returned what is no id. GenerationError: the grammar does not allow what it returned, or it raised
        what is no Exception (SystemExit, KeyboardInterrupt).
    """
    draw = Draw(token_id, logits, state)
    for hook in state.params.post_sampling:
        try:
            answer = hook(draw)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            # SystemExit and its like are meant for this request, not for the engine's thread
            raise GenerationError(f"a post_sampling function raised {type(error).__name__}: {error}") from error
        if answer is None:
            continue
        if isinstance(answer, bool) or not isinstance(answer, (int, np.integer)) or not 0 <= answer < draw.columns:
            raise OptionError(f"a post_sampling function returned {answer!r}; expected None or a token id from 0 to {draw.columns - 1}")
        draw.id = int(answer)
        draw.__dict__.pop("candidates", None)
    if draw.id != token_id and state.constraint is not None and draw.id not in state.allowed():
        raise GenerationError(
            f"a post_sampling function chose token {draw.id}, which the structure does not allow here; return None instead"
        )
    return draw.id
