"""One linear layer from a store, in whichever format it is there. To add a format: one file, one line in FORMATS."""

from __future__ import annotations

from collections.abc import Mapping

from exl2nb.core.errors import FormatError
from exl2nb.quant.base import Store, Weight
from exl2nb.quant.dense import DenseTensors
from exl2nb.quant.exl2 import Exl2Tensors

FORMATS: Mapping[str, type[Exl2Tensors] | type[DenseTensors]] = {"q_weight": Exl2Tensors, "weight": DenseTensors}  # tried in this order


def read_linear(store: Store, prefix: str, *, in_features: int | None = None, out_features: int | None = None) -> Weight:
    """Read and validate the weights under a module key.

    Returns:
        Exl2Tensors or DenseTensors.

    Raises:
        FormatError: no known format under this key, or a broken rule.
    """
    for suffix, kind in FORMATS.items():
        if f"{prefix}.{suffix}" in store:
            return kind.read(store, prefix, in_features=in_features, out_features=out_features)
    known = ", ".join(f"{prefix}.{suffix}" for suffix in FORMATS)
    raise FormatError(f"{getattr(store, 'directory', 'tensors')}: tensor {prefix!r}: found no weight, expected one of {known}")
