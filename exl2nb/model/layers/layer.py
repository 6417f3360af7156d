"""A decoder layer: attention, then the MLP; or both from the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from exl2nb import ops
from exl2nb.model.layers.attention import Attention
from exl2nb.model.layers.mlp import MLP
from exl2nb.model.layers.moe import RoutedMLP
from exl2nb.model.layers.step import Step


@dataclass(frozen=True, kw_only=True)
class Layer:
    """parallel: the MLP reads what attention reads, and not what attention leaves; a routed one never does."""

    attention: Attention
    mlp: MLP | RoutedMLP
    parallel: bool

    def __call__(self, x: Tensor, step: Step, observe: Callable[[str, Tensor], None] | None = None) -> None:
        """Add this layer to x f32 `(T, H)` in place. observe: sees "attention" `(T, Hq * D)`, and x as "middle" and "output"."""
        mixed = self.attention.mixed(x, step)
        inner = self.mlp.inner(x) if self.parallel and isinstance(self.mlp, MLP) else None
        if observe is not None:
            observe("attention", mixed)
        self.attention.add(x, mixed)
        if observe is not None:
            observe("middle", x)
        if inner is not None and isinstance(self.mlp, MLP):
            self.mlp.add(x, inner)
        else:
            self.mlp(x)
        if observe is not None:
            observe("output", x)

    def record(self, program: ops.Program, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Write the same down in a program."""
        self.attention.record_mixed(program, ropes)
        if self.parallel and isinstance(self.mlp, MLP):
            self.mlp.record_inner(program, aside=True)
            self.attention.record_add(program)
            self.mlp.record_add(program, aside=True)
        else:
            self.attention.record_add(program)
            self.mlp.record(program)


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Every tensor in the fields of a dataclass, nested ones and tuples of them included."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Tensor))
        elif is_dataclass(value):
            yield from tensors_of(value)
