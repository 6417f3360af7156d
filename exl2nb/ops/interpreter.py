"""The walk over a program's ops in Python, and the backend that computes them by the CPU's single ops.

`interpret` says what each op reads and leaves. How an op is computed is said by a `Backend`: here the compiled ops of the CPU and their
torch references, `gpu_prefill` and `host_prefill` for prompts on a GPU, `model.traced_forward` for activations that are seen and edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from exl2nb.core.errors import DeviceError
from exl2nb.ops._library import OP_KERNELS
from exl2nb.ops.prefill_attention import attend_whole
from exl2nb.ops.records import AttentionOp, EmbedOp, GateUpOp, HeadOp, Op, QkvOp, ResidualOp, ResidualOutOp, RoutedOp

Block = tuple[int, int, int, int]
"""A run of tokens that see each other whole, as `model.batch.Batch.blocks` gives it."""
At = Callable[[str, Tensor], Tensor]
"""Sees the value of a point and returns what takes its place: "embedding", and of each layer "layers.i.input", "layers.i.attention",
"layers.i.middle" and "layers.i.output"."""


@dataclass(frozen=True)
class Inputs:
    """A step's tensors on the device that computes it, int32, as in `model.batch.Batch`."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    logit_rows: Tensor

    @classmethod
    def nothing(cls, device: torch.device | str, **given: Tensor) -> Inputs:
        """The inputs of ops that read none but those that are given."""
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return cls(**{field.name: given.get(field.name, empty) for field in fields(cls)})


