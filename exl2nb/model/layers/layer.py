"""A decoder layer: attention, then the MLP; or both from the same input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from exl2nb import ops
from exl2nb.model.layers.attention import Attention
from exl2nb.model.layers.mlp import MLP
from exl2nb.model.layers.step import Step


@dataclass(frozen=True, kw_only=True)
class Layer:
    """parallel: the MLP reads what attention reads, and not what attention leaves."""

    attention: Attention
    mlp: MLP
    parallel: bool

    def __call__(self, x: Tensor, step: Step) -> None:
        """Add this layer to x f32 `(T, H)` in place."""
        mixed = self.attention.mixed(x, step)
        if self.parallel:
            inner = self.mlp.inner(x)
            self.attention.add(x, mixed)
        else:
            self.attention.add(x, mixed)
            inner = self.mlp.inner(x)
        self.mlp.add(x, inner)

    def record(self, program: ops.Program, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Write the same down in a program."""
        self.attention.record_mixed(program, ropes)
        if self.parallel:
            self.mlp.record_inner(program, aside=True)
            self.attention.record_add(program)
        else:
            self.attention.record_add(program)
            self.mlp.record_inner(program, aside=False)
        self.mlp.record_add(program, aside=self.parallel)


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Every tensor in the fields of a dataclass, nested ones included."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from tensors_of(value)
