"""What sampling knows of one request: its chain of filters, seed, number of tokens drawn, the ids it has seen, its place in a grammar."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from exl2nb.sampling.constraint import Allowed, Constraint
from exl2nb.sampling.draw import uniform
from exl2nb.sampling.filters import CUT_FILTERS, MASK_FILTERS, PENALTY_FILTERS, Filter, next_mu, ordered
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.penalties import faded

_LOOKS_BACK = ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry")


class History:
    """Prompt and new tokens in one array.

    Args:
        prompt_ids: the tokens before the new text.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._ids = np.fromiter(prompt_ids, np.int64)
        self.prompt_length = self._length = len(self._ids)

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> np.ndarray:
        """int64 `(S,)`: all of them."""
        return self._ids[: self._length]

    @property
    def new_ids(self) -> np.ndarray:
        """int64: those after the prompt."""
        return self._ids[self.prompt_length : self._length]

    def push(self, token_id: int) -> None:
        """Add one."""
        if self._length == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(max(64, self._length), np.int64)))
        self._ids[self._length] = token_id
        self._length += 1

    def pop(self) -> int:
        """Take the last one back."""
        self._length -= 1
        return int(self._ids[self._length])

    def copy(self) -> History:
        """The same ids, independent from here on."""
        copied = History(self.ids)
        copied.prompt_length = self.prompt_length
        return copied


class Tally:
    """Distinct ids and their counts as arrays that need no rebuilding. The order means nothing."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        counts = Counter(ids)
        self._slot = {token_id: at for at, token_id in enumerate(counts)}
        spare = np.empty(64, np.int64)
        self._ids = np.concatenate((np.fromiter(counts.keys(), np.int64), spare))
        self._counts = np.concatenate((np.fromiter(counts.values(), np.int64), spare))

    @property
    def ids(self) -> np.ndarray:
        """int64 `(n,)`, all different."""
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> np.ndarray:
        """int64 `(n,)`: how often each of `ids` is there."""
        return self._counts[: len(self._slot)]

    def add(self, token_id: int) -> None:
        """One more of an id."""
        at = self._slot.get(token_id)
        if at is not None:
            self._counts[at] += 1
            return
        at = self._slot[token_id] = len(self._slot)
        if at == len(self._ids):
            self._ids, self._counts = (np.concatenate((a, np.empty_like(a))) for a in (self._ids, self._counts))
        self._ids[at], self._counts[at] = token_id, 1

    def copy(self) -> Tally:
        """The same counts, independent from here on."""
        copied = Tally()
        copied._slot, copied._ids, copied._counts = dict(self._slot), self._ids.copy(), self._counts.copy()
        return copied

    def remove(self, token_id: int) -> None:
        """One less of an id; the last of its kind leaves."""
        at = self._slot[token_id]
        self._counts[at] -= 1
        if self._counts[at]:
            return
        last = len(self._slot) - 1
        moved = int(self._ids[last])
        self._ids[at], self._counts[at] = moved, self._counts[last]
        self._slot[moved] = at
        del self._slot[token_id]


class Words(Protocol):
    """What sampling needs of a tokenizer: DRY's breakers and XTC's line breaks are text, and ids without a token are not drawn."""

    eos_ids: frozenset[int]

    @property
    def highest_id(self) -> int:
        """The highest id that has a token; -1 if there is none."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Text to ids."""
        ...


# ---- The chain of one request, prepared once: which filters in which order, and which tokens can be left out before they run.

PRESELECTED_PARAMS = ("top_k", "top_p", "top_a", "min_p")  # in this order `chain.preselect` knows what they leave
FUSED_PARAMS = ("temperature", "top_k", "top_p", "min_p")  # what `ops.draw_rows` does, in its order


