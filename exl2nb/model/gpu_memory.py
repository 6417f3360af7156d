"""A model's weights on the GPU: one tensor, whose size follows from the headers of the files. Knows no kernels.

A tensor for each matrix would leave holes: torch takes segments of 2 or 20 MiB from the device and what was next to a matrix while it was
packed is lost between others. With one tensor, `kept_bytes` is what a model takes, for the plan before it is loaded and for the loader.
The compiled library says what a blob takes (csrc/format/gpu_layout.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from exl2nb.model.config import ModelConfig
from exl2nb.model.inspection import Inspection, StoredMatrix
from exl2nb.model.layout import Linear, end_vectors, layer_linears, layer_vectors, role_groups
from exl2nb.ops.memory_ops import packed_bytes

ARENA_ALIGN_BYTES = 256  # bytes; where a tensor of the arena begins


class Arena:
    """One tensor on a device that other tensors are copied into, one after the other.

    Args:
        size: bytes. device: where. memory: uint8, in place of new memory of that size.
    """

    def __init__(self, size: int, device: str, memory: Tensor | None = None) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device) if memory is None else memory
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """The same numbers inside the arena; the tensor itself where there is no room for it."""
        start, size = self._used, tensor.nbytes
        if start + size > self.memory.numel():
            return tensor
        self._used = min(self.memory.numel(), start + align_size(size))
        place = self.memory[start : start + size].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        return place


def align_size(size: int) -> int:
    """Rounded up to where the next tensor may begin."""
    return -(-size // ARENA_ALIGN_BYTES) * ARENA_ALIGN_BYTES


def kept_bytes(config: ModelConfig, found: Inspection) -> int:
    """Bytes of a model's weights on the GPU, as the loader keeps them; a few thousandths too much where matrices share a permutation."""
    return sum(kept_by_layer(config, found))


def kept_by_layer(config: ModelConfig, found: Inspection, *, experts: bool = True) -> list[int]:
    """The same of each part: the embedding, each layer, last norm and head. experts: False leaves those and their routers out."""
    sizes = [0] * (config.num_layers + 2)
    for layer, size in _kept_tensors(config, {matrix.key: matrix for matrix in found.matrices}, found, experts):
        sizes[layer + 1] += align_size(size)
    return sizes


def _kept_tensors(config: ModelConfig, matrices: dict[str, StoredMatrix], found: Inspection, experts: bool) -> Iterator[tuple[int, int]]:
    """Layer and bytes of every tensor; layer -1: before them, num_layers: behind them."""
    names, last = config.names, config.num_layers
    for name, shape in end_vectors(config).items():
        key = name.rpartition(".")[0]
        if key in (names.embed, names.positions):
            yield -1, matrices[key].nbytes if key in matrices else 2 * prod(shape)
        else:
            yield last, 4 * prod(shape)
    for layer in range(last):
        apart = not experts and config.experts(layer) is not None
        routers = [f"{names.at(layer, part)}.weight" for part in ("router", "shared_router")] if config.experts(layer) else []
        for name, shape in layer_vectors(config, layer).items():
            routed = name in routers
            if apart and routed:
                continue
            yield layer, blob_bytes([_dense_matrix(name, shape[1], shape[0])]) if routed else 4 * prod(shape)
        if config.parallel and config.pre_norm:  # attention and MLP each hold the norm that they share
            yield from [(layer, 4 * config.hidden_size)] * (2 if config.norm_bias else 1)
        roles = layer_linears(config, layer)
        for module in role_groups(roles):
            if apart and "q" not in module:
                continue
            down = [role for role in module if role == "o" or role.startswith(("down", "shared_down"))]
            for stack in ([role for role in module if role not in down], down):
                yield layer, blob_bytes([_matrix_of_linear(matrices, roles[role]) for role in stack])
                yield layer, sum(4 * roles[role].out_features for role in stack if roles[role].bias)
    head = found.head or found.embedding
    yield last, blob_bytes([head if head is not None else _dense_matrix("", config.hidden_size, config.vocab_size)])


def _matrix_of_linear(matrices: dict[str, StoredMatrix], linear: Linear) -> StoredMatrix:
    return matrices.get(linear.key) or _dense_matrix(linear.key, linear.in_features, linear.out_features)


def _dense_matrix(key: str, in_features: int, out_features: int) -> StoredMatrix:
    return StoredMatrix(key, None, key, "float16", in_features, out_features, (), 16.0, 2 * in_features * out_features)


# ---- blobs


def blob_bytes(parts: Sequence[StoredMatrix]) -> int:
    """Bytes of the blob of matrices with one input, side by side; each with a permutation of its own.

    Raises:
        DeviceError: the compiled library is not in use.
    """
    return _blob_bytes(tuple((part.format, part.in_features, part.out_features, part.groups) for part in parts)) if parts else 0


@lru_cache(maxsize=4096)  # the layers of a model are alike
def _blob_bytes(parts: tuple[tuple[str, int, int, tuple[tuple[int, int], ...]], ...]) -> int:
    formats, widths, columns, groups = zip(*parts)
    tables = [torch.tensor(pairs, dtype=torch.int64).view(-1, 2) for pairs in groups]
    return packed_bytes(widths[0], formats, columns, tables)