class Backend:
    """Computes the ops of one step. x: the residual stream f32 `(T, H)`, which a method may change in place and hand back.

    A method that is not there refuses its op: a backend may leave out what it cannot compute.
    """

    def begin(self, number: int, op: Op) -> Op:
        """Called before each op with its number in the program; the op to compute in its place."""
        return op

    def embed(self, op: EmbedOp) -> Tensor:
        """The stream of the step's tokens."""
        raise self._unknown(op)

    def qkv(self, x: Tensor, op: QkvOp) -> tuple[Tensor, ...]:
        """The rotated queries `(T, Hq, D)`, and what else `attend` takes. K and V are written to the cache."""
        raise self._unknown(op)

    def attend(self, made: tuple[Tensor, ...], op: AttentionOp) -> Tensor:
        """The heads' output `(T, Hq * D)`. made: what `qkv` gave."""
        raise self._unknown(op)

    def add(self, x: Tensor, y: Tensor, op: ResidualOp) -> Tensor:
        """The stream with the projection of y added. y: what `attend` or `gate_up` gave."""
        raise self._unknown(op)

    def gate_up(self, x: Tensor, op: GateUpOp) -> Tensor:
        """The MLP's activations `(T, I)`."""
        raise self._unknown(op)

    def routed(self, x: Tensor, op: RoutedOp) -> Tensor:
        """The stream with the experts' results added."""
        raise self._unknown(op)

    def head(self, x: Tensor, op: HeadOp) -> Tensor:
        """Logits f32 `(R, V)` of the step's logit rows."""
        raise self._unknown(op)

    def linear(self, x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
        """One product f32, for what looks into an op."""
        raise DeviceError(f"{type(self).__name__} computes no single products")

    def _unknown(self, op: Op) -> DeviceError:
        return DeviceError(f"{type(self).__name__} does not compute {op.name}")


def interpret(steps: Iterable[Op], backend: Backend, x: Tensor | None = None, *, at: At | None = None) -> Tensor:
    """Run ops one by one: a program's, or those of some of its layers.

    Args:
        steps: the ops in order.
        backend: computes them.
        x: the residual stream f32 `(T, H)` in front of them, where they do not begin with the embedding. It is changed in place.
        at: sees and replaces the values of points.

    Returns:
        Logits f32 `(R, V)` where the ops end with the head, else the residual stream f32 `(T, H)`.
    """
    x = torch.empty(0) if x is None else x
    at = at or _as_it_is
    made: list[tuple[Tensor, ...]] = []  # queries until attention has taken them
    done: dict[bool, Tensor] = {}  # what attention and MLP leave, until it is added
    layer, halves = -1, ["middle", "output"]  # counted here: the records count within a device
    for number, plain in enumerate(steps):
        op = backend.begin(number, plain)
        if isinstance(op, EmbedOp):
            x = at("embedding", backend.embed(op))
        elif isinstance(op, QkvOp):
            layer, halves = layer + 1, ["middle", "output"]
            x = at(f"layers.{layer}.input", x)
            made.append(backend.qkv(x, op))
        elif isinstance(op, AttentionOp):
            done[False] = at(f"layers.{layer}.attention", backend.attend(made.pop(), op))
        elif isinstance(op, GateUpOp):
            done[op.side] = backend.gate_up(x, op)
        elif isinstance(op, (ResidualOp, RoutedOp)):
            x = backend.add(x, done.pop(op.side), op) if isinstance(op, ResidualOp) else backend.routed(x, op)
            x = at(f"layers.{layer}.{halves.pop(0)}", x) if halves else x
        elif isinstance(op, HeadOp):
            return backend.head(x, op)
        elif not isinstance(op, ResidualOutOp):
            raise DeviceError(f"the interpreter does not know {op.name}")
    return x


def _as_it_is(point: str, value: Tensor) -> Tensor:
    return value


def observing(observe: Callable[[str, Tensor], None] | None) -> At | None:
    """The hook that calls `observe` with the value of every point except the inputs of layers, which are the outputs before them."""
    if observe is None:
        return None

    def at(point: str, value: Tensor) -> Tensor:
        if not point.endswith(".input"):
            observe(point, value)
        return value

    return at


class CpuBackend(Backend):
    """The single ops of the CPU.

    Args:
        inputs: of the step. k_pools, v_pools: of every layer.
        kernels: functions by name of an op: the compiled ops, or `REFERENCE_OPS`.
        blocks: runs of tokens that see each other whole.
        lora: words of an `ops.lora_table.LoraTable`. adapters: int32 `(T,)`, its row for each token, -1 for none. Each matrix then has the
            adapter merged into it, in fp32, for the moment that it is used.
    """

    def __init__(
        self,
        inputs: Inputs,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        *,
        kernels: Mapping[str, Callable[..., Any]] = OP_KERNELS,
        blocks: Sequence[Block] = (),
        lora: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> None:
        self.inputs, self.k, self.v, self._kernels, self._blocks = inputs, k_pools, v_pools, kernels, blocks
        self._lora, self._adapters, self._number = lora, adapters, 0

    def begin(self, number: int, op: Op) -> Op:
        """As `Backend.begin`."""
        self._number = number
        return op

    def embed(self, op: EmbedOp) -> Tensor:
        """As `Backend.embed`."""
        i = self.inputs
        return self._each(op, self._adapters, lambda op, rows: self._kernels[op.name](*op.arguments(i.ids[rows], i.positions[rows])))

    def qkv(self, x: Tensor, op: QkvOp) -> tuple[Tensor, ...]:
        """As `Backend.qkv`."""
        i, pools = self.inputs, (self.k[op.layer], self.v[op.layer])

        def made(op: QkvOp, rows: Any) -> Tensor:
            return self._kernels[op.name](*op.arguments(x[rows], i.positions[rows], i.slots[rows], *pools))

        return (self._each(op, self._adapters, made),)

    def attend(self, made: tuple[Tensor, ...], op: AttentionOp) -> Tensor:
        """As `Backend.attend`."""
        (q,), i, pools = made, self.inputs, (self.k[op.layer], self.v[op.layer])
        y = self._kernels[op.name](*op.arguments(q, *pools, i.block_table, i.cu_seqlens, i.context_lens))
        for first, last, row, end in self._blocks:
            numbers = {"scale": op.scale, "window": op.window, "softcap": op.softcap}
            y[first:last] = attend_whole(q[first:last], *pools, i.block_table[row], end, **numbers)
        return y

    def add(self, x: Tensor, y: Tensor, op: ResidualOp) -> Tensor:
        """As `Backend.add`."""

        def added(op: ResidualOp, rows: Any) -> Tensor:
            part = x[rows]
            self._kernels[op.name](*op.arguments(part, y[rows]))
            return part

        return self._each(op, self._adapters, added)

    def gate_up(self, x: Tensor, op: GateUpOp) -> Tensor:
        """As `Backend.gate_up`."""
        return self._each(op, self._adapters, lambda op, rows: self._kernels[op.name](*op.arguments(x[rows])))

    def routed(self, x: Tensor, op: RoutedOp) -> Tensor:
        """As `Backend.routed`."""

        def added(op: RoutedOp, rows: Any) -> Tensor:
            part = x[rows]
            self._kernels[op.name](*op.arguments(part))
            return part

        return self._each(op, self._adapters, added)

    def head(self, x: Tensor, op: HeadOp) -> Tensor:
        """As `Backend.head`."""
        x, wanted = x.index_select(0, self.inputs.logit_rows), self.inputs.logit_rows.long()
        adapters = None if self._adapters is None else self._adapters[wanted]
        return self._each(op, adapters, lambda op, rows: self._kernels[op.name](*op.arguments(x[rows])))

    def linear(self, x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
        """As `Backend.linear`."""
        return self._kernels["linear"](x.contiguous(), blob, bias)

    def _each(self, op: Any, adapters: Tensor | None, run: Callable[[Any, Any], Tensor]) -> Tensor:
        """An op on all rows at once, or on the rows of each adapter. run: of an op and the rows that it takes."""
        if self._lora is None or adapters is None or not len(adapters):
            return run(op, slice(None))
        from exl2nb.ops.lora_table import merge_into_op

        whole: Tensor | None = None
        for adapter in sorted(set(adapters.tolist())):
            rows = (adapters == adapter).nonzero()[:, 0]
            piece = run(merge_into_op(self._lora, adapter, self._number), rows)
            whole = piece.new_empty(len(adapters), *piece.shape[1:]) if whole is None else whole
            whole[rows] = piece
        assert whole is not None, "there are tokens"
        return whole
