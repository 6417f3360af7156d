"""Programs whose step plans are compared with `tests/data/step_plans.txt.xz`: every architecture of the zoo, and models of usual sizes.

`python -m tests.model.plans` writes that file, and `step_plan_8b.txt` beside it, from the code as it is.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.model.loader import load_model
from exl2nb.ops import blob as layout
from exl2nb.ops.step_plan import GPUS, PlannedLaunch, PlannedProgram, step_plan
from tests.model import zoo

DATA = Path(__file__).parents[1] / "data"
GOLDEN, READABLE = DATA / "step_plans.txt.xz", DATA / "step_plan_8b.txt"
ALL_ROWS = tuple(range(1, 193))
ROWS = (*range(1, 21), 23, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 191, 192)
FEW_ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 130)
NO_GROUPS = np.zeros(0, layout.GROUP_DTYPE)


def coded(outputs: int, K: int, bits: tuple[int, ...], *, size: int = 32, kind: int = layout.EXL2_PART) -> layout.BlobPart:
    """An EXL2 or GPTQ matrix without data: groups of `size` rows, `bits` by turns, in another order of rows where EXL2."""
    rows = [min(size, K - first) for first in range(0, K, size)]
    groups = np.array([(bits[i % len(bits)], i * size, count, 0) for i, count in enumerate(rows)], layout.GROUP_DTYPE)
    perm = np.roll(np.arange(K, dtype=np.int32), 1) if kind == layout.EXL2_PART else None
    return layout.BlobPart(kind, outputs, perm, groups, np.zeros((0, 16), np.float32), np.zeros((0, 0), np.uint8))


def dense(outputs: int) -> layout.BlobPart:
    """An fp16 matrix without data."""
    return layout.BlobPart(1, outputs, None, NO_GROUPS, np.zeros((0, 16), np.float32), np.zeros((0, 0), np.uint8))


class Exl2Program(PlannedProgram):
    """A program of a dense model as if its matrices were EXL2, all but routers."""

    def parts_of(self, blob: Tensor) -> tuple[int, list[layout.BlobPart]]:
        K, parts = super().parts_of(blob)
        return K, [coded(part.outputs, K, (5, 4, 4, 3)) if part.outputs > 16 and K % 32 == 0 else part for part in parts]


@cache
def model(name: str) -> Any:
    """The entry of the zoo, loaded on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(zoo.write(name, zoo.build_wide(name), Path(folder) / "model"))


