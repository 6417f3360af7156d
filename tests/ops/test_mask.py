"""A bit mask on rows of logits: the compiled op against its reference, bit for bit."""

import pytest
import torch

from exl2nb.ops import mask, mask_logits, reference


def case(vocab, kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator)
    words = -(-vocab // 32)
    bits = {
        "none": torch.zeros(words, dtype=torch.int32),
        "all": torch.full((words,), -1, dtype=torch.int32),
        "random": torch.randint(-(2**31), 2**31, (words,), generator=generator).to(torch.int32),
        "runs": torch.where(torch.rand(words, generator=generator) < 0.5, 0, -1).to(torch.int32),
        "single": (1 << torch.randint(0, 31, (words,), generator=generator)).to(torch.int32),
    }[kind]
    return logits, bits


@pytest.mark.parametrize("kind", ["none", "all", "random", "runs", "single"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096, 5001])
def test_against_the_reference(vocab, kind):
    logits, bits = case(vocab, kind)
    before = logits.clone()
    got = mask_logits(logits, bits)
    assert torch.equal(got, reference.mask_logits(logits, bits))
    assert torch.equal(logits, before)
    assert got.tolist() == [float(x) if int(bits[i // 32]) >> (i % 32) & 1 else -torch.inf for i, x in enumerate(logits)]


def test_numbers_that_are_none_pass_as_they_are():
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0] * 8)
    got = mask_logits(logits, torch.tensor([0b1111], dtype=torch.int32))
    assert torch.equal(got[:4].view(torch.int32), logits[:4].view(torch.int32))
    assert torch.equal(got[4:], torch.full((28,), -torch.inf))


@pytest.mark.parametrize(
    ("logits", "bits", "words"),
    [
        (torch.zeros(64), torch.zeros(3, dtype=torch.int32), r"bits .*expected .*\(2"),
        (torch.zeros(64), torch.zeros(2, dtype=torch.int64), "bits .*int32"),
        (torch.zeros(1, 64), torch.zeros(2, dtype=torch.int32), "logits"),
        (torch.zeros(64, dtype=torch.float16), torch.zeros(2, dtype=torch.int32), "logits"),
    ],
)
def test_refusals(logits, bits, words):
    for op in (mask_logits, mask._mask_logits):
        with pytest.raises((RuntimeError, ValueError), match=words):
            op(logits, bits)


def test_opcheck():
    torch.library.opcheck(torch.ops.exl2nb.mask_logits.default, case(100, "random"))
