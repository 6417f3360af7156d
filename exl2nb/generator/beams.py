"""Groups: sequences of one request that run in step (beams, guidance). A member that has given its row is parked until all have."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from exl2nb.generator.output import Output, visible_specials
from exl2nb.generator.request import Completion, Request
from exl2nb.generator.sequence import RunningRequest
from exl2nb.sampling.draw import Sampled, highest_logit, report
from exl2nb.tokenizer.tokenizer import Tokenizer


class BeamGroup:
    """members: begin and end together; the first one has the channel. active: those that run in the next step.

    A member that has given its row is parked (`pending` is 0) until all have; then `step` chooses tokens for all of them. Preempting a
    parked member is harmless: it runs its ids again and gives the same row again.
    """

    def __init__(self, members: list[RunningRequest]) -> None:
        self.members = members
        self.active = list(members)
        self.lockstep = True  # they must fit the cache together
        self.shares_prompt = False  # the full pages of the prompt are the same for all
        # set by the engine: makes the cache of the second sequence that of the first by reference; without it a fork computes its ids again
        self.fork: Callable[[RunningRequest, RunningRequest], None] | None = None
        self._rows: dict[int, np.ndarray] = {}
        for member in members:
            member.group = self

    @property
    def leader(self) -> RunningRequest:
        """The member whose channel the caller holds."""
        return self.members[0]

    def receive(self, member: RunningRequest, row: np.ndarray) -> str | None:
        """The row of one member is there; once all are, the step. The finish reason when the answer is complete."""
        if member in self.active:
            self._rows[id(member)] = row.copy()
        if len(self._rows) < len(self.active):
            return None
        rows = [self._rows[id(one)] for one in self.active]
        self._rows = {}
        return self.step(rows)

    def step(self, rows: list[np.ndarray]) -> str | None:
        """Choose for every active member; one row each."""
        raise AssertionError("a group chooses by its own rule")

    def completion(self, reason: str) -> Completion:
        """The answer as it stands."""
        return self.leader.complete_alone(reason)

    def ready(self, member: RunningRequest) -> bool:
        """Whether this member is to run: it takes part, and its row is not in."""
        return member in self.active and id(member) not in self._rows


# ---- Beam search: the answers with the highest total log probability, kept side by side. Scores and stopping as in Transformers.


class _Beam(NamedTuple):
    """An answer that grows: the sum of its log probabilities and its tokens."""

    total: float
    tokens: tuple[Sampled, ...]


@dataclass(frozen=True)
class _Ended:
    """An answer that is complete; `reason` as in `Completion.finish_reason`."""

    score: float
    tokens: tuple[Sampled, ...]
    reason: str


class Beams(BeamGroup):
    """One member per beam. The first runs the prompt, the others start as its forks.

    Every step continues each beam with every token and keeps the best. Of these the ones that end (end-of-text or stop token, stop text,
    length) are set aside if they are among the `beams` best, with score total / length ** length_penalty; the best others run on.
    """

    def __init__(self, members: list[RunningRequest]) -> None:
        super().__init__(members)
        self.active, self.shares_prompt = members[:1], True
        self.request = members[0].request
        self._beams: list[_Beam] = []
        self._ended: list[_Ended] = []
        self._ends, self._columns = members[0].ends, members[0].sampler.columns
        tokenizer = members[0].tokenizer
        self._text = partial(tokenizer.decode, skip_special=not visible_specials(tokenizer, self.request.stop_texts))

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer, *, context: int) -> RunningRequest:
        """The sequences of a request; returns the leader."""
        members = [RunningRequest(request, tokenizer, context=context) for _ in range(request.beams)]
        cls(members)
        return members[0]

    def step(self, rows: list[np.ndarray]) -> str | None:
        """Choose the next beams; the finish reason once no better answer is to be expected."""
        self.leader.mark_token()
        before = self._beams or [_Beam(0.0, ())]
        size = len(before[0].tokens) + 1
        going: list[tuple[int, _Beam]] = []
        all_end = True
        for rank, (parent, beam) in enumerate(self._candidates(before, rows)):
            reason = self._reason(beam, size)
            if reason is None:
                all_end = False
                if len(going) < len(self.members):
                    going.append((parent, beam))
            elif rank < len(self.members):
                self._keep_ended(_Ended(beam.total / size**self.request.length_penalty, beam.tokens, reason))
        if all_end or not going or self._finished(going, size):
            return max(self._ended, key=lambda one: one.score).reason if self._ended else "length"
        self._continue(going)
        return None

    def completion(self, reason: str) -> Completion:
        """The best answers. Cancelled ones count as they stand."""
        best = sorted(self._ended, key=lambda one: -one.score)
        if not best or reason in ("cancelled", "timeout"):  # what runs still stands behind what is complete
            best += [
                _Ended(b.total / max(1, len(b.tokens)) ** self.request.length_penalty, b.tokens, reason)
                for b in self._beams or [_Beam(0.0, ())]
            ]
        if reason in ("cancelled", "timeout"):
            best = [replace(one, reason=reason) for one in best]
        made = [self._complete(one) for one in best[: self.request.n]]
        if self.request.stream and made[0].tokens:
            self.leader.channel.put(list(made[0].tokens))
        return replace(made[0], beams=tuple(made))

    # ---- the rule

    def _candidates(self, before: list[_Beam], rows: list[np.ndarray]) -> list[tuple[int, _Beam]]:
        """The best continuations over all beams, best first: as many that at least `beams` of them do not end."""
        keep = max(2, 1 + len(self._ends)) * len(self.members)
        found: list[tuple[float, int, int]] = []
        for parent, (beam, row) in enumerate(zip(before, rows)):
            logprobs = _log_softmax(row)
            if self._columns is not None:
                logprobs[self._columns :] = -np.inf
            if len(beam.tokens) < self.request.sampling.min_tokens:
                logprobs[[i for i in self._ends if i < len(logprobs)]] = -np.inf
            totals = np.float32(beam.total) + logprobs
            count = min(keep, len(totals))
            for token in np.argpartition(-totals, count - 1)[:count]:
                if np.isfinite(totals[token]):
                    found.append((-float(totals[token]), parent, int(token)))
        found.sort()
        best = []
        for total, parent, token in found[:keep]:
            sampled = report(rows[parent], highest_logit(rows[parent]), token, self.request.top_logprobs)
            best.append((parent, _Beam(-total, (*before[parent].tokens, sampled))))
        return best

    def _reason(self, beam: _Beam, size: int) -> str | None:
        token = beam.tokens[-1].id
        if token in self._ends:
            return "stop" if token in self.request.stop_ids else "eos"
        if self.request.stop_texts and size >= self.request.sampling.min_tokens:
            text = self._text([one.id for one in beam.tokens])
            if any(stop in text for stop in self.request.stop_texts):
                return "stop"
        if size >= self.leader.limit:
            return "length" if self.leader.limit == self.request.max_tokens else "context"
        return None

    def _keep_ended(self, one: _Ended) -> None:
        self._ended = sorted([*self._ended, one], key=lambda other: -other.score)[: len(self.members)]

    def _finished(self, going: list[tuple[int, _Beam]], size: int) -> bool:
        """Whether enough answers are complete, and none that still runs can become better than the worst of them."""
        if len(self._ended) < len(self.members):
            return False
        if self.request.early_stopping is True:
            return True
        penalty = self.request.length_penalty
        length = self.leader.limit if self.request.early_stopping == "never" and penalty > 0.0 else size
        return max(beam.total for _, beam in going) / length**penalty <= min(one.score for one in self._ended)

    def _continue(self, going: list[tuple[int, _Beam]]) -> None:
        """Give every new beam a member: its parent's for the first child, a fork of it for the others."""
        parents = {parent for parent, _ in going}
        free = [member for member in self.members if member not in [self.active[i] for i in parents]]
        taken: list[tuple[RunningRequest, _Beam]] = []
        for parent, beam in going:
            member = self.active[parent]
            if member in [one for one, _ in taken]:
                member = free.pop(0)
                self._fork(self.active[parent], member)
            taken.append((member, beam))
        taken.sort(key=lambda pair: self.members.index(pair[0]))
        self.active, self._beams = [member for member, _ in taken], [beam for _, beam in taken]
        for member, beam in taken:
            member.ids.append(beam.tokens[-1].id)
            member.computed = min(member.computed, len(member.ids) - 1)

    def _fork(self, source: RunningRequest, target: RunningRequest) -> None:
        if self.fork is not None:
            self.fork(source, target)  # first: the pages that the target gives up are known by the ids it has
        else:
            target.computed = 0
        target.ids[:] = source.ids

    def _complete(self, one: _Ended) -> Completion:
        leader = self.leader
        shown = [token for token in one.tokens if token.id not in self._ends]
        output = Output(leader.tokenizer, self.request.prompt_ids, self.request.stop_texts)
        for count, token in enumerate(shown, 1):
            if output.push(token, armed=count >= self.request.sampling.min_tokens):
                break
        else:
            output.finish()
        ended = one.tokens[-1].id if one.tokens and one.tokens[-1].id in self._ends else output.stopped_by
        answer: dict[str, Any] = {"text": output.text, "tokens": tuple(output.tokens), "withheld": output.withheld, "stopped_by": ended}
        answer["sampling"] = self.request.sampling
        timings = leader.timings(new_tokens=len(one.tokens), now=time.perf_counter())
        return Completion(finish_reason=one.reason, timings=timings, seed=leader.sampler.seed, score=one.score, **answer)


