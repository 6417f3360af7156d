"""Blobs of the CPU's layout unpacked by torch: the fp16 numbers that the format says, for every width, format and shape."""

from __future__ import annotations

import pytest
import torch

from exl2nb import ops
from exl2nb.ops import host_prefill
from exl2nb.ops.host_prefill import Packed

K = 256


def exl2(mix: list[tuple[int, int]], columns: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Random codes and scales. mix: (bits, rows) of each group; they are K rows."""
    rng = torch.Generator().manual_seed(seed)
    starts = [0]
    for bits, rows in mix:
        starts.append(starts[-1] + rows * bits // 32)
    low, high = -(2**31), 2**31 - 1
    return (
        torch.randint(low, high, (starts[-1], columns), dtype=torch.int32, generator=rng),
        torch.randint(low, high, (len(mix), columns // 8), dtype=torch.int32, generator=rng),
        torch.rand(len(mix), generator=rng).half() * 0.01,
        torch.tensor([v for (bits, _), start in zip(mix, starts) for v in (bits, start)], dtype=torch.int16),
        torch.randperm(K, generator=rng).int(),
    )


def unpacked(blob: torch.Tensor) -> torch.Tensor:
    """By a copy of the blob's bytes; the blob's own are not read again."""
    copy = torch.zeros_like(blob)
    packed = Packed.of(blob, copy)
    copy.copy_(blob)
    out = torch.full((packed.K, packed.N), torch.nan, dtype=torch.float16)
    packed.unpack_into(out)
    return out


@pytest.mark.parametrize("chunk", [1 << 24, K * 16])
@pytest.mark.parametrize("mix", [[(b, 64), (b, 192)] for b in (2, 3, 4, 5, 6, 8)] + [[(8, 32), (6, 64), (5, 32), (3, 64), (2, 64)]])
def test_exl2_becomes_what_the_format_says(mix: list[tuple[int, int]], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_prefill, "UNPACK_CHUNK_WEIGHTS", chunk)
    for outputs in (96, 90):  # the last tile is full, or not
        parts = exl2(mix, 96)
        blob = ops.pack_exl2(*parts, out_features=outputs)
        assert torch.equal(unpacked(blob), ops.reconstruct(*parts)[:, :outputs])


def test_matrices_side_by_side() -> None:
    parts, others = exl2([(4, 256)], 64), exl2([(3, 128), (6, 128)], 32, seed=2)
    dense = [torch.randn(40, K).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    blobs = [ops.pack_exl2(*parts), *(ops.pack_dense(one) for one in dense), ops.pack_exl2(*others, out_features=20)]
    expected = [ops.reconstruct(*parts), *(one.T.half() for one in dense), ops.reconstruct(*others)[:, :20]]
    assert torch.equal(unpacked(ops.pack_concat(blobs)), torch.cat(expected, 1))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq(bits: int, ordered: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    qweight = torch.randint(-(2**31), 2**31 - 1, (K * bits // 32, 48), dtype=torch.int32, generator=rng)
    groups = torch.tensor([64] * 4, dtype=torch.int32)
    zeros = torch.randint(0, 1 << bits, (4, 48), generator=rng).short()
    perm = None
    if not ordered:  # the last group has padding
        groups = torch.tensor([64, 64, 64, 96], dtype=torch.int32)
        perm = torch.cat([torch.randperm(K, generator=rng), torch.full((32,), K)]).int()
    for scales in (torch.rand(4, 48, generator=rng).half() * 0.1, torch.rand(4, 48, generator=rng) * 0.1):
        for some in (None, zeros):
            blob = ops.pack_gptq(qweight, scales, some, perm, groups, bits=bits, in_features=K)
            torch.testing.assert_close(unpacked(blob).float(), ops.unpack(blob), rtol=2**-10, atol=0)
