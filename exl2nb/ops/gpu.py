"""Ops of the GPU alone: blobs, products, the kernels of a step, and the order of launches. Knows nothing about models."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.core import env
from exl2nb.ops import kernel_code
from exl2nb.ops._library import TORCH_LIBRARY

if TYPE_CHECKING:
    from exl2nb.ops.lora_table import LoraTable
    from exl2nb.ops.peers import Peers

for _schema in (
    "gpu_blob_head(Tensor blob) -> Tensor",
    "gpu_unpack(Tensor blob) -> Tensor",
    "gpu_unpack_into(Tensor head, Tensor(a!) out) -> ()",
    "gpu_linear(Tensor head, Tensor x, Tensor? bias, bool stream_k) -> Tensor",
    "gpu_expert_table(Tensor[] heads, int parts) -> Tensor",
    "gpu_step_bytes(Tensor program, int capacity) -> Tensor",
    "gpu_step(Tensor program, Tensor(a!) workspace, int capacity, Tensor ids, Tensor positions, Tensor block_table, Tensor cu_seqlens, "
    "Tensor context_lens, Tensor? logit_rows, Tensor(b!)[] k_pools, Tensor(c!)[] v_pools, int k_format, int v_format, int num_kv_heads, "
    "int head_dim, Tensor(d!) logits, bool pdl, int stream_k_from, Tensor? lora=None, Tensor? adapters=None, Tensor(e!)? lora_sums=None, "
    "int lora_width=0, bool lora_inside=False, Tensor? peers=None, bool prompts=False) -> ()",
    "gpu_exchange(Tensor peers, Tensor x, int[] widths, bool sum, Tensor(a!) out) -> ()",
    "gpu_lora_sums(Tensor program, int width) -> int",
):
    TORCH_LIBRARY.define(_schema)

_ops: Any = torch.ops.exl2nb


capturing = threading.Lock()  # torch captures one graph at a time
_setting = threading.Lock()  # of the process
_fast: dict[str, tuple[int, Callable[[], None]]] = {}  # kind of device -> how many want fast products there, and what ends them


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Products of f32 matrices take less time meanwhile, in the whole process: torch has no such setting for a thread.

    On a GPU they run on tensor cores: TF32, whose error is far below that of an 8-bit code. On the CPU oneDNN computes them, in f32 as
    ever: where MKL has no AVX-512 path, in half the time. Not where it would round to bf16. Meanwhile `torch.get_float32_matmul_precision`
    raises on the CPU. Several callers at once share it, and the last one ends it.
    """
    kind = device.type
    with _setting:
        users, end = _fast.get(kind) or (0, begin_fast_products(kind))
        _fast[kind] = users + 1, end
    try:
        yield
    finally:
        with _setting:
            users, end = _fast.pop(kind)
            if users > 1:
                _fast[kind] = users - 1, end
            else:
                end()


def fast_product_kinds() -> list[str]:
    """Return the kinds of device whose products are fast now."""
    with _setting:
        return list(_fast)


def fast_products_on_cpu(device: torch.device) -> AbstractContextManager[None]:
    """`fast_products` where they are as exact as any: on the CPU."""
    return fast_products(device) if device.type == "cpu" else nullcontext()


def begin_fast_products(kind: str) -> Callable[[], None]:
    """Switch fast products on, where that is possible; what switches them off."""
    on_gpu = kind == "cuda"
    settings: Any = torch.backends.cuda.matmul if on_gpu else getattr(torch.backends.mkldnn, "matmul", None)
    name, value = ("allow_tf32", True) if on_gpu else ("fp32_precision", "bf16")
    if not on_gpu and (cpu_may_round() or not hasattr(settings, name)):  # torch before 2.9 has no such setting
        return lambda: None
    try:
        before = getattr(settings, name)
    except RuntimeError:  # chosen through torch's other switch of the same thing: it stays as it is
        return lambda: None
    inherits = getattr(settings, "fp32_precision", None) in ("none", getattr(torch.backends, "fp32_precision", "none"))
    setattr(settings, name, value)

    def end() -> None:
        setattr(settings, name, before)
        if inherits and hasattr(settings, "fp32_precision"):
            settings.fp32_precision = "none"  # else it would no longer follow torch.backends.fp32_precision

    return end


