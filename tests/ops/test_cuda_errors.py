"""CUDA errors name the op, the shapes and the dtypes, and the next call works. Marked gpu: `make test-gpu`."""

import ctypes

import pytest
import torch

from exl2nb import ops
from exl2nb.ops import gpu

from .cases import exl2

pytestmark = pytest.mark.gpu
RELAXED = 2  # cudaStreamCaptureModeRelaxed: memory may be allocated


def refused(call):
    """The error of `call` on a stream that is being captured, where CUDA refuses to synchronise."""
    assert torch.version.cuda
    cuda, stream, graph = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}"), torch.cuda.Stream(), ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        assert cuda.cudaStreamBeginCapture(handle, RELAXED) == 0
        try:
            with pytest.raises(RuntimeError) as told:
                call()
        finally:
            cuda.cudaStreamEndCapture(handle, ctypes.byref(graph))
    cuda.cudaGetLastError()
    torch.cuda.synchronize()
    return str(told.value)


def test_a_failed_launch_names_op_shapes_and_dtypes():
    tensors = [t.cuda() for t in exl2(96, 64, [(4, 64), (3, 32)], seed=0, scale=0.1)]
    blob = ops.pack_exl2(*tensors)
    x = torch.randn(3, 96, device="cuda")
    want = ops.linear(x, blob)
    cases = {
        "reconstruct of q_weight int32 (11, 64) to float16 (96, 64) in 2 groups: ": lambda: ops.reconstruct(*tensors),
        "pack_exl2 of int16 (4): ": lambda: ops.pack_exl2(*tensors),
        f"linear of uint8 ({len(blob)}): ": lambda: ops.linear(x, blob),
    }
    for words, call in cases.items():
        told = refused(call)
        assert words in told
        assert "captur" in told
        assert torch.equal(ops.linear(x, blob), want), "nothing is left behind"


def test_a_step_names_the_op_that_failed():
    """A program whose layers the cache does not have."""
    H, D = 64, 64
    program = ops.Program("cuda")
    program.add(ops.EmbedOp(table=torch.randn(8, H).cuda()))
    qkv, nothing = ops.pack_dense(torch.randn(3 * D, H).cuda()), ops.pack_dense(torch.zeros(H, D).cuda())
    still = dict(zip(("cos", "sin"), torch.zeros(2, 8, 0).cuda()))
    for layer in (0, 3):
        program.add(ops.QkvOp(eps=1e-5, blob=qkv, **still, num_heads=1, num_kv_heads=1, head_dim=D, layer=layer))
        program.add(ops.AttentionOp(layer=layer, scale=0.1))
        program.add(ops.ResidualOp(blob=nothing))
    program.add(ops.HeadOp(blob=ops.pack_dense(torch.eye(H).cuda())))
    stepper = gpu.StepKernels(program.code, 2, torch.device("cuda"))
    pools = [torch.zeros(1, 1, 256, D, dtype=torch.float16, device="cuda") for _ in range(2)]
    one = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = one, one, one.view(1, 1), torch.tensor([0, 1], dtype=torch.int32, device="cuda"), one + 1, one
    with pytest.raises(RuntimeError) as told:
        stepper.run(*arguments, pools[:1], pools[1:], (0, 0), (1, D), torch.empty(1, H, device="cuda"))
    assert "gpu_step of 1 tokens in 1 sequences, K float16 (1, 1, 256, 64), V float16 (1, 1, 256, 64), logits float32 (1, 64)" in str(
        told.value
    )
    assert "paged_attention, op 5 of the program: its layer has no pools" in str(told.value)
