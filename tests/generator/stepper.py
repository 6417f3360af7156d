"""Runs sequences without an engine: logits by the rule of `fakes.FakeModel`, any number of tokens a step, as a scheduler might choose."""

from __future__ import annotations

import random

import numpy as np

from exl2nb.generator.request import Request
from exl2nb.generator.sequence import Sequence
from exl2nb.generator.speculation import Guesses

from . import fakes

TOKENIZER = fakes.tokenizer()
CONTEXT = 4096


class Bad:
    """Guesses of a given quality: the right token with probability `right`, as a rule that looks into the future tells."""

    def __init__(self, rule, right: float, seed: int = 0) -> None:
        self.rule, self.right, self.rng = rule, right, random.Random(seed)

    def guess(self, ids, count):
        future = list(ids)
        for _ in range(count):
            best = int(np.argmax(self.rule(future)))
            future.append(best if self.rng.random() < self.right else self.rng.randrange(3, fakes.VOCAB))
        return future[len(ids) :]


def request(prompt, **options) -> Request:
    options.setdefault("ignore_eos", True)
    return Request.of(prompt, where="test", **options)


def run(sequence: Sequence, rule, *, guesser=None, rng: random.Random | None = None, steps: int = 5000):
    """Until it ends; prompts and forks in pieces chosen by `rng`. The completion."""
    guesses = sequence.guesses
    for _ in range(steps):
        for member in list(sequence.members):
            if not member.pending or (member.group is not None and not member.group.ready(member)):
                continue
            if guesses is not None and member.pending == 1 and not member.guessed:
                room = member.limit - member.new_tokens - 1
                found = guesses.guess(member.ids, room) if guesser is None else guesser.guess(member.ids, guesses.pace.length(room))
                member.propose(found)
            if rng is not None and member.pending > member.rows and rng.random() < 0.5:
                member.computed += rng.randrange(1, member.pending - member.rows + 1)
                continue
            count = member.rows
            member.computed = len(member.ids)
            ids = member.ids
            reason = member.advance(np.stack([rule(ids[: len(ids) - count + 1 + i]) for i in range(count)]))
            if reason is not None:
                return sequence.complete(reason)
    raise AssertionError("it does not end")


def complete(prompt, rule, *, guesser=None, rng=None, **options):
    made = Sequence(request(prompt, **options), TOKENIZER, context=CONTEXT)
    if made.request.speculation.kind == "ngram" or guesser is not None:
        made.guesses = Guesses.ngram(made.request.speculation)
    return run(made, rule, guesser=guesser, rng=rng)


def ids(completion) -> list[int]:
    return [token.id for token in completion.tokens]