def cpu_may_round() -> bool:
    """Whether oneDNN would round f32 to bf16 if it may: on processors that multiply tiles (AMX); not known of any but x86, nor where torch
    cannot tell.
    """
    return platform.machine() not in ("x86_64", "AMD64") or bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)())


def half_products(device: torch.device) -> bool:
    """Whether bf16 products take half the time of f32 ones there: processors with instructions for them, as far as torch tells."""
    found = (getattr(torch.cpu, name, lambda: False)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device.type == "cpu" and any(found)


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a GPU; a tenth of the time of `torch.cuda.current_stream`, which makes an object each time."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


class LaunchLock:
    """Held while a step or a stream-K product is launched: in another stream than the last launch, it first waits for that launch.

    The persistent and stream-K GEMMs have CTAs that wait for one another, so all CTAs of a launch must be resident. Two such launches at
    the same time could each hold a part of the GPU and never end. Every other kernel ends by itself. While all models work in one stream,
    which is the default, there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._last: torch.cuda.Stream | None = None

    def __enter__(self) -> torch.cuda.Stream:
        """The current stream."""
        self._lock.acquire()
        try:
            stream = current_stream(self._device)
            if torch.cuda.is_current_stream_capturing():
                return stream  # nothing runs yet
            if self._last is not None and self._last != stream:
                stream.wait_stream(self._last)
            self._last = stream
            return stream
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@cache
def _launch_lock(index: int) -> LaunchLock:
    return LaunchLock(torch.device("cuda", index))


def launch_lock(device: torch.device) -> LaunchLock:
    """The one lock of a device."""
    return _launch_lock(torch.cuda.current_device() if device.index is None else device.index)


def device_error() -> str:
    """Why kernels cannot run on the current GPU; empty where they can. Compiles the smallest one where it is in no cache."""
    torch.empty(0, device="cuda")  # makes its context current
    return kernel_code.kernel_problem()


def blob_head(blob: Tensor) -> Tensor:
    """What the host must know of a blob on the GPU: its address, header and parts, uint8 1-D on the CPU. Valid while the blob lives."""
    return _ops.gpu_blob_head(blob)


def unpack_half(blob: Tensor) -> Tensor:
    """Blob on the GPU -> f16 `(K, N)`, rows in original order, rounded as the format says."""
    return _ops.gpu_unpack(blob)


def unpack_into(head: Tensor, out: Tensor) -> None:
    """The same into f16 `out` of K * N elements of any shape, without waiting for the GPU; `head` from `blob_head`."""
    _ops.gpu_unpack_into(head, out)


def linear_from_head(head: Tensor, x: Tensor, bias: Tensor | None, *, stream_k: bool = False) -> Tensor:
    """`ops.linear` for the blob of `head` (from `blob_head`), without waiting for the GPU. stream_k: more than eight rows go through the
    stream-K GEMM, which decodes every weight once for 64 of them.
    """
    with launch_lock(x.device):
        return _ops.gpu_linear(head, x, bias, stream_k)


def expert_table(heads: Sequence[Tensor], parts: int) -> Tensor:
    """What the kernels of a sparse MLP must know of one kind of matrix of its experts, uint8 1-D on the CPU; they read a copy on the GPU.

    heads: from `blob_head`. parts: of each blob, 2 for [gate; up] and 1 for down.
    """
    return _ops.gpu_expert_table(list(heads), parts)


def head_shape(head: Tensor) -> tuple[int, int]:
    """`(K, N)` from what `blob_head` returned."""
    K, N = head[20:28].view(torch.int32).tolist()
    return K, N


def head_columns(head: Tensor) -> list[tuple[int, int]]:
    """First column and columns of each part, from what `blob_head` returned (GpuPart in csrc/format/gpu_blob.h)."""
    count = int(head[28:32].view(torch.int32))
    return [(first, columns) for columns, _, first in head[72 : 72 + 128 * count].view(torch.int32).view(count, 32)[:, :3].tolist()]


def stored_row_features(head: Tensor, blob: Tensor) -> Tensor:
    """int64, the feature of each stored row of a blob in its first permutation, K for padding; head: from `blob_head`."""
    stored, at = int(head[44:48].view(torch.int32)), int(head[48:56].view(torch.int64))
    return blob[at : at + 4 * stored].view(torch.int32).long() if at else torch.arange(stored, device=blob.device)


class LoraBuffers:
    """Where the kernels of a program look for its adapters: a table of fixed place and size, and room for sums.

    So captured steps stay valid while adapters come and go. More adapters or higher ranks than there is room for need new buffers, for
    which steps are captured anew.

    Args:
        code: of the program. ops: their number. adapters: room for so many, at least. width: of the widest change, at least.
    """

    def __init__(self, code: Tensor, ops: int, adapters: int, width: int, device: torch.device) -> None:
        self.adapters, self.width = 1 << max(adapters - 1, 15).bit_length(), 1 << max(width - 1, 15).bit_length()
        with torch.inference_mode(False):  # the engine's steps and evaluation, which is outside that mode, both write to them
            self.table = torch.zeros(self.adapters, ops, 16, dtype=torch.int64, device=device)
            self.sums = torch.zeros(_ops.gpu_lora_sums(code, self.width), device=device)
        self.inside = False  # whether products add the adapters themselves; a captured step stays as it was captured
        self._written: LoraTable | None = None

    def fit(self, table: LoraTable) -> bool:
        """Whether there is room for all of a table's adapters."""
        return len(table.adapters) <= self.adapters and table.widest <= self.width

    def write(self, table: LoraTable) -> None:
        """Make it the table of the steps launched from now on."""
        if table is self._written:
            return
        words = table.words[6:].view(-1, *self.table.shape[1:])
        self.table[: len(words)].copy_(words.pin_memory() if self.table.is_cuda else words, non_blocking=True)
        self.inside = table.fits_inside and env.get("EXL2NB_LORA_INSIDE", "1") == "1"
        self._written = table  # the one before goes: whatever still runs is ahead in the stream, where its memory is used again


class StepKernels:
    """Runs a program on the GPU for steps of up to `capacity` tokens; keeps the memory that its kernels share.

    Args:
        code: of a `Program`. capacity: tokens. stream_k_from: steps of at least so many tokens (nine or more), and fewer where layers
            are large, use the stream-K GEMM, which gives other bits than fewer tokens get; 0: no step does, and none has several
            products in one launch. peers: the other ranks, where the program is a rank's.
    """

    def __init__(self, code: Tensor, capacity: int, device: torch.device, *, stream_k_from: int = 0, peers: Peers | None = None) -> None:
        self.code, self.capacity, self.stream_k_from, self.peers = code, capacity, stream_k_from, peers
        size, self.vocab = _ops.gpu_step_bytes(code, capacity).tolist()
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        block_table: Tensor,
        cu_seqlens: Tensor,
        context_lens: Tensor,
        logit_rows: Tensor | None,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        formats: tuple[int, int],
        heads: tuple[int, int],
        logits: Tensor,
        *,
        pdl: bool = True,
        lora: tuple[LoraBuffers, Tensor] | None = None,
        prompts: bool = False,
    ) -> None:
        """One step: K and V go to their pages, `logits` f32 `(R, V)` is filled. All tensors on the GPU.

        logit_rows: int32 `(R,)`; None: every token's, which makes a stream-K step a little quicker, with other bits.
        formats: of the K and V pools (cuda/attention/attention.h). heads: of the pools. Ids, pages and positions are not checked, which
        would wait for the GPU: the caller must have checked them. lora: the adapters, and int32 `(T,)` on the GPU, the row of each token's
        adapter, -1 for none. prompts: sequences may have more than 8 tokens.
        """
        adapted = () if lora is None else (lora[0].table, lora[1], lora[0].sums, lora[0].width, lora[0].inside)
        with launch_lock(self.workspace.device):
            _ops.gpu_step(
                self.code, self.workspace, self.capacity, ids, positions, block_table, cu_seqlens, context_lens, logit_rows, list(k_pools),
                list(v_pools), *formats, *heads, logits, pdl, self.stream_k_from, *(adapted or (None, None, None, 0, False)),
                None if self.peers is None else self.peers.words, prompts,
            )  # fmt: skip
