"""The weights of a model directory as one mapping of dense tensors, read when asked for: what `reference` takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from exl2nb.model.config import ModelConfig
from exl2nb.model.gptq import read_gptq
from exl2nb.model.plan import PARTS, plan
from exl2nb.model.store import Store
from exl2nb.quant.exl2 import Exl2Tensors


class DenseWeights(Mapping[str, Tensor]):
    """Full tensor name -> tensor in the nn.Linear layout, in its stored dtype; EXL2 matrices are reconstructed to f16, padding
    dropped, GPTQ ones to f32.

    Nothing is kept: every access reads the file again. A tied head without a matrix of its own has no entry.

    Args:
        config: what the model must have; the store is checked against it.
        store: the files; it stays open as long as this is used.

    Raises:
        FormatError: as `plan.plan`; on access as `Exl2Tensors.read` and `GptqTensors.read`.
    """

    def __init__(self, config: ModelConfig, store: Store) -> None:
        self._config, self._store = config, store
        self._quantised = {}
        names = set(store.names())
        for source in plan(config, store).values():
            if source.kind != "dense":
                names -= {f"{source.prefix}.{part}" for part in PARTS[source.kind]}
                self._quantised[f"{source.prefix}.weight"] = source
        self._names = sorted(names | set(self._quantised))

    def __getitem__(self, name: str) -> Tensor:
        source = self._quantised.get(name)
        if source is None:
            if name not in self._store:
                raise KeyError(name)
            return self._store.read(name)
        linear = source.linear
        if source.kind == "gptq":
            return read_gptq(self._config, self._store, linear).reconstruct().T
        exl2 = Exl2Tensors.read(self._store, source.prefix, in_features=linear.in_features, out_features=linear.out_features)
        return exl2.reconstruct()[:, : linear.out_features].T

    def __contains__(self, name: object) -> bool:
        return name in self._quantised or name in self._store

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