@dataclass(frozen=True)
class Shape:
    """A model by its sizes. bits: of the groups of each matrix, by turns. experts: number, chosen, inner size. shared: inner size of an
    expert for every row. ranks: how many GPUs share it.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    bits: tuple[int, ...] = (4,)
    kind: int = layout.EXL2_PART
    group: int = 128
    layer_norm: bool = False
    gated: bool = True
    bias: bool = False
    post_norm: bool = False
    parallel: bool = False
    head_norms: bool = False
    window: int = 0
    experts: tuple[int, int, int] | None = None
    shared: int = 0
    ranks: int = 1
    headed: bool = True
    layers: int = 2

    @property
    def peers(self) -> Tensor | None:
        """Words of the ranks (`ops.peers`) of rank 0; the addresses are made up."""
        if self.ranks == 1:
            return None
        bounds = [min(rank, self.ranks) * self.vocab for rank in range(9)]
        return torch.tensor([0, self.ranks, 1 << 31, 1, *[1] * 8, *bounds], dtype=torch.int64)


class ShapedProgram(PlannedProgram):
    """The program of a `Shape`: no weights are made."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.parts: dict[int, tuple[int, list[layout.BlobPart]]] = {}
        s, H, D = shape, shape.hidden, shape.head_dim
        self.shape = shape
        self.add(ops.EmbedOp(table=torch.empty(1, dtype=torch.float16).expand(s.vocab * s.ranks, H)))
        cos = torch.empty(256, D // 2)
        heads: dict[str, Any] = {"num_heads": s.heads // s.ranks, "num_kv_heads": s.kv_heads // s.ranks, "head_dim": D}
        widths = [heads["num_heads"] * D, heads["num_kv_heads"] * D, heads["num_kv_heads"] * D]
        inner, halves, norm_bias = s.inner // s.ranks, 2 if s.gated else 1, self._bias(H, s.layer_norm)
        normed: dict[str, Any] = {"eps": 1e-5, "norm_bias": norm_bias, "layer_norm": s.layer_norm}
        for layer in range(s.layers):
            rope: dict[str, Any] = {"cos": cos, "sin": cos}
            if s.head_norms:
                rope |= {"q_norm": torch.empty(D), "k_norm": torch.empty(D)}
            qkv, bias = self.matrix(H, *widths), self._bias(sum(widths), s.bias)
            self.add(ops.QkvOp(norm=torch.empty(H), blob=qkv, bias=bias, layer=layer, **normed, **rope, **heads))
            self.add(ops.AttentionOp(layer=layer, scale=D**-0.5, window=s.window * (layer % 2)))
            post = torch.empty(H) if s.post_norm else None
            o = ops.ResidualOp(blob=self.matrix(s.heads * D, H), bias=self._bias(H, s.bias), norm=post)
            if s.experts:
                self.add(o, self._moe(*s.experts))
                continue
            up, bias = self.matrix(H, *[inner] * halves), self._bias(inner * halves, s.bias)
            gate_up = ops.GateUpOp(norm=torch.empty(H), blob=up, bias=bias, gated=s.gated, side=s.parallel, **normed)
            self.add(*((gate_up, o) if s.parallel else (o, gate_up)))
            self.add(ops.ResidualOp(blob=self.matrix(inner, H), bias=self._bias(H, s.bias), norm=post, side=s.parallel))
        head = ops.HeadOp(norm=torch.empty(H), blob=self.matrix(H, s.vocab, bits=(6,)), **normed)
        self.add(head if s.headed else ops.ResidualOutOp())

    def _bias(self, n: int, there: bool) -> Tensor | None:
        return torch.empty(n) if there else None

    def _moe(self, count: int, top_k: int, inner: int) -> ops.RoutedOp:
        s, H = self.shape, self.shape.hidden
        shared: dict[str, Any] = {}
        if s.shared:
            shared = {"shared_up": self.matrix(H, s.shared, s.shared), "shared_down": self.matrix(s.shared, H)}
        up, down = zip(*((self.matrix(H, inner, inner), self.matrix(inner, H)) for _ in range(count)))
        router = self.hollow(H, [dense(count)])
        return ops.RoutedOp(norm=torch.empty(H), eps=1e-5, blob=router, up=up, down=down, top_k=top_k, **shared)

    def matrix(self, K: int, *outputs: int, bits: tuple[int, ...] | None = None) -> Tensor:
        """The blob of these matrices."""
        s = self.shape
        return self.hollow(K, [coded(n, K, bits or s.bits, size=s.group, kind=s.kind) for n in outputs])

    def hollow(self, K: int, parts: list[layout.BlobPart]) -> Tensor:
        """A header without anything behind it."""
        head = np.zeros(1, layout.HEADER_DTYPE)
        head["magic"], head["version"], head["K"], head["N"] = (
            layout.BLOB_MAGIC,
            layout.BLOB_VERSION,
            K,
            sum(part.outputs for part in parts),
        )
        head["num_parts"], head["bytes"] = len(parts), head.nbytes
        blob = torch.from_numpy(head.view(np.uint8).copy())
        self.parts[blob.data_ptr()] = K, parts
        return blob

    def parts_of(self, blob: Tensor) -> tuple[int, list[layout.BlobPart]]:
        return self.parts[blob.data_ptr()]


LLAMA_8B: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 14336, "vocab": 128256}
TINY_LLAMA: dict[str, Any] = {"hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 64, "inner": 5632, "vocab": 32000}
SHAPES = {
    "TinyLlama-1.1B": Shape(**TINY_LLAMA),
    "TinyLlama-1.1B 3 bits": Shape(**TINY_LLAMA, bits=(3,)),
    "Llama-2-7B": Shape(4096, 32, 32, 128, 11008, 32000, bits=(5, 4, 4)),
    "Llama-3-8B": Shape(**LLAMA_8B),
    "Llama-3-8B 2 bits": Shape(**LLAMA_8B, bits=(3, 2), group=64),
    "Llama-3-8B GPTQ": Shape(**LLAMA_8B, kind=layout.GPTQ_PART),
    "Llama-3-8B of two ranks": Shape(**LLAMA_8B, ranks=2),
    "Llama-3-8B without head": Shape(**LLAMA_8B, headed=False),
    "Llama-3-70B": Shape(8192, 64, 8, 128, 28672, 128256, bits=(3, 2)),
    "Qwen3-4B": Shape(2560, 32, 8, 128, 9728, 151936, head_norms=True),
    "StarCoder2-7B": Shape(4608, 36, 4, 128, 18432, 49152, layer_norm=True, gated=False, bias=True),
    "Gemma-2-9B": Shape(3584, 16, 8, 256, 14336, 256000, post_norm=True, window=4096),
    "Command-R": Shape(8192, 64, 64, 128, 22528, 256000, layer_norm=True, parallel=True),
    "Phi-2, heads of 80": Shape(2560, 32, 32, 80, 10240, 51200, layer_norm=True, gated=False, bias=True, parallel=True),
    "Mixtral-8x7B": Shape(4096, 32, 8, 128, 14336, 32000, experts=(8, 2, 14336)),
    "Qwen3-30B-A3B": Shape(2048, 32, 4, 128, 768, 151936, experts=(128, 8, 768), head_norms=True),
    "Qwen1.5-MoE": Shape(2048, 16, 16, 128, 1408, 151936, experts=(60, 4, 1408), shared=5632),
    "Mixtral of two ranks": Shape(4096, 32, 8, 128, 14336, 32000, experts=(8, 2, 7168), ranks=2),
}


@dataclass(frozen=True)
class Case:
    """Plans of one program. options: of `step_plan`. one: all rows are of one sequence, and only its last one wants logits."""

    name: str
    rows: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    one: bool = False

    def plans(self, program: PlannedProgram) -> Iterator[tuple[int, list[PlannedLaunch]]]:
        """Of each number of rows; where the GPU cannot run them, the error in place of launches."""
        for rows in self.rows:
            batch = {"sequences": 1, "logit_rows": 1} if self.one else {}
            try:
                yield rows, step_plan(program, rows, **{**batch, **self.options})
            except RuntimeError as error:
                yield rows, [PlannedLaunch(0, "error", str(error).splitlines()[0].partition("gpu_step_plan: ")[2], "")]


def zoo_cases(name: str) -> list[tuple[PlannedProgram, Case]]:
    """Of an entry of the zoo."""
    plain, exl2 = model(name).planned_program(), model(name).planned_program(Exl2Program())
    return [
        (plain, Case(f"{name}, fp16", FEW_ROWS)),
        (exl2, Case(f"{name}, EXL2", ROWS)),
        (exl2, Case(f"{name}, EXL2, adapters", FEW_ROWS, {"lora_width": 16})),
        (exl2, Case(f"{name}, EXL2, adapters apart", FEW_ROWS, {"lora_width": 16, "lora_inside": False})),
        (exl2, Case(f"{name}, EXL2, deterministic", (1, 4, 5, 8, 9, 20), {"stream_k_from": 0})),
        (exl2, Case(f"{name}, EXL2, one sequence", (2, 5, 8), one=True)),
        (exl2, Case(f"{name}, EXL2, a prompt", (9, 40, 64), {"prompts": True}, one=True)),
        (exl2, Case(f"{name}, EXL2, A100", (1, 5, 20), {"gpu": GPUS["A100"]})),
    ]


def shape_cases(name: str) -> list[tuple[PlannedProgram, Case]]:
    """Of a model of a usual size."""
    shape = SHAPES[name]
    program = ShapedProgram(shape)
    options: dict[str, Any] = {"peers": shape.peers}
    cases = [
        Case(name, ALL_ROWS if name in ("TinyLlama-1.1B", "Llama-2-7B", "Llama-3-8B", "Mixtral-8x7B") else ROWS, options),
        Case(f"{name}, deterministic", (1, 4, 5, 8, 9, 20), {**options, "stream_k_from": 0}),
        *(Case(f"{name}, {gpu}", FEW_ROWS, {**options, "gpu": GPUS[gpu]}) for gpu in GPUS if gpu != "H100"),
        *(
            Case(f"{name}, {k} and {v}", FEW_ROWS, {**options, "formats": (k, v)})
            for k, v in (("fp8", "fp8"), ("q8", "q8"), ("q8", "q4"), ("q4", "q4"), ("fp32", "fp32"))
        ),
    ]
    if shape.headed:
        cases.append(Case(f"{name}, one sequence", tuple(range(1, 9)), {**options, "max_pages": 64}, one=True))
    if shape.ranks == 1:
        cases += [
            Case(f"{name}, adapters", ROWS, {"lora_width": 16}),
            Case(f"{name}, wide adapters", FEW_ROWS, {"lora_width": 128}),
            Case(f"{name}, adapters apart", FEW_ROWS, {"lora_width": 64, "lora_inside": False}),
            Case(f"{name}, adapters, deterministic", (1, 4, 5, 8, 9), {"lora_width": 16, "stream_k_from": 0}),
            Case(f"{name}, adapters, A100", (1, 5, 20), {"lora_width": 16, "gpu": GPUS["A100"]}),
        ]
        if shape.headed:
            cases.append(Case(f"{name}, a prompt", (9, 17, 33, 64), {"prompts": True, "max_pages": 64}, one=True))
    return [(program, case) for case in cases]


PROGRAMS = {**dict.fromkeys(zoo.ZOO, zoo_cases), **dict.fromkeys(SHAPES, shape_cases)}


@dataclass(frozen=True)
class Stored:
    """What the golden file says of a plan. kernels: in order. digest: of every launch with its arguments. marks: a hex digit per launch."""

    kernels: str
    digest: str
    marks: str

    @classmethod
    def of(cls, plan: list[PlannedLaunch]) -> Stored:
        """Of a plan."""
        each = [hashlib.sha256(f"{x.op} {x.kernel} {x.how} {x.arguments}".encode()).hexdigest() for x in plan]
        whole = hashlib.sha256(" ".join(each).encode()).hexdigest()
        return cls("; ".join(x.kernel for x in plan), whole[:8], "".join(digest[0] for digest in each))

    def difference(self, plan: list[PlannedLaunch]) -> str:
        """How a plan differs from this one; empty where it does not."""
        found, theirs = Stored.of(plan), self.kernels.split("; ")
        if found == self:
            return ""
        if found.kernels == self.kernels:
            marked = [f"{n} ({x})" for n, (x, a, b) in enumerate(zip(plan, found.marks, self.marks)) if a != b]
            return f"same kernels, other grids or arguments in launch {', '.join(marked) or 'unknown'}"
        first = next((n for n, (x, kernel) in enumerate(zip(plan, theirs)) if x.kernel != kernel), min(len(plan), len(theirs)))
        was = theirs[first] if first < len(theirs) else "nothing"
        now = plan[first] if first < len(plan) else "nothing"
        return f"{len(plan)} launches instead of {len(theirs)}; launch {first} was {was} and is now {now}"


def read_golden() -> dict[str, dict[int, Stored]]:
    """The golden plans by case and rows."""
    kernels: dict[str, str] = {}
    found: dict[str, dict[int, Stored]] = {}
    rows: dict[int, Stored] = {}
    for line in lzma.decompress(GOLDEN.read_bytes()).decode().splitlines():
        if line.startswith("= "):
            key, _, names = line[2:].partition(" ")
            kernels[key] = names
        elif line.startswith("# "):
            rows = found[line[2:]] = {}
        else:
            row, key, digest, marks = line.split(" ")
            rows[int(row)] = Stored(kernels[key], digest, marks)
    return found


def write_golden() -> None:
    """Write the file anew."""
    kernels: dict[str, str] = {}
    lines = []
    for name, cases_of in PROGRAMS.items():
        for program, case in cases_of(name):
            lines.append(f"# {case.name}")
            for rows, plan in case.plans(program):
                stored = Stored.of(plan)
                key = kernels.setdefault(stored.kernels, f"k{len(kernels)}")
                lines.append(f"{rows} {key} {stored.digest} {stored.marks}")
        print(name, file=sys.stderr)
    text = "\n".join([*(f"= {key} {names}" for names, key in kernels.items()), *lines]) + "\n"
    GOLDEN.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    READABLE.write_text(readable())


def readable() -> str:
    """Plans of two layers of Llama-3-8B on an H100 at 1 to 192 rows, where the kernels change."""
    program = ShapedProgram(SHAPES["Llama-3-8B"])
    plans = {rows: step_plan(program, rows) for rows in ALL_ROWS}
    starts = [rows for rows in ALL_ROWS if rows == 1 or [x.kernel for x in plans[rows]] != [x.kernel for x in plans[rows - 1]]]
    text = []
    for first, after in pairwise([*starts, ALL_ROWS[-1] + 1]):
        text.append(f"Rows {first} to {after - 1}; here {first}:")
        text += [str(launch) for launch in plans[first]]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    write_golden()
