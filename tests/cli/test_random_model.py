"""Models of random codes: benchmarks compare devices by what these models say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.loader import load_model


@pytest.mark.parametrize("bpw", [2.55, 4.0])
def test_tokens_of_a_random_model_keep_their_own_logits(bpw: float, script: Any, tmp_path: Path) -> None:
    """Codes are half a step below zero on average. Over many layers that can leave one direction, and logits that differ by a sign."""
    make = script("benchmarks/make_random_model.py")
    make.make(replace(make.SHAPES["demo"], num_hidden_layers=24), tmp_path, bpw=bpw)
    model = load_model(tmp_path, device="cpu", context=64)
    cache = model.new_cache(model.cache_spec(256 * 32, mode="fp16"))
    with torch.inference_mode():
        logits = model.forward(Batch.build([SequenceSlice(ids=[3 + i], start=0, pages=[i]) for i in range(32)]), cache)
    model.close()
    rows = F.normalize(logits, dim=1)
    alike = (rows @ rows.T - torch.eye(32)).abs().sum() / (32 * 31)
    assert alike < 0.4
    assert len(logits.argmax(dim=1).unique()) > 8
