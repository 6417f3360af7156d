"""Every filter against its NumPy reference and against Transformers' processor of the same name."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from exl2nb.sampling.min_p import min_p
from exl2nb.sampling.repetition_penalty import repetition_penalty
from exl2nb.sampling.temperature import temperature
from exl2nb.sampling.top_k import top_k
from exl2nb.sampling.top_p import top_p

from . import numpy_reference as reference

SEEN = [3, 5, 5, 0]
CASES = [
    (lambda x: temperature(x, 0.7), lambda x: reference.temperature(x, 0.7), hf.TemperatureLogitsWarper(0.7)),
    (lambda x: temperature(x, 3.5), lambda x: reference.temperature(x, 3.5), hf.TemperatureLogitsWarper(3.5)),
    *((lambda x, k=k: top_k(x, k), lambda x, k=k: reference.top_k(x, k), hf.TopKLogitsWarper(k)) for k in (1, 2, 7, 10_000)),
    *((lambda x, p=p: top_p(x, p), lambda x, p=p: reference.top_p(x, p), hf.TopPLogitsWarper(p)) for p in (1e-6, 0.3, 0.6, 0.9, 0.999)),
    *((lambda x, p=p: min_p(x, p), lambda x, p=p: reference.min_p(x, p), hf.MinPLogitsWarper(p)) for p in (0.01, 0.1, 0.5, 1.0)),
    *(
        (
            lambda x, r=r: repetition_penalty(x, np.array(SEEN), r),
            lambda x, r=r: reference.repetition_penalty(x, SEEN, r),
            hf.RepetitionPenaltyLogitsProcessor(r),
        )
        for r in (1.3, 0.8)
    ),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize(("seed", "size", "spread"), [(0, 7, 1.0), (1, 50, 3.0), (2, 333, 8.0), (3, 4096, 2.5)])
def test_filter(case, seed, size, spread):
    ours, numpy_reference, theirs = CASES[case]
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    got = ours(x.numpy())
    wanted = numpy_reference(x.numpy().astype(np.float64))
    hugging_face = theirs(torch.tensor([SEEN]), x[None].clone())[0].numpy()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(hugging_face))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(got, hugging_face, rtol=1e-6)


def test_input_is_left_alone():
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    before = x.copy()
    for case in CASES:
        case[0](x)
    assert (x == before).all()


def test_ties_stay_together():
    assert np.isfinite(top_k(np.float32([1, 3, 3, 0]), 1)).tolist() == [False, True, True, False]
    assert np.isfinite(top_p(np.float32([1, 3, 3, 0]), 0.1)).tolist() == [False, True, True, False]


def test_top_p_keeps_the_crossing_token_in_any_order():
    logits = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        kept = np.isfinite(top_p(logits[order], 0.6))
        assert {order[i] for i in np.flatnonzero(kept)} == {0, 1}


def test_top_p_counts_what_was_left_out_before():
    logits = np.log(np.float32([0.5, 0.3, 0.15, 0.04, 0.01]))
    for p in (0.1, 0.6, 0.9, 0.97, 0.995):
        assert np.isfinite(top_p(logits[:4], p, left_out=0.01)).tolist() == np.isfinite(top_p(logits, p)).tolist()[:4]
