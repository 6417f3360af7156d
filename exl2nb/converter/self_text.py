"""Calibration text that the model writes itself: plain samples from an empty context. Knows nothing of what they are used for."""

from __future__ import annotations

import os
from contextlib import closing

import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import PAGE_SIZE
from exl2nb.converter.calibrate import Encoder
from exl2nb.core.progress import Meter, Sink
from exl2nb.model.batch import Batch, Span
from exl2nb.model.loader import load_model

AT_ONCE = 32  # sequences that are written together


def write(directory: str | os.PathLike[str], encoder: Encoder, *, rows: int, length: int, seed: int, sink: Sink | None = None) -> Tensor:
    """Samples at temperature 1, nothing filtered, each beginning with what the tokenizer puts in front of a text, or with any token.

    Args:
        directory: the model; it is loaded as it is.
        encoder: its tokenizer.
        rows, length: how many samples, of how many tokens.
        seed: of the samples.
        sink: takes the events of stage "write text".

    Returns:
        int32 `(rows, length)`; the same for the same arguments on the same machine.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    with closing(load_model(directory, context=length)) as model, Meter("write text", total=rows, unit="rows", sink=sink) as meter:
        begin, pages = encoder.encode("")[:1], model.cache_spec(length).num_pages
        for first in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - first)
            cache = KVCache(model.cache_spec(pages * PAGE_SIZE * count), device=model.device)
            ids = [list(begin) or torch.randint(model.config.vocab_size, (1,), generator=generator).tolist() for _ in range(count)]
            for start in range(length - 1):
                spans = [Span(ids=[row[start]], start=start, pages=range(b * pages, (b + 1) * pages)) for b, row in enumerate(ids)]
                logits = model.forward(Batch.build(spans, device=model.device), cache)
                picked = torch.multinomial(logits.float().cpu().softmax(-1), 1, generator=generator)
                for row, token in zip(ids, picked[:, 0].tolist()):
                    row.append(token)
            found += ids
            meter.step(count)
    return torch.tensor(found, dtype=torch.int32)