def _log_softmax(row: np.ndarray) -> np.ndarray:
    highest = float(highest_logit(row))
    return row - np.float32(highest + math.log(float(np.exp(row - np.float32(highest)).sum(dtype=np.float64))))


# ---- Classifier-free guidance: a second, negative prompt runs in step, and its distribution is subtracted from that of the first.


def mix_guidance(positive: np.ndarray, negative: np.ndarray, scale: float) -> np.ndarray:
    """Mix two rows of logits: `n + scale * (p - n)` of their log probabilities p and n.

    Args:
        positive, negative: f32 `(V,)`, raw logits.
        scale: 1 leaves the positive one, more moves away from the negative one.

    Source: Sanchez et al., "Stay on topic with Classifier-Free Guidance", 2023; as in Transformers.
    """
    p, n = _log_softmax_f64(positive), _log_softmax_f64(negative)
    return (n + np.float32(scale) * (p - n)).astype(np.float32)


class Guided(BeamGroup):
    """The positive sequence draws, the negative one follows with the same tokens."""

    def __init__(self, positive: RunningRequest, negative: RunningRequest) -> None:
        super().__init__([positive, negative])

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer, *, context: int) -> RunningRequest:
        """The two sequences of a request; returns the leader.

        The longer prompt decides how much room the context leaves.
        """
        positive = RunningRequest(request, tokenizer, context=context)
        plain = {"negative_ids": (), "cfg_scale": 1.0, "token_healing": False, "structure": None, "pictures": None}
        negative = RunningRequest(replace(request, prompt_ids=request.negative_ids, **plain), tokenizer, context=context)
        positive.limit = negative.limit = min(positive.limit, negative.limit)
        cls(positive, negative)
        return positive

    def step(self, rows: list[np.ndarray]) -> str | None:
        """Draw one token from the mix; both go on with it."""
        positive, negative = self.members
        reason = positive.take_rows([mix_guidance(rows[0], rows[1], positive.request.cfg_scale)])
        new = positive.ids[positive.prompt_tokens :]
        kept = negative.prompt_tokens + len(new) - 1
        del negative.ids[max(negative.prompt_tokens, kept) :]
        negative.ids += new[len(negative.ids) - negative.prompt_tokens :]
        negative.computed = min(negative.computed, len(negative.ids) - 1)
        return reason


def _log_softmax_f64(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float64))
