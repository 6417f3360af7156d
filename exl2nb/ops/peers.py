"""Buffers by which the ranks of a model exchange numbers, each on its own GPU and written to by all (csrc/cuda/runtime/peers.cuh).

Memory of one process is opened by another through CUDA IPC, and GPUs write to each other over NVLink or PCIe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from exl2nb.core.errors import DeviceError

MOST_RANKS = 8  # kMaxRanks of peers.cuh
HEADER_BYTES = 256
EXCHANGE_SLOTS = 2
NUMBER_BYTES = 8
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

_ops: Any = torch.ops.exl2nb


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)  # CUipcMemHandle


def peer_buffer_bytes(size: int, numbers: int) -> int:
    """Bytes of a rank's buffer for so many ranks that send so many numbers each."""
    return HEADER_BYTES + EXCHANGE_SLOTS * size * numbers * NUMBER_BYTES


class Peers:
    """The exchange buffers of all ranks, as one rank sees them.

    Args:
        rank, size: this one, and how many. numbers: that a rank sends at most in one exchange. vocab: where each rank's part of the logits
            begins, and their number.
        device: of this rank. swap: gives this rank's bytes to all, returns those of every rank.

    Raises:
        DeviceError: the GPUs cannot write to each other's memory; says why.

    Attributes:
        words: what ops take as `peers`. vocab: numbers of each rank's part of the logits.
    """

    def __init__(
        self, rank: int, size: int, *, numbers: int, vocab: Sequence[int], device: torch.device, swap: Callable[[bytes], list[bytes]]
    ) -> None:
        self.device, self.rank, self.size, self._opened = device, rank, size, list[int]()
        self.vocab = [b - a for a, b in pairwise(vocab)]
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # makes the context current
            own, handle = ctypes.c_uint64(), _Handle()
            self._ask("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(peer_buffer_bytes(size, numbers)))
            self._own = own.value
            self._ask("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(peer_buffer_bytes(size, numbers)))
            torch.cuda.synchronize(device)
            self._ask("cuIpcGetMemHandle", ctypes.byref(handle), own)
            addresses = []
            for other, theirs in enumerate(swap(bytes(handle))):
                address = ctypes.c_uint64(self._own)
                if other != rank:
                    self._ask("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(theirs), _LAZY_PEER_ACCESS)
                    self._opened.append(address.value)
                addresses.append(address.value)
        pad = [0] * (MOST_RANKS - size)
        self.words = torch.tensor([rank, size, numbers, self._stop.data_ptr(), *addresses, *pad, *vocab, *pad], dtype=torch.int64)

    def stop(self) -> None:
        """End every wait for another rank; what is exchanged afterwards is undefined."""
        self._stop[0] = 1

    def gather(self, piece: Tensor, widths: Sequence[int]) -> Tensor:
        """The pieces f32 `(T, widths[rank])` of all ranks side by side."""
        out = torch.empty(len(piece), sum(widths), device=piece.device)
        _ops.gpu_exchange(self.words, piece.contiguous(), list(widths), False, out)
        return out

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x f32 `(T, H)`, in place; the same bits on every rank."""
        _ops.gpu_exchange(self.words, x, [x.shape[1]], True, x)
        return x

    def share(self, numbers: Tensor) -> None:
        """Rank 0's numbers, int32 1-D, in place."""
        row = numbers.view(torch.float32)
        _ops.gpu_exchange(self.words, row if self.rank == 0 else row[:0], [len(row), *[0] * (self.size - 1)], False, row)

    def close(self) -> None:
        """Free the memory. The other ranks must have ended, or closed too."""
        with torch.cuda.device(self.device):
            for address in self._opened:
                self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
            if self._own:
                self._driver.cuMemFree_v2(ctypes.c_uint64(self._own))
        self._opened, self._own = [], 0

    def _ask(self, function: str, *arguments: Any) -> None:
        if error := getattr(self._driver, function)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            raise DeviceError(
                f"parallel='tensor' on {self.device}: {function}: {(text.value or b'unknown error').decode()}; the GPUs must be able to "
                "write to each other's memory (`nvidia-smi topo -p2p w`): take parallel='layers', which goes through the host"
            )
