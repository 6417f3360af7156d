"""Measurement: what every width would cost each linear, in nats of KL; saved as JSON and good for any bitrate."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from exl2nb.converter import gptq
from exl2nb.converter.hessian import factorize, input_of
from exl2nb.converter.options import group_rows
from exl2nb.converter.sensitivity import LayerStatistics
from exl2nb.core.errors import ConversionError
from exl2nb.io import safetensors
from exl2nb.io.atomic import atomic_write
from exl2nb.io.hf_config import read_json
from exl2nb.model.layout import Linear
from exl2nb.quant.bits import WIDTHS, stored_bits

FORMAT = 1
ANCHORS = tuple((bits, size) for bits in WIDTHS for size in (32, 128))


@dataclass(frozen=True)
class Measured:
    """One linear. anchors: (bits, group size) -> predicted KL of each group, nats per token. power: the same for a matrix of zeros."""

    in_features: int
    out_features: int
    power: float
    anchors: dict[tuple[int, int], list[float]]


@dataclass(frozen=True)
class Measurement:
    """All linears of the stack, by module key, and how much each calibration token counts for each input.

    key: hash of model, calibration tokens and converter version. token_weights: "layer.input" -> f32 `(tokens,)`.
    """

    key: str
    linears: dict[str, Measured]
    token_weights: dict[str, Tensor] = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `path` (JSON) and, beside it, the token weights (`.safetensors`), each atomically.

        The JSON has the `measurement` table of the format's own measurement files (uniform widths in groups of 128), and ours under
        `exl2nb`.
        """
        path = Path(path)
        safetensors.save(path.with_suffix(".safetensors"), self.token_weights)
        write_json(path, {**_table(self.linears), "exl2nb": {"format": FORMAT, "key": self.key, "linears": _plain(self.linears)}})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measurement:
        """Read what `save` wrote.

        Raises:
            ConversionError: not such a file, or damaged.
        """
        path = Path(path)
        content = read_json(path, error=ConversionError).get("exl2nb")
        try:
            assert isinstance(content, dict)
            assert content["format"] == FORMAT
            linears = _parse(content["linears"])
            key = str(content["key"])
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ConversionError(
                f"{path}: found no usable `exl2nb` section ({type(error).__name__}), expected one of format {FORMAT}; measure again"
            ) from error
        with safetensors.SafetensorsFile(path.with_suffix(".safetensors")) as file:
            weights = {name: file.read(name) for name in file.names()}
        return cls(key=key, linears=linears, token_weights=weights)


def measure_layer(linears: Mapping[str, Linear], weights: Mapping[str, Tensor], statistics: LayerStatistics) -> dict[str, Measured]:
    """Run every anchor on every linear of one layer.

    Args:
        linears: of the layer, by role.
        weights: its dense tensors.
        statistics: Hessians and gradients on the calibration rows.
    """
    factors = {name: factorize(h, name=f"layer {statistics.layer}, input of {name}") for name, h in statistics.hessians.items()}
    names, measured = input_of(linears), {}
    for role, linear in linears.items():
        weight, column = weights[f"{linear.key}.weight"], statistics.gradients[linear.key] / 2
        factor, hessian = factors[names[role]], statistics.hessians[names[role]]
        anchors = {}
        for bits, size in ANCHORS:
            groups = [(bits, rows) for rows in group_rows(linear.in_features, size)]
            anchors[bits, size] = (gptq.run(weight, factor, groups).loss.double() @ column).tolist()
        wide = weight.double()
        power = float(((wide @ hessian) * wide).sum(1) @ column)
        measured[linear.key] = Measured(linear.in_features, linear.out_features, power, anchors)
    return measured


def _plain(linears: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        key: {
            "shape": [m.in_features, m.out_features],
            "power": m.power,
            "anchors": {f"{bits}/{size}": values for (bits, size), values in m.anchors.items()},
        }
        for key, m in linears.items()
    }


def _parse(table: Any) -> dict[str, Measured]:
    linears = {}
    for key, entry in table.items():
        (k, n), anchors = entry["shape"], {}
        for bits, size in ANCHORS:
            values = [float(v) for v in entry["anchors"][f"{bits}/{size}"]]
            if len(values) != len(group_rows(int(k), size)) or not all(math.isfinite(v) and v >= 0 for v in values):
                raise ValueError(f"{key} {bits}/{size}")
            anchors[bits, size] = values
        linears[key] = Measured(int(k), int(n), float(entry["power"]), anchors)
    return linears


def _table(linears: Mapping[str, Measured]) -> dict[str, Any]:
    """The part that other readers of measurement files understand."""
    slots: dict[str, dict[str, Measured]] = {}
    for key, measured in linears.items():
        module, _, name = key.rpartition(".")
        slots.setdefault(module, {})[name] = measured
    table = {module: [_uniform(bits, parts) for bits in WIDTHS] for module, parts in slots.items()}
    return {"measurement": {**table, "model.norm.norm": None, "lm_head.linear": None}, "last_module_idx": len(slots) + 2}


def _uniform(bits: int, parts: Mapping[str, Measured]) -> dict[str, Any]:
    error = sum(sum(m.anchors[bits, 128]) for m in parts.values()) / max(sum(m.power for m in parts.values()), 1e-300)
    cost = sum(stored_bits([(bits, rows) for rows in group_rows(m.in_features, 128)], m.out_features) for m in parts.values())
    recipe = {"group_size": {str(bits): 128}, "bits": [bits], "bits_prop": [1], "scale_bits": 4}
    return {"accuracy": max(1e-6, 1 - math.sqrt(error)), "total_bits": cost, **dict.fromkeys(parts, recipe)}


def save_layer(path: Path, linears: Mapping[str, Measured], token_weights: Mapping[str, Tensor]) -> None:
    """Write one layer's part, the token weights first: the JSON is the mark that the layer is done."""
    safetensors.save(path.with_suffix(".safetensors"), {k: v.contiguous() for k, v in token_weights.items()})
    write_json(path, {"linears": _plain(linears)})


def load_layer(path: Path) -> tuple[dict[str, Measured], dict[str, Tensor]] | None:
    """Read what `save_layer` wrote; None where it is missing or damaged, and must be measured again."""
    try:
        linears = _parse(read_json(path, error=ConversionError)["linears"])
        with safetensors.SafetensorsFile(path.with_suffix(".safetensors")) as file:
            return linears, {name: file.read(name) for name in file.names()}
    except (ConversionError, OSError, KeyError, TypeError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    data = json.dumps(value, indent=1).encode()
    with atomic_write(path, needed_bytes=len(data)) as file:
        file.write(data)
