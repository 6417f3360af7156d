"""The kernel launches of a GPU step, planned on the host for a GPU that need not be there. Knows programs, no models."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2nb.ops import _load, kv_codes
from exl2nb.ops import blob as layout
from exl2nb.ops._library import TORCH_LIBRARY, check_argument
from exl2nb.ops.program import Program

for _schema in (
    "gpu_planned_blob(Tensor parts, int K, int address) -> Tensor",
    "gpu_planned_experts(Tensor[] blobs, int parts) -> Tensor",
    "gpu_step_plan(Tensor program, int[] gpu, int capacity, int tokens, int? logit_rows, int sequences, int max_pages, int k_format, "
    "int v_format, bool pdl, int stream_k_from, int lora_width, bool lora_inside, Tensor? peers, bool prompts) -> Tensor",
):
    TORCH_LIBRARY.define(_schema)

_ops: Any = torch.ops.exl2nb
_FIRST_REGION, _PROGRAM_TENSORS = 0x5E000000, 0x1000  # of csrc/torch/ops_cuda_plan.cpp: a region of made-up addresses for each tensor


@dataclass(frozen=True)
class GpuFacts:
    """What the choice of kernels depends on: compute capability, multiprocessors, and bytes of shared memory."""

    major: int
    minor: int
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int


GPUS = {
    "H100": GpuFacts(9, 0, 132, 227 << 10, 228 << 10),
    "B200": GpuFacts(10, 0, 148, 227 << 10, 228 << 10),
    "A100": GpuFacts(8, 0, 108, 163 << 10, 164 << 10),
    "RTX 4090": GpuFacts(8, 9, 128, 99 << 10, 100 << 10),
    "T4": GpuFacts(7, 5, 40, 64 << 10, 64 << 10),
}


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch.

    op: number of the program's op. kernel: its name with template arguments, or "copy". how: grid, threads, bytes of shared memory, "pdl"
    where it may start early. arguments: the words of its arguments that are not 0, "offset:value"; addresses are those of a named buffer.
    """

    op: int
    kernel: str
    how: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.op:4} {self.kernel} {self.how}"


class PlannedProgram(Program):
    """A program of blobs on the CPU, laid out as the GPU would have it, with made-up addresses: steps can be planned, not run.

    Raises:
        ValueError: the CUDA library is missing.
    """

    def __init__(self) -> None:
        check_argument(available(), "PlannedProgram", "libexl2nb_cuda.so", None, "the compiled library")
        super().__init__("meta")
        self._regions: dict[int, int] = {}  # by address of a tensor
        self._perms: dict[bytes, int] = {}

    def parts_of(self, blob: Tensor) -> tuple[int, list[layout.BlobPart]]:
        """K and the matrices of a blob."""
        return layout.read_blob(blob)

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)  # alive, so that no other tensor gets its address
        number = self._regions.setdefault(tensor.data_ptr(), len(self._regions))
        return _FIRST_REGION + _PROGRAM_TENSORS + number << 32

    def _f32(self, tensor: Tensor) -> int:
        return self._address(tensor)

    def _blob(self, blob: Tensor) -> int:
        if blob.data_ptr() not in self.heads:
            K, parts = self.parts_of(blob)
            words = [word for part in parts for word in self._words_of(part, K)]
            self.heads[blob.data_ptr()] = _ops.gpu_planned_blob(torch.tensor(words), K, self._address(blob))
        return self.heads[blob.data_ptr()].data_ptr()

    def _words_of(self, part: layout.BlobPart, K: int) -> list[int]:
        kind = {layout.EXL2_PART: 1, layout.GPTQ_PART: 2}.get(part.kind, 0)
        identity = part.perm is None or np.array_equal(part.perm, np.arange(K))
        order = 0 if part.perm is None or identity else self._perms.setdefault(part.perm.tobytes(), len(self._perms) + 1)
        stored = K if part.perm is None else len(part.perm)
        groups = [int(group[name]) for group in part.groups for name in ("bits", "rows")]
        return [kind, part.outputs, order, stored, len(part.groups), *groups]

    def _expert_table(self, heads: list[Tensor], parts: int) -> tuple[int, int]:
        table = _ops.gpu_planned_experts(heads, parts)
        return table.data_ptr(), self._address(table)


def available() -> bool:
    """Whether the CUDA library is there, which needs no GPU to plan. Loads it where that has not been done."""
    found = _load.load_libraries()
    if found.cuda is not None and "cpu" in found.loaded and "cuda" not in found.loaded:
        torch.ops.load_library(found.cuda)
    return found.cuda is not None and "cpu" in found.loaded


def step_plan(
    program: PlannedProgram,
    tokens: int,
    *,
    gpu: GpuFacts = GPUS["H100"],
    sequences: int | None = None,
    logit_rows: int | None = None,
    formats: tuple[str, str] = ("fp16", "fp16"),
    max_pages: int = 4,
    stream_k_from: int = 9,
    lora_width: int = 0,
    lora_inside: bool = True,
    peers: Tensor | None = None,
    prompts: bool = False,
) -> list[PlannedLaunch]:
    """The launches of a step.

    Args:
        program: from `Model.planned_program`.
        tokens: of the step.
        gpu: where it would run.
        sequences: of the step; None: one per token.
        logit_rows: how many rows want logits; None: every row.
        formats: of the K and V pools, such as "q8".
        max_pages: columns of the block table.
        stream_k_from: as in `gpu.StepKernels`; 0: a deterministic step.
        lora_width: ranks of the widest change of an adapter; 0: no token has an adapter.
        lora_inside: products add the adapters themselves where they can.
        peers: words of the ranks, where the program is a rank's (`ops.peers`).
        prompts: sequences may have more than 8 tokens.
    """
    capacity = 1 << (tokens - 1).bit_length()
    text: Tensor = _ops.gpu_step_plan(
        program.code, list(astuple(gpu)), capacity, tokens, logit_rows, tokens if sequences is None else sequences, max_pages,
        *(kv_codes.STORAGE_NUMBERS[name] for name in formats), True, stream_k_from, lora_width, lora_inside, peers, prompts,
    )  # fmt: skip
    launches = []
    for line in bytes(text.tolist()).decode().splitlines():
        op, name, how, arguments = line.split("\t")
        launches.append(PlannedLaunch(int(op), name, how, arguments))
    return launches
