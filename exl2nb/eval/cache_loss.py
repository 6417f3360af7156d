"""What a cache of fewer bits costs: token by token beside a baseline cache, and whether a fact hidden in filler text is still found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.eval.comparison import token_divergence
from exl2nb.eval.rows import RowRunner, check_ids
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model
from exl2nb.tokenizer.tokenizer import Tokenizer


class LockstepToken(NamedTuple):
    """One greedy token. prob: its probability under the mode. baseline_prob: under the baseline, reading the same text. favourite: the
    baseline's most likely token there. kl: KL(baseline || mode) of the two distributions, nats.
    """

    id: int
    prob: float
    baseline_prob: float
    favourite: int
    kl: float


class Reader:
    """A text being read with a cache of its own, from an empty context.

    Args:
        model: a loaded model; nothing else may run it during the call.
        mode: of the cache, as in `load`.
        room: tokens it can hold.
    """

    def __init__(self, model: Model, mode: str, room: int) -> None:
        self._model, self.spec = model, model.cache_spec(room, mode=mode)
        self._cache = model.new_cache(self.spec)
        self._pages = list(range(self.spec.num_pages))
        self._long = model.rope_switch is None or room > model.rope_switch
        self.length = 0

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read `ids` on from where the text is; returns log-probabilities f64 `(V,)` of what follows, on the CPU."""
        options = {"start": self.length, "pages": self._pages, "device": self._model.device, "long": self._long}
        logits = self._model.forward(Batch.single(list(ids), logit_rows="last", **options), self._cache)
        self.length += len(ids)
        return logits[-1].double().cpu().log_softmax(dim=-1)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens; later cache entries are overwritten."""
        self.length = length

    def close(self) -> None:
        """Free the cache."""
        self._cache.close()


class Baseline:
    """A prompt read once with the baseline cache, to compare any number of modes with, one after the other.

    Args:
        model: a loaded model; nothing else may run it while one of these methods does.
        prompt: token ids, at least one.
        max_tokens: most tokens of one continuation.
        mode: of the baseline's cache.

    Raises:
        OptionError: no ids, or one outside the vocabulary. ContextOverflow: prompt and answer are longer than the model's context.
    """

    def __init__(self, model: Model, prompt: Sequence[int], *, max_tokens: int, mode: str = "fp16") -> None:
        if not prompt:
            raise OptionError("cache comparison: the prompt has no tokens; give a text")
        room = len(prompt) + max_tokens
        if room > model.context:
            raise ContextOverflow(
                f"cache comparison: prompt of {len(prompt)} and {max_tokens} new tokens; the model's context is {model.context}; "
                "shorten the prompt or lower max_tokens"
            )
        self.prompt = check_ids(model, torch.tensor([list(prompt)]))[0].tolist()
        self._model, self._room, self._max_tokens = model, room, max_tokens
        self._reader = Reader(model, mode, room)
        self._first: Tensor | None = None

    def run(self, mode: str, stop_ids: Sequence[int] = ()) -> Iterator[LockstepToken]:
        """Continue the prompt greedily under `mode`; each token is drawn by the mode and then read by both.

        Nothing runs between two tokens, so the caller may run other requests there. Only one such iterator may be alive at a time.

        Cost: two steps of one token per token; the prompt once more for the mode.
        """
        reader = Reader(self._model, mode, self._room)
        try:
            mine = reader.feed(self.prompt)
            if self._first is None:
                self._first = self._reader.feed(self.prompt)
            self._reader.rewind(len(self.prompt))
            baseline = self._first
            for n in range(self._max_tokens):
                choice = int(mine.argmax())
                kl, _ = token_divergence(baseline[None], mine[None])
                yield LockstepToken(choice, float(mine[choice].exp()), float(baseline[choice].exp()), int(baseline.argmax()), float(kl[0]))
                if choice in stop_ids or n + 1 == self._max_tokens:
                    return
                mine, baseline = reader.feed([choice]), self._reader.feed([choice])
        finally:
            reader.close()

    def close(self) -> None:
        """Free the baseline's cache."""
        self._reader.close()


