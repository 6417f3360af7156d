"""One request while it runs. Belongs to the engine thread alone, its channel excepted."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequence_
from typing import Any

import numpy as np

from exl2nb.generator.channel import Channel
from exl2nb.generator.output import Output
from exl2nb.generator.request import Completion, Request, Timings
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.report import Sampled
from exl2nb.sampling.state import SamplerState
from exl2nb.tokenizer.tokenizer import Tokenizer


class Sequence:
    """Ids, pages and state.

    Attributes:
        ids: prompt and new tokens. computed: how many of them have K and V in the cache (written, or about to be by a launched step).
        pages: of the cache. limit: new tokens at most, the request's max_tokens or the room left in the context. rows: how many of the last
        pending tokens want logits.
        Kept by scheduler and pager: rank (the smaller runs first), keys (of the full pages of ids), published (full pages made known),
        reused_tokens, preemptions, salt (what besides tokens changes the pages).
        Kept by the engine: flying (tokens drawn on the device that nobody has read), on_device (the device draws), ended, deadline.
        group: None, or what has `members` that end together.

    Args:
        request: what was asked for.
        tokenizer: of the model.
        context: tokens of prompt and answer together, at most.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, context: int) -> None:
        self.request, self.channel = request, Channel()
        self.ids = list(request.prompt_ids)
        self.computed = 0
        self.pages: list[int] = []
        self.rows = 1
        self.rank: tuple[int, int, int] = (0, 0, 0)
        self.keys: list[bytes] = []
        self.published = self.reused_tokens = self.preemptions = self.flying = 0
        self.salt = ""
        self.on_device = self.ended = False
        self.group: Any = None
        self.limit = min(request.max_tokens, context - len(self.ids))
        self.sampler = SamplerState(
            request.sampling,
            request.prompt_ids,
            tokenizer=tokenizer,
            end_ids=tokenizer.eos_ids,
            constraint=request.structure.start() if request.structure is not None else None,
        )
        self.output = Output(tokenizer, request.prompt_ids, request.stop)
        self._eos = frozenset() if request.ignore_eos else tokenizer.eos_ids
        self._handed = 0
        self._submitted = time.perf_counter()
        self.deadline = self._submitted + request.timeout_s if request.timeout_s is not None else float("inf")
        self._started = self._first = self._last = 0.0

    @property
    def pending(self) -> int:
        """Tokens that the model has not seen: a prompt's rest, or the one new token."""
        return len(self.ids) - self.computed

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far, a final end-of-text token included."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens the cache must hold for it at the end; the last new one is never run."""
        return len(self.request.prompt_ids) + self.limit - 1

    @property
    def host_only(self) -> bool:
        """True where a token cannot be drawn without the host."""
        return self.sampler.constraint is not None

    def ready(self) -> bool:
        """Whether it may be admitted."""
        return True

    def start(self) -> None:
        """It takes part from the next step on."""
        self._started = self._started or time.perf_counter()

    def advance(self, rows: Sequence_[np.ndarray]) -> str | None:
        """Choose a token.

        Args:
            rows: one for each of `rows`: its logits f32 `(V,)`.

        Returns:
            The finish reason once the answer is complete.
        """
        return self.append(sample_row(rows[0], self.sampler, top=self.request.top_logprobs))

    def append(self, sampled: Sampled) -> str | None:
        """Take a new token, hand over what may be shown; the finish reason once it is complete."""
        self._last = time.perf_counter()
        self.ids.append(sampled.id)
        if self.new_tokens == 1:
            self._first = self._last
        reason = None
        if sampled.id in self._eos:
            reason = "eos"
        elif self.output.push(sampled):
            return "stop"
        elif self.sampler.finished:
            reason = "stop"
        elif self.new_tokens >= self.limit:
            reason = "length" if self.limit == self.request.max_tokens else "context"
        if reason is not None and self.output.finish():
            return "stop"
        if self.request.stream:
            self.hand_over()
        return reason

    def hand_over(self) -> None:
        """Put what is new into the channel."""
        tokens = self.output.tokens
        if len(tokens) > self._handed:
            self.channel.put(tokens[self._handed :])
            self._handed = len(tokens)

    def complete(self, reason: str) -> Completion:
        """The answer as it stands."""
        self.output.finish()
        self.hand_over()
        now = time.perf_counter()
        first = self._first or now
        timings = Timings(
            prompt_tokens=len(self.request.prompt_ids),
            new_tokens=self.new_tokens,
            queue_s=(self._started or now) - self._submitted,
            first_token_s=first - self._submitted,
            prefill_s=first - (self._started or now),
            decode_s=max(0.0, self._last - first),
            reused_tokens=self.reused_tokens,
            preemptions=self.preemptions,
        )
        output, constraint = self.output, self.sampler.constraint
        return Completion(
            text=output.text,
            tokens=tuple(output.tokens),
            finish_reason=reason,
            timings=timings,
            seed=self.sampler.seed,
            structure=self.request.structure,
            complete=constraint is None or constraint.finished or (reason != "stop" and constraint.accepting),
        )
