"""A model without weights: logits are a pure function of the ids in the cache, so that every schedule must give the same text."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import exl2nb
from exl2nb.cache.spec import PAGE_SIZE, CacheSpec
from exl2nb.generator.engine import Engine
from exl2nb.tokenizer.tokenizer import Tokenizer

DEMO = Path(exl2nb.__file__).parent / "demo_model"
VOCAB = 4096


class FakeModel:
    """Keeps the ids it is shown in the K pool, as a real model keeps keys, and computes the next logits from what it finds there.

    A page freed too early, a wrong slot, position or context length therefore changes the text.

    Args:
        step_s: how long a step takes, the GIL released.
    """

    def __init__(self, *, step_s: float = 0.0, vocab: int = VOCAB) -> None:
        self.vocab, self.step_s, self.closed = vocab, step_s, False
        self.fail_at: dict[int, BaseException] = {}  # step number -> what it raises
        self.steps: list[tuple[int, int]] = []  # (sequences, tokens) of each step
        self.entered = threading.Event()
        self.gate: threading.Event | None = None  # a step waits for it
        self.nan_after: int | None = None
        self.poison: int | None = None  # a step with this id fails
        self.most_tokens: int | None = None  # a larger step has no memory

    def forward(self, batch, cache):
        step = len(self.steps)
        self.steps.append((len(batch.context_lens), len(batch.input_ids)))
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(30)
        if self.step_s:
            time.sleep(self.step_s)
        if step in self.fail_at:
            raise self.fail_at[step]
        if self.poison is not None and (batch.input_ids == self.poison).any():
            raise ValueError("poison")
        if self.most_tokens is not None and len(batch.input_ids) > self.most_tokens:
            raise MemoryError("not enough memory")
        ids, slots, positions = (t.numpy() for t in (batch.input_ids, batch.slot_mapping, batch.positions))
        pool = cache.k[0].view(-1)  # one number per slot: the cache of this model has one head of one number
        pool[torch.from_numpy(slots.astype(np.int64))] = torch.from_numpy(ids.astype(np.float32))
        rows = []
        bounds = batch.cu_seqlens.tolist()
        for row in batch.logit_rows.tolist():
            b = int(np.searchsorted(bounds, row, side="right")) - 1
            length = int(positions[row]) + 1
            assert length <= int(batch.context_lens[b])
            at = np.arange(length)
            table = batch.block_table[b].numpy().astype(np.int64)
            seen = pool[torch.from_numpy(table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)].numpy().astype(np.int64)
            rows.append(self.logits_after(seen))
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self.vocab)

    def logits_after(self, ids) -> np.ndarray:
        """The rule: a seeded row that depends on every id and its place."""
        key = int((np.asarray(ids, np.int64) * (np.arange(len(ids)) * 2 + 1)).sum() % (2**31))
        if self.nan_after is not None and len(ids) > self.nan_after:
            return np.full(self.vocab, np.nan, np.float32)
        return np.random.default_rng(key).normal(size=self.vocab).astype(np.float32) * 3

    def close(self):
        self.closed = True


def spec(pages: int = 16) -> CacheSpec:
    return CacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, num_pages=pages, mode="fp32")


def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def engine(model: FakeModel | None = None, *, pages: int = 16, **kwargs) -> Engine:
    return Engine(model or FakeModel(), kwargs.pop("tokenizer", None) or tokenizer(), spec(pages), vocab_size=VOCAB, **kwargs)


def expected(model: FakeModel, prompt, count: int) -> list[int]:
    """Greedy continuation by the rule alone."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits_after(ids).argmax()))
    return ids[len(prompt) :]


@contextmanager
def held(engine):
    """The engine runs a call until the block ends."""
    began, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=engine.call, args=(lambda: (began.set(), release.wait(30)),))
    thread.start()
    assert began.wait(10)
    try:
        yield
    finally:
        release.set()
        thread.join()
