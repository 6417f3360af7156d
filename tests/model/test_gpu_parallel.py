"""Ranks on GPUs: the logits of one GPU, for layers of every kind and steps of every size.

Two ranks may have one GPU: their kernels then wait for each other's turn, so a step takes long, and one kind of layers must do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.loader import load_model
from exl2nb.model.parallel import load_parallel

from .zoo import build, write, write_exl2

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 256, "intermediate_size": 768}


def batches(vocab: int) -> list[Batch]:
    """A prompt, a few tokens of it, one token, and steps of 3, 6, 12 and 40 sequences."""
    ids = [(7 * i + 3) % vocab for i in range(60)]
    found = [Batch.single(ids[a:b], start=a, pages=[1, 0], logit_rows="all") for a, b in ((0, 40), (40, 45), (45, 46))]
    return found + [
        Batch.build([SequenceSlice(ids=[ids[i % 60]], start=0, pages=[2 + i], logit_rows="last") for i in range(count)])
        for count in (3, 6, 12, 40)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe-bias", "cohere"])
def test_the_logits_of_one_gpu(name: str, size: int, tmp_path: Path) -> None:
    if (name, size) != ("llama", 2) and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, there are {torch.cuda.device_count()}")
    moe = {"moe_intermediate_size": 256} if "moe" in name else {}
    folder = write_exl2(write(name, build(name, **SHAPE, **moe), tmp_path / "dense"), tmp_path / "exl2")
    whole = load_model(folder, device="cuda")
    model = load_parallel(folder, [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(size)], context=None)
    try:
        cache, shared = (of.new_cache(of.cache_spec(256 * 48)) for of in (whole, model))
        for batch in batches(whole.config.vocab_size):
            expected = whole.forward(batch, cache)
            found = model.forward(batch, shared)
            torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * float(expected.std()))
            assert torch.equal(model.forward(batch, shared), found), "the same bits every time"
            model.check()
    finally:
        model.close()
