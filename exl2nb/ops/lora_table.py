"""Low-rank adapters of a program: which ops they change and how, as the table that every walker reads. Knows nothing of files or names.

An adapter adds `(scale * (x @ a)) @ b` to some outputs of some matrices. A step takes a table and, for each token, the row of its adapter.
The products are computed token by token, so a token's bits do not depend on the rest of the batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from exl2nb.ops import blob as layout
from exl2nb.ops import gpu
from exl2nb.ops._library import check_argument
from exl2nb.ops.blob_weights import cached_dense, pack_dense
from exl2nb.ops.records import EmbedOp, GateUpOp, MatrixOp, NormedOp, Op, QkvOp, ResidualOp

if TYPE_CHECKING:
    from exl2nb.ops.program import Program

LORA_MAGIC = 0x3141524F4C324558
LORA_VERSION = 2
HEADER_WORDS = 6
FUSED_LORA_OPS = (QkvOp, ResidualOp, GateUpOp)  # ops whose products on the GPU can add adapters themselves
MAX_FUSED_LORA_PARTS = 6  # of a change in a fused op: kLoraChainParts in csrc/cuda/gemm/persistent/lora_chain.cuh
MAX_FUSED_LORA_WIDTH = 256  # kLoraChainWidth there
CHANGE_WORDS, PART_WORDS, BLOCK_WORDS, FIRST_A = 16, 6, 6, 8  # of LoraChange, LoraPart, LoraBlock, kFirstA in csrc/format/lora.h

_tables: weakref.WeakValueDictionary[int, LoraTable] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class LoraStrips:
    """A part in blocks of 16 ranks, as products on Hopper take it (LoraBlock in csrc/format/lora.h).

    a: f16 `(blocks, stored rows / 16, 32, 8)`. b: f16 `(blocks, strips, 32, 8)`. first: the first of the strips.
    """

    a: Tensor
    b: Tensor
    first: int

    @classmethod
    def of(cls, part: LoraPart, rows: Tensor, parts: Sequence[tuple[int, int]]) -> LoraStrips:
        """Of a part for a matrix.

        Args:
            rows: int64, the feature of each stored row; the number of features where there is none. parts: first column and columns of
                each of the matrix's.
        """
        width = part.a.shape[1]
        rows = torch.nn.functional.pad(rows, (0, -len(rows) % 16), value=part.a.shape[0])
        a = torch.nn.functional.pad(part.a, (0, 0, 0, 1))[rows].view(-1, 16, width // 16, 16).permute(2, 0, 3, 1)
        strips = []  # columns of b; one behind the last is 0
        for first, columns in parts:
            found = torch.arange(first - part.first, first - part.first - columns // -16 * 16, device=rows.device)
            found[columns:] = -1
            strips.append(torch.where((found < 0) | (found >= part.b.shape[1]), part.b.shape[1], found).view(-1, 16))
        columns = torch.cat(strips)
        used = (columns < part.b.shape[1]).any(1).nonzero().flatten()
        first, end = int(used[0]), int(used[-1]) + 1
        b = torch.nn.functional.pad(part.b, (0, 1, 0, width - part.rank))[:, columns[first:end]]
        return cls(_mma_fragments(a), _mma_fragments(b.view(width // 16, 16, end - first, 16).permute(0, 2, 3, 1)), first)

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return self.a.nbytes + self.b.nbytes

    def words(self, part: LoraPart) -> list[list[int]]:
        """Of each block of the part."""
        return [
            [
                a.data_ptr(), b.data_ptr(), part.scale.data_ptr() + 64 * i,
                self.first | b.shape[0] << 16 | min(16, part.rank - 16 * i) << 32,
                part.a.data_ptr() + 32 * i, part.a.shape[1],
            ]
            for i, (a, b) in enumerate(zip(self.a, self.b))
        ]  # fmt: skip


def _mma_fragments(x: Tensor) -> Tensor:
    """`(..., 16, 16)` as A fragments of m16n8k16, `(..., 32, 8)`: lane 4 g + t has rows g, g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9."""
    halves = x.reshape(*x.shape[:-2], 2, 8, 2, 4, 2)  # row's half, g; column's half, t, neighbour
    n = halves.dim() - 5
    return halves.permute(*range(n), n + 1, n + 3, n + 2, n, n + 4).reshape(*x.shape[:-2], 32, 8).contiguous()


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    """y[:, first : first + columns] += (scale * (x @ a[:, :rank])) @ b.

    a: f16 `(K, width)`, zero beyond the rank; width is the rank rounded up to 16s. Of the embedding K is V, and an id chooses a row. b: f16
    `(rank, columns)`. scale: f32 `(rank,)`.
    """

    a: Tensor
    b: Tensor
    scale: Tensor
    first: int = 0
    strips: LoraStrips | None = None  # a second copy, for the GPU

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: Tensor, first: int = 0) -> LoraPart:
        """From a `(K, rank)` and b `(rank, columns)` of any float type."""
        padded = torch.nn.functional.pad(a, (0, -a.shape[1] % 16))
        return cls(a=padded.half().contiguous(), b=b.half().contiguous(), scale=scale.float().contiguous(), first=first)

    @property
    def rank(self) -> int:
        """Numbers between the two products."""
        return self.b.shape[0]

    def to(self, device: str | torch.device) -> LoraPart:
        """The same on a device."""
        return replace(self, a=self.a.to(device), b=self.b.to(device), scale=self.scale.to(device), strips=None)

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return self.a.nbytes + self.b.nbytes + self.scale.nbytes + (0 if self.strips is None else self.strips.nbytes)

    @property
    def dense(self) -> Tensor:
        """The product, f32 `(K, columns)`."""
        return (self.a[:, : self.rank].float() * self.scale) @ self.b.float()


@dataclass(frozen=True, kw_only=True)
class LoraChange:
    """What an adapter changes in one op: it adds its parts to y, then gain * y, then bias; `norm` and `norm_bias` replace the op's own.

    gain, bias: f32 `(N,)`; norm, norm_bias: f32 `(H,)`; None = nothing.
    """

    parts: tuple[LoraPart, ...] = ()
    gain: Tensor | None = None
    bias: Tensor | None = None
    norm: Tensor | None = None
    norm_bias: Tensor | None = None

    def to(self, device: str | torch.device) -> LoraChange:
        """The same on a device."""
        vectors = {name: None if (v := getattr(self, name)) is None else v.to(device) for name in ("gain", "bias", "norm", "norm_bias")}
        return LoraChange(parts=tuple(part.to(device) for part in self.parts), **vectors)

    @property
    def is_plain(self) -> bool:
        """Whether there are only parts, of columns in whole eights."""
        vectors = (self.gain, self.bias, self.norm, self.norm_bias)
        eights = all(part.first % 8 == 0 and part.b.shape[1] % 8 == 0 and part.b.data_ptr() % 16 == 0 for part in self.parts)
        return eights and all(vector is None for vector in vectors)

    @property
    def in_strips(self) -> bool:
        """Whether the stream-K GEMM of up to 16 rows can take it."""
        return bool(self.parts) and all(part.strips is not None for part in self.parts)

    @property
    def width(self) -> int:
        """Of all parts together."""
        return sum(part.a.shape[1] for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        vectors = (self.gain, self.bias, self.norm, self.norm_bias)
        return sum(part.nbytes for part in self.parts) + sum(v.nbytes for v in vectors if v is not None)


Adapter = Mapping[int, LoraChange]
"""By number of the op in its program."""


@dataclass(frozen=True, eq=False)
class LoraTable:
    """Adapters 0, 1, ... for one program, on its device. `words` is what the ops take; the table keeps the tensors at its addresses alive.

    On the GPU `gpu.LoraBuffers` copies the words behind the header to where the kernels look. widest: numbers between the two products of
    an op, of all parts together.
    """

    program: Program
    adapters: tuple[Adapter | None, ...]
    words: Tensor = field(init=False)
    widest: int = field(init=False)
    _kept: list[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kept: list[Any] = []
        ops = len(self.program.steps)
        adapters = [None if adapter is None else with_gemm_strips(adapter, self.program) for adapter in self.adapters]
        changes = [None if adapter is None else adapter.get(op) for adapter in adapters for op in range(ops)]
        rows = [row for i, change in enumerate(changes) if change for row in self._parts(i % ops, change, kept)]
        blocks = [
            row for change in changes if change and change.in_strips for part in change.parts for row in _strips_of_part(part).words(part)
        ]
        tables = torch.tensor([word for row in (*rows, *blocks) for word in row], dtype=torch.int64)
        tables = tables.to(self.program.device)  # all in one, as each copy to a GPU takes its time
        kept.append(tables)
        words: list[int] = []
        at, block = tables.data_ptr(), tables.data_ptr() + 8 * PART_WORDS * len(rows)
        for i, change in enumerate(changes):
            strips = change is not None and change.in_strips
            words += [0] * CHANGE_WORDS if change is None else self._change(i % ops, change, at, block if strips else 0, kept)
            at += 0 if change is None else 8 * PART_WORDS * len(change.parts)
            block += 8 * BLOCK_WORDS * change.width // 16 if change is not None and strips else 0
        most = max((change.width for adapter in self.adapters if adapter for change in adapter.values()), default=0)
        head = [LORA_MAGIC, LORA_VERSION, HEADER_WORDS + len(words), len(self.adapters), ops, most]
        object.__setattr__(self, "widest", most)
        object.__setattr__(self, "words", torch.tensor([*head, *words], dtype=torch.int64))
        object.__setattr__(self, "_kept", kept)
        _tables[self.words.data_ptr()] = self

    @property
    def fits_inside(self) -> bool:
        """Whether products on the GPU can add all of it: it changes layers' matrices alone, by few parts in columns of eights."""
        return all(_fits_fused_op(self.program, op, change) for adapter in self.adapters if adapter for op, change in adapter.items())

    def _shape(self, op: int) -> tuple[int, int]:
        """Inputs and outputs of an op."""
        known = self.program.steps[op]
        if isinstance(known, EmbedOp):
            return known.vocab, known.width
        assert isinstance(known, MatrixOp)
        head = self.program.heads.get(known.blob.data_ptr())
        return layout.shape(known.blob) if head is None else gpu.head_shape(head)

    def _parts(self, op: int, change: LoraChange, kept: list[Any]) -> list[list[int]]:
        """The words of an op's parts."""
        known, name = self.program.steps[op], self.program.steps[op].name
        adapts = isinstance(known, (EmbedOp, *get_args(MatrixOp)))
        check_argument(adapts, "LoraTable", "a change", f"of {name}", "of an op with one matrix, or the embedding")
        inputs, outputs = self._shape(op)
        rows = []
        for part in change.parts:
            a, b = tuple(part.a.shape), tuple(part.b.shape)
            inside = part.rank > 0 and b[1] > 0 and part.first >= 0 and part.first + b[1] <= outputs
            fits = inside and a == (inputs, -(-part.rank // 16) * 16) and tuple(part.scale.shape) == (part.rank,)
            check_argument(
                fits, "LoraTable", f"a part of {name}", (a, b, part.first), f"({inputs}, width), and (rank, columns) within {outputs}"
            )
            for tensor, dtype in ((part.a, torch.float16), (part.b, torch.float16), (part.scale, torch.float32)):
                fits = tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == self.program.device.type
                check_argument(
                    fits, "LoraTable", "a tensor", (tensor.dtype, tensor.device), f"contiguous, {dtype}, on {self.program.device}"
                )
            kept.append(part)
            rows.append([part.a.data_ptr(), part.b.data_ptr(), part.scale.data_ptr(), part.rank, part.first, b[1]])
        return rows

    def _change(self, op: int, change: LoraChange, parts: int, blocks: int, kept: list[Any]) -> list[int]:
        """The words of a change whose parts and blocks are at addresses."""
        known = self.program.steps[op]
        inputs, outputs = self._shape(op)
        vectors = []
        widths = {"gain": outputs, "bias": outputs, "norm": outputs if isinstance(known, ResidualOp) else inputs}
        for which in ("gain", "bias", "norm", "norm_bias"):
            vector: Tensor | None = getattr(change, which)
            width = widths.get(which, widths["norm"])
            fits = vector is None or (vector.dtype == torch.float32 and tuple(vector.shape) == (width,) and vector.is_contiguous())
            fits = fits and (vector is None or vector.device.type == self.program.device.type)
            check_argument(fits, "LoraTable", f"{which} of {known.name}", vector is not None and tuple(vector.shape), f"f32 ({width},)")
            kept.append(vector)
            vectors.append(0 if vector is None else vector.data_ptr())
        first = [block.data_ptr() for part in change.parts for block in _strips_of_part(part).a][:FIRST_A] if blocks else []
        return [parts if change.parts else 0, len(change.parts), change.width, *vectors, blocks, *first, *[0] * (FIRST_A - len(first))]


def _fits_fused_op(program: Program, op: int, change: LoraChange) -> bool:
    few = (
        len(change.parts) <= MAX_FUSED_LORA_PARTS and change.width <= MAX_FUSED_LORA_WIDTH and all(part.b.shape[1] for part in change.parts)
    )
    return isinstance(program.steps[op], FUSED_LORA_OPS) and change.is_plain and few


def _strips_of_part(part: LoraPart) -> LoraStrips:
    assert part.strips is not None
    return part.strips


def with_gemm_strips(adapter: Adapter, program: Program) -> Adapter:
    """The adapter with what stream-K GEMMs take, where they can take it and it has none yet: a second copy of most of it, on Hopper."""
    if program.device.type != "cuda" or torch.cuda.get_device_capability(program.device)[0] < 9:
        return adapter
    found = dict(adapter)
    for op, change in adapter.items():
        if not change.parts or change.in_strips or not _fits_fused_op(program, op, change):
            continue
        blob = matrix_op(program, op).blob
        rows, parts = gpu.stored_row_features(program.heads[blob.data_ptr()], blob), gpu.head_columns(program.heads[blob.data_ptr()])
        made = (part if part.strips is not None else replace(part, strips=LoraStrips.of(part, rows, parts)) for part in change.parts)
        found[op] = replace(change, parts=tuple(made))
    return found


def matrix_op(program: Program, number: int) -> MatrixOp:
    """An op that has one matrix."""
    op = program.steps[number]
    assert isinstance(op, MatrixOp), op.name
    return op


def norm_bias_of(op: Op) -> Tensor | None:
    """The bias of the norm in front of an op's matrix; None where it has none."""
    return op.norm_bias if isinstance(op, NormedOp) else None


def merge_into_op(words: Tensor, adapter: int, number: int) -> Op:
    """For the reference: an op with the adapter in its weights, in fp32.

    Args:
        words: of a table that is alive. adapter: its row; -1 = none. number: of the op in its program.
    """
    table = _tables.get(words.data_ptr())
    check_argument(table is not None, "decode_step", "lora", tuple(words.shape), "the words of a LoraTable that is alive")
    assert table is not None
    op = table.program.steps[number]
    check_argument(-1 <= adapter < len(table.adapters), "decode_step", "an adapter", adapter, f"-1 to {len(table.adapters) - 1}")
    mine = table.adapters[adapter] if adapter >= 0 else None
    change = mine.get(number) if mine is not None else None
    if change is None:
        return op
    if isinstance(op, EmbedOp):
        rows = op.table.float() * op.scale
        for part in change.parts:
            rows += part.dense
        return replace(op, table=rows, scale=1.0)
    assert isinstance(op, MatrixOp)
    weight, bias = cached_dense(op.blob).clone(), op.bias
    gain = torch.zeros(weight.shape[1]) if change.gain is None else change.gain
    for part in change.parts:
        weight[:, part.first : part.first + part.b.shape[1]] += part.dense
    weight *= 1 + gain
    if bias is not None or change.bias is not None:
        bias = (0 if bias is None else bias * (1 + gain)) + (0 if change.bias is None else change.bias)
    made = replace(op, blob=pack_dense(weight.T.contiguous()), bias=bias)
    if change.norm is None:
        return made
    return replace(made, norm=change.norm, **({"norm_bias": change.norm_bias} if isinstance(op, NormedOp) else {}))


def blend_adapters(adapters: Sequence[tuple[Adapter, float]], program: Program) -> Adapter:
    """Several adapters at once, each with a weight: their parts side by side, the other changes as weighted sums.

    A norm becomes its own plus the weighted differences from it.
    """
    found: dict[int, LoraChange] = {}
    for op in sorted({op for adapter, _ in adapters for op in adapter}):
        changes = [(adapter[op], weight) for adapter, weight in adapters if op in adapter]
        own = program.steps[op]
        gain = _sum_vectors([(change.gain, weight) for change, weight in changes])
        found[op] = LoraChange(
            parts=tuple(_scale_part(part, change.gain, weight, gain) for change, weight in changes for part in change.parts),
            gain=gain,
            bias=_sum_vectors([(change.bias, weight) for change, weight in changes]),
            norm=_change_vectors(own.norm if isinstance(own, MatrixOp) else None, [(change.norm, weight) for change, weight in changes]),
            norm_bias=_change_vectors(norm_bias_of(own), [(change.norm_bias, weight) for change, weight in changes]),
        )
    return found


def _scale_part(part: LoraPart, own: Tensor | None, weight: float, total: Tensor | None) -> LoraPart:
    """A part times `weight`. The sum is multiplied by 1 + `total` afterwards, where the part alone had 1 + `own`."""
    if total is not None and (own is None or not torch.equal(own, total)):
        columns = slice(part.first, part.first + part.b.shape[1])
        after, alone = 1 + total[columns], 1.0 if own is None else 1 + own[columns]
        ratio = alone / torch.where(after.abs() < 1e-3, 1e-3, after)
        part = replace(part, b=(part.b * ratio).clamp(-65504, 65504).half().contiguous(), strips=None)
    return part if weight == 1 else replace(part, scale=part.scale * weight)


def _sum_vectors(vectors: Sequence[tuple[Tensor | None, float]]) -> Tensor | None:
    given = [vector * weight for vector, weight in vectors if vector is not None]
    return torch.stack(given).sum(0) if given else None


def _change_vectors(own: Tensor | None, vectors: Sequence[tuple[Tensor | None, float]]) -> Tensor | None:
    if own is None or all(vector is None for vector, _ in vectors):
        return None
    return own + sum((vector - own) * weight for vector, weight in vectors if vector is not None)
