"""Measurement: what every width would cost each linear, in nats of KL; saved as JSON and good for any bitrate."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl2nb.converter import peer, rounding
from exl2nb.converter.allocation import (
    Allocation,
    Groups,
    MatrixChoice,
    MatrixOptions,
    Override,
    apply_overrides,
    group_rows,
    pareto_fronts,
    solve_allocation,
)
from exl2nb.converter.sizes import MEMORY_RESERVE, CacheShape, Other, exl2_tensor_sizes, overhead_bytes, parse_bytes
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.core.options import check_range
from exl2nb.core.show import facts
from exl2nb.io.atomic import atomic_write
from exl2nb.io.hf_config import read_json
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, end_vectors, layer_vectors
from exl2nb.ops.bf16x3 import matmul
from exl2nb.quant.bits import CODE_WIDTHS, head_mix, padded, stored_bits

FORMAT_VERSION = 2
ANCHOR_CODINGS = tuple((bits, size) for bits in CODE_WIDTHS for size in (32, 128))
HEAD_BITS = 6


@dataclass(frozen=True)
class Measured:
    """One linear. anchors: (bits, group size) -> predicted KL of each group, nats per token. power: the same for a matrix of zeros."""

    in_features: int
    out_features: int
    power: float
    anchors: dict[tuple[int, int], list[float]]
    role: str = ""
    layer: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Measurement:
    """All linears by module key, the head last, and what else the files hold.

    key: hash of model, calibration tokens and converter version. fingerprint: of the model. others: tensors stored as they are.
    cache: shape of its KV cache. calibration: rows, length, seed, dataset. statistics: what rounding needs of the calibration text
    (`sensitivity.LayerStatistics.tensors`); empty in a measurement read from JSON, and in that of a large model: a conversion then reads it
    from its work folder, or runs the sweep again.
    """

    key: str
    linears: dict[str, Measured]
    fingerprint: str = ""
    others: tuple[Other, ...] = ()
    cache: CacheShape | None = None
    calibration: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(repr=False, compare=False, default_factory=dict)

    # solving

    @cached_property
    def matrices(self) -> tuple[MatrixOptions, ...]:
        """Every matrix with its options, computed once."""
        by_inputs: dict[int, list[str]] = {}
        for key, m in self.linears.items():
            by_inputs.setdefault(m.in_features, []).append(key)
        made = {}
        for in_features, keys in by_inputs.items():
            wanted = [(self.linears[k].out_features, self.linears[k].anchors, self.linears[k].bias) for k in keys]
            made.update(zip(keys, pareto_fronts(in_features, wanted)))
        return tuple(
            MatrixOptions(key, m.role, m.layer, m.in_features, m.out_features, m.bias, made[key]) for key, m in self.linears.items()
        )

    @property
    def weights(self) -> int:
        """Weights of the layers' matrices, which bits per weight refer to."""
        return sum(m.in_features * m.out_features for m in self.linears.values() if m.role != "head")

    @property
    def range(self) -> tuple[float, float]:
        """Least and most bits per weight of the layers that `solve_allocation` can reach."""
        stack = [matrix for matrix in self.matrices if matrix.role != "head"]
        vectors = self._vector_bits()
        least, most = (sum(int(matrix.front.bits[i]) for matrix in stack) + vectors for i in (0, -1))
        return least / self.weights, most / self.weights

    def solve(
        self,
        bpw: float | None = None,
        *,
        bytes: int | str | None = None,
        fits: int | str | None = None,
        context: int = 0,
        cache: str = "fp16",
        head_bits: int | str | None = None,
        overrides: Mapping[str, Override] | None = None,
        frozen: Mapping[str, Groups] | None = None,
    ) -> Allocation:
        """Allocate: the option per matrix with the least predicted KL within one budget.

        Args:
            bpw: bits per weight of the layers, everything they store counted.
            bytes: of all weight files (or text such as "7GB").
            fits: a memory (such as "24GiB") that weights, a KV cache of `context` tokens in mode `cache`, and 4 % of air must fit in.
            context, cache: tokens and mode of that KV cache.
            head_bits: the head's row of the format's table (2, 3, 4, 5, 6 or 8), or "auto": the head shares the budget. With `bpw`, "auto"
                makes files as large as a 6-bit head would. None: 6 with `bpw`, "auto" otherwise.
            overrides: pattern -> rule: limits per layer, role or matrix (see `allocation.apply_overrides`, `allocation.restrict_matrix`).
            frozen: module key -> groups that must stay as they are, such as `allocation.groups()` of another allocation.

        Returns:
            An Allocation; the same for the same input. Takes milliseconds, so that a slider may call it.

        Raises:
            OptionError: not exactly one of bpw, bytes, fits; a value out of range; an override that matches nothing.
            ConversionError: the budget cannot be met; the message says what can.
        """
        if sum(value is not None for value in (bpw, bytes, fits)) != 1:
            raise OptionError("solve: expected exactly one of bpw, bytes and fits")
        head_bits = head_bits if head_bits is not None else HEAD_BITS if bpw is not None else "auto"
        matrices = self._restricted(head_bits, overrides or {}, frozen or {})
        if bpw is not None:
            check_range("bpw", bpw, 2, 8, where="solve")
            target, budget = f"{bpw:g} bpw", self._layer_budget(bpw, matrices, head_bits)
            low, high = self.range
            where = (
                f"bpw is {bpw:g}; this model reaches {low:.3f} to {high:.3f} bits per weight (scales, permutations, norms, biases counted)"
            )
        else:
            target, room = self._memory_budget(bytes, fits, context, cache)
            widest = ((s, [(8, rows) for rows in group_rows(s.in_features, 32)]) for s in matrices)
            parts = [part for s, groups in widest for part in exl2_tensor_sizes(s.key, groups, s.out_features, bias=s.bias)]
            budget, where = 8 * (room - overhead_bytes(parts, self.others)), target
        found = solve_allocation(matrices, budget, where=where)
        return self._allocation(matrices, found, target)

    def _restricted(self, head_bits: int | str, overrides: Mapping[str, Override], frozen: Mapping[str, Groups]) -> list[MatrixOptions]:
        matrices = list(self.matrices)
        rules: dict[str, Override] = {key: groups for key, groups in frozen.items()}
        if head_bits != "auto" and not any(s.role == "head" and s.key in rules for s in matrices):
            if not isinstance(head_bits, int):
                raise OptionError(f"head_bits is {head_bits!r}; expected 2, 3, 4, 5, 6, 8 or 'auto'")
            rules |= {s.key: head_mix(head_bits).groups(s.in_features) for s in matrices if s.role == "head"}
        if overrides:
            matrices = apply_overrides(matrices, overrides)
        return apply_overrides(matrices, rules, where="frozen") if rules else matrices

    def _layer_budget(self, bpw: float, matrices: Sequence[MatrixOptions], head_bits: int | str) -> int:
        budget = int(bpw * self.weights) - self._vector_bits()
        for matrix in matrices:
            if matrix.role == "head":
                fixed = stored_bits(head_mix(HEAD_BITS).groups(matrix.in_features), padded(matrix.out_features))
                budget += fixed if head_bits == "auto" else int(matrix.front.bits[0])
        return budget

    def _memory_budget(self, size: int | str | None, fits: int | str | None, context: int, cache: str) -> tuple[str, int]:
        if size is not None:
            return f"bytes is {size}", parse_bytes(size, where="bytes")
        memory = parse_bytes(fits, where="fits")  # type: ignore[arg-type]
        if self.cache is None and context:
            raise OptionError("solve: this measurement does not say how large a cache is; measure again, or leave context at 0")
        held = self.cache.nbytes(context, cache) if self.cache is not None and context else 0
        beside = f" ({held:,} bytes)" if held else ""
        return f"fits is {fits} with {context} tokens of {cache} cache{beside}", int(memory * (1 - MEMORY_RESERVE)) - held

    def _vector_bits(self) -> int:
        """Bits of the layers' norms: they count in the budget, so `bpw` times the weights is all that the layers store."""
        return 8 * sum(other.nbytes for other in self.others if other.in_layer)

    def _allocation(self, matrices: Sequence[MatrixOptions], found: Sequence[tuple[Groups, int, float]], target: str) -> Allocation:
        total = sum(error for _, _, error in found) or 1e-300
        choices = tuple(
            MatrixChoice(s.key, s.role, s.layer, s.in_features, s.out_features, groups, bits // 8, error, error / total)
            for s, (groups, bits, error) in zip(matrices, found)
        )
        parts = [part for c, s in zip(choices, matrices) for part in exl2_tensor_sizes(c.key, c.groups, c.out_features, bias=s.bias)]
        stack = sum(c.nbytes for c in choices if c.role != "head")
        return Allocation(
            choices=choices,
            target=target,
            bpw=(8 * stack + self._vector_bits()) / max(1, self.weights),
            nbytes=overhead_bytes(parts, self.others) + sum(c.nbytes for c in choices),
            predicted_kl=sum(c.predicted_kl for c in choices),
        )

    # files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, atomically.

        It has the `measurement` table of the format's own measurement files, so that exllamav2 reads it, and ours under `exl2nb`.
        """
        path = Path(path)
        ours = {
            "format": FORMAT_VERSION,
            "key": self.key,
            "fingerprint": self.fingerprint,
            "calibration": self.calibration,
            "cache": [self.cache.num_layers, self.cache.num_kv_heads, self.cache.head_dim] if self.cache else None,
            "others": [[o.name, list(o.shape), o.in_layer] for o in self.others],
            "linears": measurement_to_json(self.linears),
        }
        table = peer.measurement_table(self.linears)
        write_json(path, {**table, "exl2nb": {**ours, "sha256": checksum({**table, "exl2nb": ours})}})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measurement:
        """Read what `save` wrote; its options are computed at once, so that the first `solve_allocation` is as quick as the others.

        Raises:
            ConversionError: not such a file, or damaged. A file of exllamav2's own goes to `peer.PeerMeasurement.load`.
        """
        path = Path(path)
        whole = read_json(path, error=ConversionError)
        content = whole.get("exl2nb")
        try:
            assert isinstance(content, dict)
            if "sha256" in content and content.pop("sha256") != checksum(whole):  # files of version 0.1 have none
                raise ConversionError(f"{path}: its content has changed since it was written (sha256); measure again")
            assert content.keys() <= {"format", "key", "fingerprint", "calibration", "cache", "others", "linears"}
            assert content["format"] == FORMAT_VERSION
            cache = content["cache"]
            made = cls(
                key=str(content["key"]),
                linears=measurement_from_json(content["linears"]),
                fingerprint=str(content["fingerprint"]),
                others=tuple(Other(str(n), tuple(int(s) for s in shape), bool(layer)) for n, shape, layer in content["others"]),
                cache=CacheShape(*(int(v) for v in cache)) if cache else None,
                calibration=dict(content["calibration"]),
            )
            assert made.matrices
        except (AssertionError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConversionError(
                f"{path}: found no usable `exl2nb` section ({type(error).__name__}), expected one of format {FORMAT_VERSION}; measure again"
            ) from error
        return made

    def check_model(self, fingerprint: str, source: object) -> None:
        """Raise ConversionError unless the measurement was made of the model with this fingerprint."""
        if self.fingerprint != fingerprint:
            raise ConversionError(
                f"the measurement belongs to another model: its fingerprint is {self.fingerprint[:12]}..., that of {source} is "
                f"{fingerprint[:12]}...; measure this one"
            )

    def _repr_html_(self) -> str:
        low, high = self.range
        rows = {
            "matrices": str(len(self.linears)),
            "bits per weight": f"{low:.2f} to {high:.2f} can be reached",
            "calibration": ", ".join(f"{name} {str(value)[:60]}" for name, value in self.calibration.items() if name != "expert_tokens"),
        }
        return facts("measurement: solve(bpw=...) makes an allocation of it", rows)

    def __repr__(self) -> str:
        low, high = self.range
        return f"Measurement({len(self.linears)} matrices, {low:.2f} to {high:.2f} bits per weight, {self.calibration})"


def other_tensors(config: ModelConfig) -> tuple[Other, ...]:
    """The tensors of a model's files other than its matrices."""
    layers = [layer_vectors(config, layer) for layer in range(config.num_layers)]
    return (
        *(Other(name, tuple(shape), True) for layer in layers for name, shape in layer.items()),
        *(Other(name, tuple(shape), False) for name, shape in end_vectors(config).items()),
    )


def measure_linear(linear: Linear, weight: Tensor, factor: Any, hessian: Tensor, gradient: Tensor) -> Measured:
    """Run every anchor on one linear.

    Args:
        weight: f32 `(N, K)`.
        hessian: f64 or f32 `(K, K)`.
        gradient: f64 `(N,)`, mean squared gradient of each output.
    """
    column = gradient / 2
    options = [[(bits, rows) for rows in group_rows(linear.in_features, size)] for bits, size in ANCHOR_CODINGS]
    found = rounding.option_losses(weight, factor, options, column)
    # as the file will hold them, so that a saved measurement solves alike
    anchors = {anchor: [float(f"{v:.6g}") for v in values] for anchor, values in zip(ANCHOR_CODINGS, found)}
    power = float((matmul(weight, hessian.float()) * weight).sum(1, dtype=torch.float64) @ column)
    return Measured(linear.in_features, linear.out_features, power, anchors, linear.role, linear.layer, linear.bias)


def measurement_to_json(linears: Mapping[str, Measured]) -> dict[str, Any]:
    """Measured linears as JSON values."""
    return {
        key: {
            "shape": [m.in_features, m.out_features],
            "role": m.role,
            "layer": m.layer,
            "bias": m.bias,
            "power": m.power,
            "anchors": {f"{bits}/{size}": values for (bits, size), values in m.anchors.items()},
        }
        for key, m in linears.items()
    }


def measurement_from_json(table: Any) -> dict[str, Measured]:
    """The reverse of `measurement_to_json`.

    Raises:
        KeyError, TypeError, ValueError: damaged.
    """
    linears = {}
    for key, entry in table.items():
        (k, n), anchors = entry["shape"], {}
        for bits, size in ANCHOR_CODINGS:
            values = [float(v) for v in entry["anchors"][f"{bits}/{size}"]]
            if len(values) != len(group_rows(int(k), size)) or not all(math.isfinite(v) and v >= 0 for v in values):
                raise ValueError(f"{key} {bits}/{size}")
            anchors[bits, size] = values
        linears[key] = Measured(
            int(k), int(n), float(entry["power"]), anchors, str(entry["role"]), int(entry["layer"]), bool(entry["bias"])
        )
    if not linears:
        raise ValueError("no linears")
    return linears


def checksum(value: Any) -> str:
    """SHA-256 of a JSON value, the same before it was written and after it was read."""
    return hashlib.sha256(_as_json(value)).hexdigest()


def _as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    data = _as_json(value)
    with atomic_write(path, needed_bytes=len(data)) as file:
        file.write(data)
