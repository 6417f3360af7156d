"""Weights on the GPU: decoded to the CPU's bits, multiplied for any number of rows by every kernel, EXL2, GPTQ and dense side by side.

Marked gpu (`make test-gpu`), but for what no kernel decides.
"""

from pathlib import Path

import pytest
import torch

from exl2nb import ops
from exl2nb.io.shards import TensorStore
from exl2nb.ops import gpu
from exl2nb.quant.exl2 import encode
from exl2nb.quant.gptq_format import GptqTensors

from .cases import exl2, gptq

on_the_gpu = pytest.mark.gpu
MIXES = {
    **{f"{b} bits": [(b, 128)] * 4 for b in (2, 3, 4, 5, 6, 8)},
    "one unit": [(4, 32)],
    "half units": [(5, 32), (4, 96), (3, 32)],
    "all": [(8, 32), (6, 64), (5, 32), (4, 128), (3, 96), (2, 32)],
    "short last group": [(4, 128), (4, 128), (4, 32)],
    "groups of 32": [(4, 32)] * 9,
    "long": [(6, 128)] * 8 + [(4, 128)] * 78,
}
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


def matrix(groups, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(n for _, n in groups)
    high = torch.cat([torch.full((n,), 2**b) for b, n in groups])[:, None]
    codes = (torch.rand(rows, columns, generator=generator) * high).to(torch.uint8)
    scales = torch.randint(0, 16, (len(groups), columns), generator=generator, dtype=torch.uint8)
    largest = (torch.rand(len(groups), generator=generator) * 0.02 + 0.001).half()
    exl2 = encode(codes, scales, largest, groups, torch.randperm(rows, generator=generator))
    return exl2.q_weight, exl2.q_scale, exl2.q_scale_max, exl2.q_groups, exl2.q_invperm


def on_gpu(tensors):
    return [None if t is None else t.cuda() for t in tensors]


def near(got, want, bound=1e-3):
    """Whether the relative error of a product on the GPU is below the bound; want: f64 on the CPU."""
    return got.isfinite().all() and float((got.cpu().double() - want).norm() / want.norm()) < bound


def product(tensors, M, *, columns=352, seed=1):
    """The blob of EXL2 tensors, M random rows, a bias, and the f64 product."""
    dense = ops.reconstruct(*tensors).double()
    x, bias = torch.randn(M, len(dense), generator=torch.Generator().manual_seed(seed)), torch.randn(columns)
    return ops.pack_exl2(*on_gpu(tensors)), x, bias, x.half().double() @ dense + bias.double()


# ---- Decoding


@on_the_gpu
@pytest.mark.parametrize("columns", [32, 96, 224, 4096])
@pytest.mark.parametrize("name", MIXES)
def test_decoded_to_the_bit(name, columns):
    """By `reconstruct`, and packed and unpacked."""
    tensors = matrix(MIXES[name], columns, seed=columns)
    want = ops.reconstruct(*tensors).view(torch.int16)
    for got in (ops.reconstruct(*on_gpu(tensors)), gpu.unpack_half(ops.pack_exl2(*on_gpu(tensors)))):
        assert torch.equal(got.cpu().view(torch.int16), want)


@on_the_gpu
def test_reconstruct_of_a_real_file():
    store = TensorStore(Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw")
    prefix = "model.layers.0.mlp.down_proj"
    tensors = [store.read(f"{prefix}.{part}") for part in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")]
    assert torch.equal(ops.reconstruct(*tensors), ops.reconstruct(*on_gpu(tensors)).cpu())


@on_the_gpu
def test_damaged_tables_are_refused_or_harmless():
    tensors = on_gpu(matrix([(4, 64)], 32))
    for groups in ([7, 0], [4, 1], [2, 0]):
        damaged = [*tensors[:3], torch.tensor(groups, dtype=torch.int16, device="cuda"), tensors[4]]
        with pytest.raises(RuntimeError, match="reconstruct"):
            ops.reconstruct(*damaged)
    outside = tensors[4].clone()
    outside[5] = 1 << 20
    assert ops.reconstruct(*tensors[:4], outside)[5].isnan().all()


# ---- Products


@on_the_gpu
@pytest.mark.parametrize("name", MIXES)
def test_products_for_any_number_of_rows(name):
    blob, x, bias, want = product(matrix(MIXES[name], 352), 19)
    all_rows = ops.linear(x.cuda(), blob, bias.cuda())
    assert near(all_rows, want)
    for rows in (1, 2, 7, 8, 9):
        assert torch.equal(ops.linear(x[:rows].cuda(), blob, bias.cuda()), all_rows[:rows])


@on_the_gpu
@pytest.mark.parametrize(
    ("groups", "columns", "counts"),
    [
        *(pytest.param(groups, 352, (9, 16, 17, 32, 64, 70), id=name) for name, groups in MIXES.items()),
        # every multiprocessor has columns of its own; the last two leave an odd number of tiles
        *(pytest.param([(4, 128), (3, 96)], 32768 + more, (12, 20, 33), id=f"wide, {more} more") for more in (0, 96, 7232)),
        # few columns and many weights each: CTAs share them, and the end of a share need not be the end of an item
        pytest.param([(8, 32), (5, 96), (4, 1888), (3, 288), (2, 704)], 96, (9, 32, 64), id="shared columns"),
    ],
)
def test_stream_k_products(groups, columns, counts):
    """Near the exact product, and the same bits twice."""
    blob, x, bias, want = product(matrix(groups, columns), max(counts), columns=columns)
    head = gpu.blob_head(blob)
    for rows in counts:
        got = gpu.linear_from_head(head, x[:rows].cuda(), bias.cuda(), stream_k=True)
        assert near(got, want[:rows])
        assert torch.equal(got, gpu.linear_from_head(head, x[:rows].cuda(), bias.cuda(), stream_k=True))
        assert near(gpu.linear_from_head(head, x[:rows].cuda(), None, stream_k=True), want[:rows] - bias.double())


@on_the_gpu
@pytest.mark.parametrize("shared", [True, False])
def test_parts_side_by_side(shared):
    parts = [matrix(MIXES[name], columns, seed) for name, columns, seed in (("4 bits", 96, 0), ("3 bits", 32, 1), ("8 bits", 64, 2))]
    if shared:
        parts = [(*part[:4], parts[0][4]) for part in parts]
    blob = ops.pack_concat([ops.pack_exl2(*on_gpu(part)) for part in parts])
    dense, x = torch.cat([ops.reconstruct(*part) for part in parts], 1), torch.randn(3, len(parts[0][4]))
    assert near(ops.linear(x.cuda(), blob), x.half().double() @ dense.double())
    assert torch.equal(gpu.unpack_half(blob).cpu(), dense)


@on_the_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_weights(dtype):
    weight, x = torch.randn(40, 200).to(dtype), torch.randn(5, 200)
    assert near(ops.linear(x.cuda(), ops.pack_dense(weight.cuda())), x.half().double() @ weight.half().T.double(), 1e-5)


@on_the_gpu
@pytest.mark.parametrize("outputs", [1, 31, 131, 333])
def test_an_odd_number_of_outputs(outputs):
    """A head's padding is dropped; a dense one has as many columns as there are tokens. K is 8 over a multiple of the tile there."""
    tensors, x = matrix(MIXES["all"], 352), torch.randn(9, 384)
    dense = ops.reconstruct(*tensors).double()[:, :outputs]
    weight, wide = torch.randn(outputs, 392), torch.randn(9, 392)
    blobs = ops.pack_exl2(*on_gpu(tensors), out_features=outputs), ops.pack_dense(weight.cuda())
    for blob, rows, want in zip(blobs, (x, wide), (x.half().double() @ dense, wide.half().double() @ weight.half().double().T)):
        for count in (1, 9):
            got = ops.linear(rows[:count].cuda(), blob).cpu()
            assert got.shape == (count, outputs)
            assert float((got.double() - want[:count]).abs().max()) < 2e-3 * float(want.abs().max())
    assert torch.equal(gpu.unpack_half(blobs[0]).cpu().double(), dense)


# ---- GPTQ: packed bit for bit, multiplied by the kernels of EXL2


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
    return ops.pack_gptq(*on_gpu(case.arguments), bits=case.bits, in_features=len(case.weight))


@on_the_gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("K", "N", "size", "options"), KINDS)
def test_gptq_against_the_definition(K, N, size, options, bits):
    case = case_of(K, N, bits, size, **options)
    blob = packed(case)
    assert torch.equal(gpu.unpack_half(blob).cpu(), case.weight.half())
    x = torch.randn(19, K, generator=torch.Generator().manual_seed(1))
    rows = ops.linear(x.cuda(), blob)
    assert near(rows, x.half().double() @ case.weight.double(), 1e-5), "codes minus zeros are exact, sums and scales are fp32"
    for M in (1, 2, 8, 9):
        assert torch.equal(ops.linear(x[:M].cuda(), blob), rows[:M])


@on_the_gpu
def test_gptq_beside_other_formats():
    K = 128
    cases = [case_of(K, 48, 4, 32), case_of(K, 16, 3, 16, codes_only=True)]
    quantised, dense = exl2(K, 64, [(4, 128)]), torch.randn(7, K).half()
    blob = ops.pack_concat([*map(packed, cases), ops.pack_exl2(*on_gpu(quantised)), ops.pack_dense(dense.cuda())])
    weight = torch.cat([*(case.weight.half() for case in cases), ops.reconstruct(*quantised), dense.T], 1)
    assert torch.equal(gpu.unpack_half(blob).cpu(), weight)
    x = torch.randn(6, K)
    assert near(ops.linear(x.cuda(), blob), x.half().double() @ weight.double())


@on_the_gpu
def test_wrong_gptq_arguments_are_named():
    arguments = on_gpu(gptq(64, 32, 4, 32, act_order=True).arguments)
    for position, value, message in [
        (1, arguments[1].float(), "scales"),
        (3, arguments[3].clone().fill_(0), "perm does not name every row once"),
        (3, arguments[3][:32].contiguous(), "other rows than are stored"),
        (4, torch.tensor([32, 31], dtype=torch.int32).cuda(), "multiple of 32"),
    ]:
        changed = [*arguments[:position], value, *arguments[position + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            ops.pack_gptq(*changed, bits=4, in_features=64)


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
def test_matrices_that_f16_scales_cannot_hold(scale, dtype, zero, possible):
    """Such matrices are kept in fp16 on the GPU, so the kernels never compute with other numbers than the file's."""
    scales, zeros = torch.full((2, 8), scale).to(dtype), torch.full((2, 8), zero, dtype=torch.int16)
    qweight, group_of = torch.zeros(5, 8, dtype=torch.int32), torch.arange(40) // 20
    found = GptqTensors(qweight=qweight, scales=scales, zeros=zeros, group_of=group_of, bits=4).packed_half()
    assert (found is not None) is possible
    if found is not None:
        _, scales, _, perm, _ = found
        assert scales.dtype == torch.float16 and perm is not None and len(perm) == 64
