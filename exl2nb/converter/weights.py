"""A dense model's tensors as the converter uses them: one layer at a time, in fp32, the next layer read in the background."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl2nb.core.errors import ConversionError, Exl2Error, FormatError
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import (
    Linear,
    accepted_shapes,
    end_vectors,
    head_linear,
    layer_linears,
    layer_vectors,
    model_linears,
    vector_shapes,
)
from exl2nb.model.store import Store

_ALIGNMENT_BYTES = 64  # bytes


class Prefetcher:
    """Reads some tensors of a store on a thread, into memory of its own.

    Args:
        store: the files: `info(name).nbytes`, `read(name, into=)`.
        most: bytes; more are not read ahead.
        pinned: memory from which a GPU fetches by itself.
    """

    def __init__(self, store: Any, most: int, *, pinned: bool) -> None:
        self._store, self._most, self._pinned = store, most, pinned
        self._space = torch.empty(0, dtype=torch.uint8)
        self._names: tuple[str, ...] = ()
        self._found: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._enough = False

    def begin(self, names: Sequence[str]) -> None:
        """Read these from now on; what was read before and not taken is forgotten."""
        if tuple(names) == self._names:
            return
        self.close()
        sizes = [-(-self._store.info(name).nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for name in names]
        if not 0 < sum(sizes) <= self._most:
            return
        if len(self._space) < sum(sizes):
            self._space = torch.empty(0, dtype=torch.uint8)
            self._space = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._pinned)
        self._names, self._enough = tuple(names), False
        places = self._space[: sum(sizes)].split(sizes)
        self._thread = threading.Thread(target=self._read, args=(self._names, places), name="weight prefetch", daemon=True)
        self._thread.start()

    def _read(self, names: Sequence[str], places: Sequence[Tensor]) -> None:
        for name, place in zip(names, places):
            if self._enough:
                return
            try:
                self._found[name] = self._store.read(name, into=place)
            except (Exl2Error, OSError):  # reading it again raises the error in the caller's thread
                return

    def take(self, name: str) -> Tensor | None:
        """A tensor that was read ahead, good until the next `begin`; None for any other."""
        if name not in self._names or self._thread is None:
            return None
        self._thread.join()
        return self._found.get(name)

    def close(self) -> None:
        """Stop reading. Harmless when repeated."""
        self._enough = True
        if self._thread is not None:
            self._thread.join()
        self._thread, self._names, self._found = None, (), {}


_EDGE_BYTES = 1 << 20
_PINNED_BYTES = 1 << 30  # at most, through which files go to a GPU


class DenseWeights:
    """Reads and checks a dense model.

    Raises:
        ConversionError: the model is quantised already, or a matrix has a shape that EXL2 cannot hold.
        FormatError: a tensor is missing or has the wrong shape or dtype.
    """

    def __init__(self, config: ModelConfig, store: Store, device: torch.device | str = "cpu") -> None:
        if store.is_exl2:
            raise ConversionError(f"{store.directory}: found an EXL2 model, expected a dense one; convert the model it was made from")
        if any(name.endswith(".qweight") for name in store.names()):
            raise ConversionError(f"{store.directory}: found a GPTQ model, expected a dense one; convert the model it was made from")
        self.config, self.store, self.device = config, store, torch.device(device)
        self._last: tuple[int, dict[str, Tensor]] | None = None
        self._factors: dict[str, Tensor] = {}
        self._through: Tensor | None = None
        self.prefetcher = Prefetcher(store, _PINNED_BYTES if self.device.type == "cuda" else 0, pinned=True)
        for linear in model_linears(config):
            self._check(self._weight_name(linear), linear.shape)
            if linear.bias:
                self._check(f"{linear.key}.bias", (linear.out_features,))
            head = linear.role == "head"
            if linear.in_features % 32 or linear.in_features > 65536 or (linear.out_features % 32 and not head):
                raise ConversionError(
                    f"{linear.key}: is {linear.in_features} x {linear.out_features}; expected multiples of 32 (inputs at most 65536): "
                    "the EXL2 format cannot hold this model"
                )
        for name, shape in vector_shapes(config).items():
            self._check(name, *accepted_shapes(config, shape))

    def close(self) -> None:
        """Read nothing ahead any more; before the store is closed."""
        self.prefetcher.close()

    def scale(self, factors: Mapping[str, Tensor]) -> None:
        """From now on multiply tensors, by name, with what broadcasts to them (converter.equalization)."""
        self._factors, self._last = {name: factor.to(self.device) for name, factor in factors.items()}, None

    @property
    def scaled(self) -> bool:
        """Whether any tensor is."""
        return bool(self._factors)

    def layer(self, index: int, *, then: int | None = None) -> dict[str, Tensor]:
        """All tensors of one layer, f32; those of the layer asked for last are kept.

        Args:
            then: the layer that will be asked for next: for a GPU its matrices are read while this one is worked on.
        """
        tensors = self._layer(index)
        if then is not None and 0 <= then < self.config.num_layers:
            self.prefetcher.begin([self._weight_name(linear) for linear in layer_linears(self.config, then).values()])
        return tensors

    def _layer(self, index: int) -> dict[str, Tensor]:
        if self._last is not None and self._last[0] == index:
            return dict(self._last[1])
        self._last = None
        tensors: dict[str, Tensor] = {}
        for linear in layer_linears(self.config, index).values():
            tensors[f"{linear.key}.weight"] = self.weight(linear)
            if linear.bias:
                tensors[f"{linear.key}.bias"] = self.stored(f"{linear.key}.bias").to(self.device).float()
        for name, shape in layer_vectors(self.config, index).items():
            tensors[name] = self.stored(name, shape).to(self.device).float()
        self._last = index, dict(tensors)
        return tensors

    def ends(self, *, embedding: bool = True) -> dict[str, Tensor]:
        """Last norm, head, on request the embedding (and other tensors outside the layers), f32."""
        self._last = None
        names = [name for name in end_vectors(self.config) if embedding or name != f"{self.config.names.embed}.weight"]
        tensors = {name: self.stored(name).to(self.device).float() for name in names}
        return {**tensors, f"{self.config.names.head}.weight": self.weight(head_linear(self.config))}

    def weight(self, linear: Linear) -> Tensor:
        """A matrix in the nn.Linear layout, f32 `(out_features, in_features)`; a tied head is the embedding."""
        return self._read(self._weight_name(linear)).float()

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor that is not quantised, as it will be stored: f16, of `shape` (one head norm for all heads becomes a row per head)."""
        tensor = self._read(name).half().cpu()
        return tensor if shape is None else tensor.expand(shape).contiguous()

    def fingerprint(self) -> str:
        """Hash of the model's files."""
        return files_fingerprint(self.store.files, Path(self.store.directory))

    def _weight_name(self, linear: Linear) -> str:
        own = f"{linear.key}.weight"
        tied = linear.role == "head" and own not in self.store and self.config.tie_word_embeddings
        return f"{self.config.names.embed}.weight" if tied else own

    def _check(self, name: str, shape: tuple[int, ...], *others: tuple[int, ...]) -> None:
        info = self.store.info(name)
        if info.shape not in (shape, *others) or not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise FormatError(f"{info.path}: tensor {name!r}: found {info.dtype} {info.shape}, expected fp16, bf16 or fp32 {shape}")

    def _read(self, name: str) -> Tensor:
        early = self.prefetcher.take(name)
        tensor = (self.store.read(name, into=self._pinned()) if early is None else early).to(self.device)
        if not torch.isfinite(tensor).all():
            raise FormatError(f"{self.store.info(name).path}: tensor {name!r}: found NaN or infinity, expected finite weights")
        return tensor * self._factors[name] if name in self._factors else tensor  # f32 where it is scaled

    def _pinned(self) -> Tensor | None:
        """Memory from which a GPU fetches by itself, for the largest tensor; None on the CPU, where every tensor has its own."""
        if self.device.type == "cuda" and self._through is None:
            largest = max(self.store.info(self._weight_name(linear)).nbytes for linear in model_linears(self.config))
            self._through = torch.empty(min(largest, _PINNED_BYTES), dtype=torch.uint8, pin_memory=True)
        return self._through


def files_fingerprint(files: Sequence[Path], directory: Path) -> str:
    """Hash of a model's files: headers, sizes, the first and last MiB of each, and config.json."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, path.stat().st_size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    digest.update((directory / "config.json").read_bytes())
    return digest.hexdigest()
