"""The CUDA library against the CPU's: the same bits. Marked gpu: `make test-gpu` on a machine that has one."""

from pathlib import Path

import pytest
import torch

from exl2nb import ops
from exl2nb.io.shards import TensorStore
from exl2nb.quant.exl2 import encode

pytestmark = pytest.mark.gpu
MIXES = [[(b, 128)] for b in (2, 3, 4, 5, 6, 8)] + [[(8, 32), (6, 64), (5, 32), (4, 128), (3, 96), (2, 32)], [(4, 128), (4, 32)]]


def parts(matrix):
    return matrix.q_weight, matrix.q_scale, matrix.q_scale_max, matrix.q_groups, matrix.q_invperm


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("columns", [32, 96, 4096])
def test_reconstruct_is_the_cpus_to_the_bit(groups, columns):
    generator = torch.Generator().manual_seed(columns)
    rows = sum(n for _, n in groups)
    high = torch.cat([torch.full((n,), 2**b) for b, n in groups])[:, None]
    codes = (torch.rand(rows, columns, generator=generator) * high).to(torch.uint8)
    scales = torch.randint(0, 16, (len(groups), columns), generator=generator, dtype=torch.uint8)
    largest = (torch.rand(len(groups), generator=generator) * 0.02).half()
    tensors = parts(encode(codes, scales, largest, groups, torch.randperm(rows, generator=generator)))
    cpu, cuda = ops.reconstruct(*tensors), ops.reconstruct(*(t.cuda() for t in tensors))
    assert torch.equal(cpu.view(torch.int16), cuda.cpu().view(torch.int16))


def test_reconstruct_of_a_real_file():
    store = TensorStore(Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw")
    prefix = "model.layers.0.mlp.down_proj"
    tensors = [store.read(f"{prefix}.{part}") for part in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")]
    cpu, cuda = ops.reconstruct(*tensors), ops.reconstruct(*(t.cuda() for t in tensors))
    assert torch.equal(cpu, cuda.cpu())


def test_damaged_tables_are_refused_or_harmless():
    matrix = encode(
        torch.zeros(64, 32, dtype=torch.uint8), torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1).half(), [(4, 64)], torch.arange(64)
    )
    tensors = [t.cuda() for t in parts(matrix)]
    for groups in ([7, 0], [4, 1], [2, 0]):
        damaged = [*tensors[:3], torch.tensor(groups, dtype=torch.int16, device="cuda"), tensors[4]]
        with pytest.raises(RuntimeError, match="reconstruct"):
            ops.reconstruct(*damaged)
    outside = tensors[4].clone()
    outside[5] = 1 << 20
    assert ops.reconstruct(*tensors[:4], outside)[5].isnan().all()
