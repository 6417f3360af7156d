"""What the samplers removed at one place of an answer, worked out after the run for who looks at a token. Knows no page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exl2nb.sampling.explanation import Explanation
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.replay import Replay
from exl2nb.widgets.background import Background
from exl2nb.widgets.protocol_stream import Fates


def explain_place(llm: Any, prompt_ids: Sequence[int], new_ids: Sequence[int], at: int, params: SamplingParams) -> Explanation:
    """How the token at place `at` of a finished answer was chosen; its prefix is scored once, mostly from cached pages.

    Args:
        llm: the model that wrote it.
        prompt_ids, new_ids: the prompt and the answer.
        at: a place of the answer.
        params: its settings, with its seed. Mirostat remembers: then the answer is written again up to there.
    """
    if params.mirostat:
        rows = llm.generate(list(prompt_ids), max_tokens=at + 1, return_logits=True, **params.changed).logits
    else:
        prefix = [*prompt_ids, *new_ids[:at]]
        rows = llm.generate(prefix, max_tokens=1, temperature=0.0, ignore_eos=True, return_logits=True).logits[0]
    return Replay.of(rows, new_ids[:at], prompt_ids, tokenizer=llm.tokenizer).explain(at, params)


def fates(found: Explanation, count: int) -> tuple[list[str], int, int]:
    """For each of the `count` likeliest tokens "" where it stayed, else the sampler that removed it; survivors; candidates at first."""
    taken = {int(token): step.name for step in found.steps for token in step.removed}
    first = found.steps[0]
    return [taken.get(token, "") for token in first.best(count).tolist()], len(found.ids), first.survivors


class Survival:
    """Answers questions about places on a thread of its own, the latest question first; what goes wrong leaves it unanswered.

    Args:
        send: takes a message.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send, self._wish = send, None
        self._background = Background("Playground's card")

    def ask(self, llm: Any, prompt: str, completion: Any, settings: Mapping[str, Any], where: tuple[int, int, int]) -> None:
        """Work out the fates at `where`: run, place, number of alternatives. Returns at once."""
        self._wish = (llm, prompt, completion, settings, where)
        if not self._background.alive:
            self._background.begin(self._work, lambda _status, _problem: None)

    def close(self) -> None:
        """Answer nothing more."""
        self._wish = None
        self._background.stop()

    def wait(self) -> None:
        """Wait until everything is answered."""
        self._background.wait()

    def _work(self, stop: threading.Event) -> None:
        while (wish := self._wish) is not None and not stop.is_set():
            self._wish = None
            llm, prompt, completion, settings, (run, at, count) = wish
            named = {name: value for name, value in settings.items() if name != "max_tokens"}
            params = SamplingParams(**{**named, "seed": completion.seed})
            new_ids = [token.id for token in completion.tokens]
            if at < len(new_ids):
                found = explain_place(llm, llm.tokenizer.encode(prompt), new_ids, at, params)
                names, left, of = fates(found, count)
                self._send(Fates(type="fates", run=run, at=at, names=names, left=left, of=of))