class Bounds(NamedTuple):
    """Settings of the cuts that `preselect` may rely on: these cuts follow each other, on logits still to be divided by `temperature`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_a: float = 0.0
    min_p: float = 0.0


@dataclass(frozen=True)
class PreparedChain:
    """The active filters of one request, in order, and which tokens may be left out before the late cuts run.

    penalties: masks and penalties, on whole rows. early_cuts: on whole rows. late_cuts: on the candidates that `bounds` leaves, None = on
    whole rows. left_out_at: index in `late_cuts` of the filter that takes `Candidates.left_out` into account.
    fused: temperature, top_k, top_p and min_p where these, following each other, are all the cuts there are; then one op draws the row.
    """

    penalties: tuple[Filter, ...]
    early_cuts: tuple[Filter, ...]
    late_cuts: tuple[Filter, ...]
    bounds: Bounds | None
    left_out_at: int
    fused: tuple[float, float, float, float] | None = None

    @property
    def filters(self) -> tuple[Filter, ...]:
        """All of them, in order."""
        return self.penalties + self.early_cuts + self.late_cuts


def prepare(params: SamplingParams) -> PreparedChain:
    """The chain of `params`; the cuts do not apply to a greedy request."""
    return _prepare(replace(params, post_sampling=(), seed=None))  # the cache keeps neither: functions may hold whole models


@lru_cache(maxsize=1024)
def _prepare(params: SamplingParams) -> PreparedChain:
    penalties = tuple(f for f in MASK_FILTERS + ordered(PENALTY_FILTERS, params) if f.active(params))
    if params.greedy:
        return PreparedChain(penalties, (), (), None, -1, (0.0, 0.0, 1.0, 0.0))
    cuts = [f for f in ordered(CUT_FILTERS, params) if f.active(params)]
    start = next((i for i, f in enumerate(cuts) if f.name in PRESELECTED_PARAMS), None)
    if start is None:
        return PreparedChain(penalties, (), tuple(cuts), None, -1, _fused(cuts, params))
    run = start
    while run < len(cuts) and cuts[run].name in PRESELECTED_PARAMS[_place(cuts[run - 1], default=-1) + 1 if run > start else 0 :]:
        run += 1
    names = {f.name for f in cuts[start:run]}
    after_temperature = start > 0 and cuts[start - 1].name == "temperature"
    bounds = Bounds(**{name: getattr(params, name) for name in names}, temperature=params.temperature if after_temperature else 1.0)
    early = start - after_temperature
    return PreparedChain(penalties, tuple(cuts[:early]), tuple(cuts[early:]), bounds, int(after_temperature), _fused(cuts, params))


def _fused(cuts: Sequence[Filter], params: SamplingParams) -> tuple[float, float, float, float] | None:
    names = [f.name for f in cuts]
    if names != [name for name in FUSED_PARAMS if name in names]:
        return None
    return params.temperature, float(params.top_k), params.top_p, params.min_p


def _place(f: Filter, default: int) -> int:
    return PRESELECTED_PARAMS.index(f.name) if f.name in PRESELECTED_PARAMS else default


def fresh_seed() -> int:
    """A random seed of 63 bits, so that it also fits a signed 64-bit column."""
    return secrets.randbits(63)


class SamplerState:
    """The changing half of sampling, one per request; `SamplingParams` is the fixed half.

    Attributes:
        columns: tokens are drawn from the first so many logits; None = all. Rows may be shorter.

    Args:
        params: the fixed half.
        prompt_ids: they count as seen for the repetition penalty and DRY.
        tokenizer: of the model; ids beyond its highest one are padding of the model's head and are never drawn. DRY and XTC encode texts
            with it. None = every column may be drawn, and texts among the settings of DRY and XTC have no effect.
        end_ids: tokens that end the text, masked by min_tokens.
        constraint: the grammar of this request, at its beginning.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int] = (),
        *,
        tokenizer: Words | None = None,
        end_ids: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.chain: PreparedChain = prepare(params)
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.count = 0
        self.retry = 0  # draws at this position that were taken back; each retry uses another random number
        self.mu = self._next_mu = 2.0 * params.mirostat_tau
        self.end_ids = np.fromiter(end_ids, np.int64)
        self.constraint = constraint
        self.forced = False  # whether the grammar left the last draw no choice
        self.columns = tokenizer.highest_id + 1 if tokenizer is not None and tokenizer.highest_id >= 0 else None
        self._tokenizer = tokenizer
        self._past_mu: list[float] = []
        self._tracks = any(f.name in _LOOKS_BACK for f in self.chain.penalties)
        self._remembers = self._tracks or params.mirostat
        self._fades = params.penalty_range > 0
        self._tallies = self._tracks and not self._fades
        self.history = History(prompt_ids if self._tracks else ())
        self._seen = Tally(self.history.ids.tolist() if self._tallies and params.repetition_penalty != 1.0 else ())
        self._new = Tally(self.history.ids.tolist() if self._tallies and params.penalty_prompt else ())

    # ---- read by the filters

    @property
    def seen(self) -> np.ndarray:
        """int64 `(n,)`: each token of prompt and text once. Empty while no filter reads it."""
        return self._seen.ids

    @property
    def too_short(self) -> bool:
        """True while the text must not end."""
        return self.count < self.params.min_tokens

    @property
    def finished(self) -> bool:
        """True where the grammar is complete and nothing may follow."""
        return self.constraint is not None and self.constraint.finished

    @property
    def device_ready(self) -> bool:
        """True where a device can draw without the host: see `SamplingParams.device_ready`; a grammar needs the host."""
        return self.constraint is None and self.params.device_ready

    def uniform(self) -> float:
        """The random number of the token that is drawn next; asking twice gives the same number."""
        return uniform(self.seed ^ (self.retry * 0x9E6C63D0876A9A47), self.count)

    def allowed(self) -> Allowed:
        """The tokens of the grammar; only for a request that has one."""
        assert self.constraint is not None
        return self.constraint.allowed()

    def repeated(self) -> tuple[np.ndarray, float, np.ndarray | None]:
        """Ids, penalty and strengths for the repetition penalty."""
        if not self._fades:
            return self._seen.ids, self.params.repetition_penalty, None
        ids, latest, _ = faded(self.history.ids, self.params.penalty_range, self.params.penalty_decay)
        return ids, self.params.repetition_penalty, latest

    def present(self) -> tuple[np.ndarray, np.ndarray | float]:
        """Ids and amounts for the presence penalty."""
        if not self._fades:
            return self._new.ids, self.params.presence_penalty
        ids, latest, _ = faded(self._penalised, self.params.penalty_range, self.params.penalty_decay)
        return ids, latest * self.params.presence_penalty

    def frequent(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and amounts for the frequency penalty."""
        if not self._fades:
            return self._new.ids, self._new.counts * self.params.frequency_penalty
        ids, _, sums = faded(self._penalised, self.params.penalty_range, self.params.penalty_decay)
        return ids, sums * self.params.frequency_penalty

    @property
    def _penalised(self) -> np.ndarray:
        """int64: what presence and frequency penalties count."""
        return self.history.ids if self.params.penalty_prompt else self.history.new_ids

    def ids_of(self, field: str) -> np.ndarray:
        """int64: the ids of a field of the params."""
        return self._fixed[field]

    @cached_property
    def bias(self) -> np.ndarray:
        """f32: the values of logit_bias, in the order of `ids_of("logit_bias")`."""
        return np.array([b for _, b in self.params.logit_bias], np.float32)

    @cached_property
    def breakers(self) -> frozenset[int]:
        """Tokens over which DRY sees no repetition: those given as ids, and the last token of each text given, alone and inside text."""
        given = self.params.dry_breakers
        texts = [t for b in given if isinstance(b, str) for t in (b, f"a{b}")] if self._tokenizer is not None else []
        return frozenset(b for b in given if isinstance(b, int)) | self._last_tokens(texts)

    @cached_property
    def protected(self) -> np.ndarray:
        """int64: tokens that XTC never removes."""
        if self.params.xtc_ignore is not None:
            return np.array(self.params.xtc_ignore, np.int64)
        words = self._tokenizer
        ends = frozenset(self.end_ids.tolist()) | (words.eos_ids if words is not None else frozenset())
        return np.array(sorted(ends | self._last_tokens(["\n", "a\n"])), np.int64)

    # ---- changes

    def drawn(self, prob: float) -> None:
        """The next token to be pushed had this probability among those it was drawn from; mirostat needs it."""
        self._next_mu = next_mu(self.mu, prob, self.params.mirostat_tau, self.params.mirostat_eta)

    def push(self, token_id: int) -> None:
        """Append a token to the request, drawn or given."""
        if self.constraint is not None:
            self.constraint.accept(token_id)
        self.count += 1
        if not self._remembers:
            return
        if self.params.mirostat:
            self._past_mu.append(self.mu)
            self.mu = self._next_mu
        if self._tracks:
            self.history.push(token_id)
            if self._tallies:
                self._new.add(token_id)
                if self.params.repetition_penalty != 1.0:
                    self._seen.add(token_id)

    def rewind(self, count: int) -> None:
        """Remove the last `count` tokens, as if they had never been pushed."""
        assert 0 <= count <= self.count, (count, self.count)
        if not count:
            return
        if self.constraint is not None:
            self.constraint.rewind(count)
        self.count -= count
        if self.params.mirostat:
            self.mu = self._next_mu = self._past_mu[-count]
            del self._past_mu[-count:]
        for _ in range(count if self._tracks else 0):
            token_id = self.history.pop()
            if self._tallies:
                self._new.remove(token_id)
                if self.params.repetition_penalty != 1.0:
                    self._seen.remove(token_id)

    def copy(self, *, seed: int | None = None) -> SamplerState:
        """The same state, independent from here on; with `seed`, other random numbers follow."""
        copied = SamplerState.__new__(SamplerState)
        copied.__dict__.update(self.__dict__)
        copied.seed = self.seed if seed is None else seed
        copied.history, copied._past_mu = self.history.copy(), list(self._past_mu)
        copied._seen, copied._new = self._seen.copy(), self._new.copy()
        copied.constraint = None if self.constraint is None else self.constraint.copy()
        return copied

    # ---- private

    @cached_property
    def _fixed(self) -> dict[str, np.ndarray]:
        p = self.params
        values = {"allowed_tokens": p.allowed_tokens, "banned_tokens": p.banned_tokens, "logit_bias": [i for i, _ in p.logit_bias]}
        return {name: np.array(ids, np.int64) for name, ids in values.items()}

    def _last_tokens(self, texts: Iterable[str]) -> frozenset[int]:
        if self._tokenizer is None:
            return frozenset()
        return frozenset(ids[-1] for text in texts if (ids := self._tokenizer.encode(text, add_special=False)))
