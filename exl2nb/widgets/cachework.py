"""What CacheExplorer measures, on a loaded model: one prompt under several cache modes, and a needle under each. Knows nothing of pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from exl2nb.cache.modes import MODES, storages_of
from exl2nb.core.errors import OptionError
from exl2nb.eval.lockstep import Baseline, LockstepToken
from exl2nb.eval.needle import Needle, NeedleResult, find
from exl2nb.tokenizer.detokenize import Detokenizer
from exl2nb.widgets.protocol import CacheKind, KlToken, NeedleHit
from exl2nb.widgets.static import percent

BASELINE = "fp16"
SPLITS = ("k16v8", "k16v4", "k8v16", "k4v16", "k4v8")
TURN_S = 1 / 30
"""Longest time the model is held before others get their turn and the page its tokens."""
_BITS = {"q4": "4-bit", "q8": "8-bit", "fp8": "8-bit float", "fp16": "16-bit", "fp32": "32-bit"}


def kinds_of(llm: Any, free: int | None) -> list[CacheKind]:
    """Every mode that a model can have, with its sizes; `free` bytes say how many tokens fit."""
    names = [mode for mode in MODES if mode != "fp32"]
    kinds = []
    for mode in (*names, *SPLITS):
        try:
            spec = llm.model.cache_spec(1, mode=mode)
        except OptionError:  # heads of this size have no such mode
            continue
        k, v = storages_of(mode)
        note = _BITS[k] if k == v else f"K {_BITS[k]}, V {_BITS[v]}"
        fits = None if free is None else free // spec.page_bytes * spec.page_size
        kinds.append(CacheKind(mode, mode.upper(), note, round(spec.bits, 2), spec.token_bytes, fits))
    return kinds


def continuations(
    llm: Any, prompt: str, modes: Sequence[str], max_tokens: int, stop: threading.Event, tell: Callable[[str], None]
) -> Iterator[list[KlToken]]:
    """Continue a prompt greedily under each mode; yields tokens some times a second. The model is only held while it computes.

    Raises:
        OptionError, ContextOverflow, EngineClosed: it cannot run; says why.
    """
    tokenizer = llm.tokenizer
    ids = tokenizer.encode(prompt)
    base = Baseline(llm.engine.shared_model, ids, max_tokens=max_tokens, mode=BASELINE)
    try:
        for cell, mode in enumerate(modes):
            tell(mode)
            steps, words = base.run(mode, tuple(tokenizer.eos_ids)), Detokenizer(tokenizer, ids)
            ended = False
            while not ended and not stop.is_set():
                found, ended = _turn(steps)
                yield [_token(cell, one, words, tokenizer) for one in found]
            if stop.is_set():
                return
            if rest := words.flush():
                yield [KlToken(cell, rest, -1, None, None, None, None, None)]
    finally:
        base.close()


def _turn(steps: Iterator[LockstepToken]) -> tuple[list[LockstepToken], bool]:
    """The tokens of one turn, and whether the answer ended."""
    found, end = [], time.monotonic() + TURN_S
    for step in steps:
        found.append(step)
        if time.monotonic() >= end:
            return found, False
    return found, True


def _token(cell: int, step: LockstepToken, words: Detokenizer, tokenizer: Any) -> KlToken:
    same = step.favourite == step.id
    favourite = None if same else tokenizer.piece(step.favourite)
    numbers = (round(step.prob, 6), round(step.baseline_prob, 6), float(f"{step.kl:.6g}"))
    return KlToken(cell, words.feed(step.id), step.id, *numbers, same, favourite)


def search(llm: Any, needle: Needle, modes: Sequence[str], stop: threading.Event) -> Iterator[NeedleResult]:
    """Look for the needle under each mode, first without it, then at every depth; one result at a time."""
    for mode in modes:
        for depth in (None, *needle.depths):
            if stop.is_set():
                return
            result = find(llm.engine.shared_model, llm.tokenizer, needle, mode=mode, depth=depth)
            yield result


def verdict(hits: Sequence[NeedleHit], needle: Needle) -> str:
    """What may be said after looking, in words, and what may not."""
    found = {mode: [hit.prob for hit in hits if hit.mode == mode and hit.depth is not None] for mode in dict.fromkeys(h.mode for h in hits)}
    found = {mode: sum(probs) / len(probs) for mode, probs in found.items() if probs}
    if BASELINE not in found:
        return ""
    truth = found[BASELINE]
    without = next((hit.prob for hit in hits if hit.mode == BASELINE and hit.depth is None), 0.0)
    answer = needle.answer.strip()
    if truth < 0.01 or truth < 5 * without:
        return (
            f"Even with an FP16 cache this model gives “{answer}” only {percent(truth)} on average, against {percent(without)} where the "
            "fact is not in the text at all: it does not find the needle, so this says nothing about the other caches."
        )
    others = ", ".join(f"{mode.upper()} {percent(prob)}" for mode, prob in found.items() if mode != BASELINE)
    head = f"FP16 gives “{answer}” {percent(truth)} on average, against {percent(without)} where the fact is not in the text"
    return f"{head}; {others}." if others else f"{head}."
