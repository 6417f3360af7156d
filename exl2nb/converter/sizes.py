"""Bytes of a model file before it exists, and what fits in a memory. Knows nothing of how options were chosen."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.io.safetensors import header_bytes
from exl2nb.quant.bits import padded

SHARD_BYTES = 8 << 30
_SHARD_SLACK = 4096  # of headers, per file beyond the first
MEMORY_RESERVE = 0.04  # of a memory that a model must fit in: activations, tables, fragmentation
_BYTE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Other:
    """A tensor that is stored as it is, in fp16. in_layer: counts in the layers' budget (norms), as opposed to the embedding."""

    name: str
    shape: tuple[int, ...]
    in_layer: bool

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return 2 * math.prod(self.shape)


@dataclass(frozen=True)
class CacheShape:
    """What the KV cache of one token is made of."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def nbytes(self, context: int, mode: str) -> int:
        """Bytes of a cache of `context` tokens.

        Raises:
            OptionError: an unknown mode, or not a context.
        """
        from exl2nb.cache.spec import PAGE_SIZE, CacheSpec

        if isinstance(context, bool) or not isinstance(context, int) or context < 0:
            raise OptionError(f"context is {context!r}; expected a number of tokens")
        pages = -(-context // PAGE_SIZE)
        spec = CacheSpec(self.num_layers, self.num_kv_heads, self.head_dim, max(1, pages), mode=mode)
        return spec.page_bytes * pages


Part = tuple[str, torch.dtype, tuple[int, ...]]


def exl2_tensor_sizes(key: str, groups: Sequence[tuple[int, int]], out_features: int, *, bias: bool) -> list[Part]:
    """(name, dtype, shape) of the tensors of one EXL2 matrix."""
    wide, rows = padded(out_features), sum(r for _, r in groups)
    words = sum(b * r for b, r in groups) // 32
    made = [
        (f"{key}.q_weight", torch.int32, (words, wide)),
        (f"{key}.q_scale", torch.int32, (len(groups), wide // 8)),
        (f"{key}.q_scale_max", torch.float16, (len(groups),)),
        (f"{key}.q_groups", torch.int16, (2 * len(groups),)),
        (f"{key}.q_invperm", torch.int32, (rows,)),
    ]
    return [*made, (f"{key}.bias", torch.float16, (wide,))] if bias else made


def overhead_bytes(parts: Iterable[Part], others: Sequence[Other]) -> int:
    """Everything in the files but the tensors of the matrices: headers, embedding, norms."""
    listed = [*parts, *((o.name, torch.float16, o.shape) for o in others)]
    plain = sum(other.nbytes for other in others)
    data = plain + sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in listed[: len(listed) - len(others)])
    return header_bytes(listed) + plain + (data // SHARD_BYTES) * _SHARD_SLACK


def parse_bytes(value: int | float | str, *, where: str) -> int:
    """Bytes from a number or from text such as "24GiB", "900 MB".

    Raises:
        OptionError: neither.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if found and found[2].lower() in _BYTE_UNITS and 0 < float(found[1]) * _BYTE_UNITS[found[2].lower()] < 2**60:
            return int(float(found[1]) * _BYTE_UNITS[found[2].lower()])
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**60:
        return int(value)
    raise OptionError(f"{where} is {shown(value)}; expected bytes, or text such as '24GiB' or '900MB'")