FILLER_TEXT = (
    "The rain fell on the old town, and nobody was in the streets.",
    "The bells of the church began to ring.",
    "A dog was barking at the gate.",
    "The old woman sat by the fire and said nothing.",
    "In the morning the boats came home.",
    "The children ran down to the river.",
    "It was late, and the lamps were lit.",
    "He took his hat and went out into the garden.",
)


@dataclass(frozen=True, kw_only=True)
class Needle:
    """What is hidden, and how it is asked for. `question + answer` is the form in which the text is continued at its end.

    fact: the sentence that is hidden. question: the beginning of a sentence that the answer completes. answer: what should follow, with
    the space at its front. filler: sentences around it, repeated in turn. sentences: how many of them. depths: places of the fact, 0 =
    start of the text, 1 = end.
    """

    fact: str = "The name of the ship was Margaret."
    question: str = "The name of the ship was"
    answer: str = " Margaret"
    filler: Sequence[str] = field(default=FILLER_TEXT)
    sentences: int = 24
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        for name in ("fact", "question", "answer"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip() or len(value) > 2000:
                raise OptionError(f"needle: {name} is {str(value)[:80]!r}; expected a text of at most 2,000 characters")
        if isinstance(self.filler, str) or not self.filler or not all(isinstance(one, str) and one.strip() for one in self.filler):
            raise OptionError(f"needle: filler is {str(self.filler)[:80]!r}; expected a list of sentences")
        if isinstance(self.sentences, bool) or not isinstance(self.sentences, int) or not 1 <= self.sentences <= 100_000:
            raise OptionError(f"needle: sentences is {self.sentences!r}; expected a whole number from 1 to 100,000")
        depths = self.depths
        if isinstance(depths, str) or not depths or not all(isinstance(d, (int, float)) and 0 <= d <= 1 for d in depths):
            raise OptionError(f"needle: depths is {str(depths)[:80]!r}; expected numbers from 0 (start of the text) to 1 (its end)")

    def text(self, depth: float | None) -> str:
        """The text up to the question, the fact `depth` of the way in; None: without the fact."""
        sentences = [self.filler[i % len(self.filler)] for i in range(self.sentences)]
        if depth is not None:
            sentences.insert(round(depth * self.sentences), self.fact)
        return " ".join([*sentences, self.question])


class NeedleResult(NamedTuple):
    """One reading. depth None: the fact was not in the text. tokens: of the text. prob: of the whole answer. rank: of its first token."""

    mode: str
    depth: float | None
    tokens: int
    prob: float
    rank: int


def find_needle(model: Model, tokenizer: Tokenizer, needle: Needle, *, mode: str, depth: float | None) -> NeedleResult:
    """Read the text with a cache of `mode` and compute the probability of the answer.

    Args:
        model: a loaded model; nothing else may run it during the call.
        depth: where, 0 to 1; None for the control: the same question about a text without the fact.

    Raises:
        OptionError: the tokenizer merges the answer with the question's last token. ContextOverflow: the text is longer than the context.

    Cost: one pass over the text.
    """
    text = needle.text(depth)
    ids, full = tokenizer.encode(text), tokenizer.encode(text + needle.answer)
    if full[: len(ids)] != ids or len(full) == len(ids):
        raise OptionError(
            f"needle: {needle.answer!r} is not read as tokens of its own after {needle.question[-40:]!r}; begin it with a space"
        )
    row = check_ids(model, torch.tensor([full]))[0]
    total, rank = 0.0, 0
    for start, logits in RowRunner(model, len(row), mode).pieces(row):
        for at in range(max(start, len(ids) - 1), min(start + len(logits), len(full) - 1)):
            scores = logits[at - start].double()
            target = full[at + 1]
            total += float(scores[target] - scores.logsumexp(dim=-1))
            rank = rank or int((scores > scores[target]).sum()) + 1
    return NeedleResult(mode, depth, len(ids), float(torch.tensor(total, dtype=torch.float64).exp()), rank)
