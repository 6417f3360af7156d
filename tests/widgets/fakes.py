"""Fake models for widgets: anything with `stream` will do."""

import threading
from types import SimpleNamespace


def chunk(text: str, index: int = 0, prob: float = 0.25, rank: int = 2) -> SimpleNamespace:
    top = [SimpleNamespace(id=9, text=" other", logprob=-1.0, prob=0.4), SimpleNamespace(id=index, text=text, logprob=-2.0, prob=prob)]
    return SimpleNamespace(text=text, tokens=(SimpleNamespace(id=index, text=text, logprob=-2.0, prob=prob, rank=rank, top=top),))


class FakeModel:
    """Yields `words` as chunks; remembers what it was asked. `gate` (if set) is waited for before each chunk after the first."""

    name = "fake"

    def __init__(self, words=None, *, gate: threading.Event | None = None, error: Exception | None = None):
        self.words, self.gate, self.error = words, gate, error
        self.asked, self.closed = [], 0

    def stream(self, prompt, *, max_tokens, top_logprobs=0, **settings):
        self.asked.append((prompt, {"max_tokens": max_tokens, **settings}))
        words = self.words if self.words is not None else [f" w{i}" for i in range(max_tokens)]
        try:
            for index, word in enumerate(words):
                if index and self.gate is not None:
                    self.gate.wait(5)
                yield chunk(word, index)
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1
