"""GPTQ weights on the GPU: packed bit for bit, multiplied by the kernels of EXL2. Marked gpu, but for what no kernel decides."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops import gpu
from exl2nb.quant.gptq import GptqTensors

from .cases import exl2, gptq

KINDS = [
    pytest.param(256, 96, 128, {"zeros": False}, id="symmetric"),
    pytest.param(512, 83, 128, {"act_order": True}, id="act-order, odd outputs"),
    pytest.param(256, 64, 64, {}, id="groups of a unit"),
    pytest.param(224, 48, 32, {"act_order": True}, id="groups of half a unit"),
    pytest.param(96, 40, 16, {"codes_only": True}, id="groups of 16, padded"),
    pytest.param(160, 48, 64, {"act_order": True}, id="short last group"),
    pytest.param(480, 48, 96, {}, id="groups of one and a half"),
    pytest.param(320, 33, 320, {}, id="one group"),
    pytest.param(4096 + 32, 4096, 128, {}, id="large"),
]


def case_of(K, N, bits, size, *, codes_only=False, **options):
    """A random matrix; codes_only: zero points that a code can have, so that padding rows can hold them."""
    case = gptq(K, N, bits, size, **options, seed=bits)
    if codes_only:
        qweight, scales, zeros, perm, rows = case.arguments
        clamped = zeros.clamp(max=2**bits - 1)
        group = torch.empty(K, dtype=torch.int64)
        first = 0
        for g, n in enumerate(rows.tolist()):
            members = perm[first : first + n].long()
            group[members[members < K]] = g
            first += n
        weight = case.weight + (zeros - clamped).float()[group] * scales.float()[group]
        case = type(case)((qweight, scales, clamped, perm, rows), bits, weight)
    return case


def packed(case):
    parts = [None if part is None else part.cuda() for part in case.arguments]
    return ops.pack_gptq(*parts, bits=case.bits, in_features=len(case.weight))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("K", "N", "size", "options"), KINDS)
def test_against_the_definition(K, N, size, options, bits):
    case = case_of(K, N, bits, size, **options)
    blob = packed(case)
    assert torch.equal(gpu.unpack_half(blob).cpu(), case.weight.half())
    x = torch.randn(19, K, generator=torch.Generator().manual_seed(1))
    want = x.half().double() @ case.weight.double()
    rows = ops.linear(x.cuda(), blob)
    assert float((rows.cpu().double() - want).norm() / want.norm()) < 1e-5, "codes minus zeros are exact, sums and scales are fp32"
    for M in (1, 2, 8, 9):
        assert torch.equal(ops.linear(x[:M].cuda(), blob), rows[:M])


@pytest.mark.gpu
def test_beside_other_formats():
    K = 128
    cases = [case_of(K, 48, 4, 32), case_of(K, 16, 3, 16, codes_only=True)]
    quantised = exl2(K, 64, [(4, 128)])
    dense = torch.randn(7, K).half()
    blob = ops.pack_concat([*map(packed, cases), ops.pack_exl2(*(t.cuda() for t in quantised)), ops.pack_dense(dense.cuda())])
    weight = torch.cat([*(case.weight.half() for case in cases), ops.reconstruct(*quantised), dense.T], 1)
    assert torch.equal(gpu.unpack_half(blob).cpu(), weight)
    x = torch.randn(6, K)
    want = x.half().double() @ weight.double()
    assert float((ops.linear(x.cuda(), blob).cpu().double() - want).norm() / want.norm()) < 1e-3


@pytest.mark.gpu
def test_wrong_arguments_are_named():
    case = gptq(64, 32, 4, 32, act_order=True)
    arguments = [t.cuda() for t in case.arguments]
    for position, value, message in [
        (1, arguments[1].float(), "scales"),
        (3, arguments[3].clone().fill_(0), "perm does not name every row once"),
        (3, arguments[3][:32].contiguous(), "other rows than are stored"),
        (4, torch.tensor([32, 31], dtype=torch.int32).cuda(), "multiple of 32"),
    ]:
        changed = [*arguments[:position], value, *arguments[position + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            ops.pack_gptq(*changed, bits=4, in_features=64)


def tensors(*, scales, zeros, K=40):
    groups = torch.arange(K) // 20
    return GptqTensors(qweight=torch.zeros(K // 8, 8, dtype=torch.int32), scales=scales, zeros=zeros, group_of=groups, bits=4)


@pytest.mark.parametrize(
    ("scale", "dtype", "zero", "possible"),
    [
        (0.5, torch.float16, 8, True),
        (1e-6, torch.float16, 8, True),
        (0.1, torch.float32, 8, True),
        (1e-6, torch.float32, 8, False),
        (1e5, torch.float32, 8, False),
        (0.5, torch.float16, 16, False),
    ],
)
def test_what_f16_scales_cannot_hold_is_told(scale, dtype, zero, possible):
    """Such matrices are kept in fp16 on the GPU, so the kernels never compute with other numbers than the file's."""
    found = tensors(scales=torch.full((2, 8), scale).to(dtype), zeros=torch.full((2, 8), zero, dtype=torch.int16)).packed_half()
    assert (found is not None) is possible
    if found is not None:
        _, scales, _, perm, _ = found
        assert scales.dtype == torch.float16 and perm is not None and len(perm) == 64
