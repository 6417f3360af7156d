"""One prompt continued under a cache mode while the same tokens run through a baseline cache: what the cache costs, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.eval.comparison import token_divergence
from exl2nb.eval.logits import check_ids
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model


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
