"""Where ops are defined: schema, fake kernel and torch reference in one call. Knows nothing about what an op computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TORCH_LIBRARY = torch.library.Library("exl2nb", "DEF")
REFERENCE_OPS: dict[str, Callable[..., Any]] = {}
"""op name -> its torch implementation, reachable also where a compiled kernel answers the op."""
OP_KERNELS: dict[str, Callable[..., Any]] = {}
"""op name -> the op, which the compiled kernels answer where they are loaded."""


def define_op(schema: str, *, fake: Callable[..., Any], reference: Callable[..., Any]) -> Any:
    """Define op `exl2nb::<name>`.

    Args:
        schema: `name(Tensor x, ...) -> Tensor`, as in `torch.library.Library.define`.
        fake: gives outputs of the right shape and dtype without data (for tracing).
        reference: torch implementation; answers on every device that has no compiled kernel.

    Returns:
        The callable op overload; it takes positional arguments exactly as the schema orders them.
    """
    name = schema.split("(", 1)[0]
    TORCH_LIBRARY.define(schema)
    TORCH_LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"exl2nb::{name}", fake, lib=TORCH_LIBRARY)
    REFERENCE_OPS[name] = reference
    OP_KERNELS[name] = getattr(torch.ops.exl2nb, name).default
    return OP_KERNELS[name]


def check_argument(condition: bool, op: str, what: str, got: object, expected: str) -> None:
    """Raise ValueError `op: what is got; expected ...` unless `condition`. For the references; the kernels check the same in C++."""
    if not condition:
        raise ValueError(f"{op}: {what} is {got}; expected {expected}")


def dynamic_size() -> Any:
    """An output size that only the data of an input knows (a blob's header)."""
    return torch.library.get_ctx().new_dynamic_size()


isa = define_op("isa(Tensor like) -> int", fake=lambda like: 0, reference=lambda like: -1)
"""Instruction set of the kernels that answer for tensors like `like`: 0 base, 1 AVX2, 2 AVX-512; -1 the torch reference."""
program_schema = define_op("program_schema(Tensor like) -> Tensor", fake=lambda like: like, reference=lambda like: like)
"""The compiled library's `ops.records.OP_SCHEMA` as text in uint8; the reference has none."""
