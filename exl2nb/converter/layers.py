"""Quantising one layer: Hessians on what is quantised so far, targets that make up for it, codes. Knows nothing of files or budgets.

Two residual streams run side by side, the dense model's x and the quantised one's y. A linear W sees inputs from y, but should give what
the dense model gives on x: its target is W + strength * H^-1 C W with H = y^T y and C = y^T (x - y) (asymmetric calibration). Within a
layer the inputs of o, gate/up and down come from the matrices already quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.converter.experts import expert_inputs
from exl2nb.converter.gptq import dense, quantize
from exl2nb.converter.hessian import ROWS_PER_BATCH, Factor, Inputs, Moments, couple, factorize, input_of, inputs_at, stages
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.quant.exl2 import Exl2Tensors

HELD_BYTES = 1 << 30  # inputs of the dense model that are kept while a layer is quantised; above this they are computed again


@dataclass(frozen=True)
class Rounding:
    """How codes are chosen. strength: of asymmetric calibration, 0 to 1. coupled: columns of a matrix are rounded together.

    refresh: inputs inside a layer come from what is already quantised of it.
    """

    strength: float = 0.5
    coupled: bool = True
    refresh: bool = True


@dataclass
class Streams:
    """Residual streams f32 `(rows, S, H)`: of the dense model, and of the model quantised so far. The first `used` rows calibrate."""

    dense: Tensor
    made: Tensor
    used: int

    def batches(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Calibration rows, a few at a time: place, dense, made."""
        for first in range(0, self.used, ROWS_PER_BATCH):
            part = slice(first, min(first + ROWS_PER_BATCH, self.used))
            yield part, self.dense[part], self.made[part]


def quantize_layer(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Tensor],
    streams: Streams,
    statistics: Mapping[str, Tensor],
    groups: Mapping[str, Sequence[tuple[int, int]]],
    rounding: Rounding,
) -> dict[str, tuple[Exl2Tensors, float]]:
    """Quantise all linears of one layer.

    Args:
        config: the model.
        layer: its index.
        weights: the layer's dense tensors.
        streams: before the layer; not changed.
        statistics: token weights ("layer.input") and couplings ("key.coupling") of the layer.
        groups: key -> (bits, rows) of each linear.
        rounding: how.

    Returns:
        Key -> tensors and loss.
    """
    linears = layer_linears(config, layer)
    names = input_of(linears)
    shared = {role: name for role, name in names.items() if "." not in name}  # what every token reads
    current, packed = dict(weights), {}
    held = _held(config, layer, weights, streams, linears, shared) if rounding.strength else None
    seen = current if rounding.refresh else weights

    def make(name: str, factor: Factor, cross: Tensor | None) -> None:
        for linear in (linears[role] for role, source in names.items() if source == name):
            weight = weights[f"{linear.key}.weight"]
            target = weight if cross is None else weight + factor.correction(cross, weight, rounding.strength)
            products = statistics.get(f"{linear.key}.coupling") if rounding.coupled else None
            coupling = None if products is None else couple(products.to(weight.device))
            bias = weights[f"{linear.key}.bias"].half() if linear.bias else None
            packed[linear.key] = quantize(target, factor, groups[linear.key], bias=bias, coupling=coupling)
            current[f"{linear.key}.weight"] = dense(packed[linear.key][0], linear.out_features).to(weight.device)

    for stage in stages(shared.values()):
        moments = _moments(config, layer, (weights, dict(seen)), streams, [linears[name] for name in stage], held, statistics, rounding)
        for name in stage:
            key = linears[name].key
            make(name, factorize(moments[key], name=f"layer {layer}, input of {name}"), moments.get(f"{key} cross"))
    if config.experts(layer) is not None:
        routed = _routed(config, layer, (weights, seen), streams)
        for name, factor, cross in expert_inputs(config, layer, (weights, seen), routed, statistics, cross=bool(rounding.strength)):
            make(name, factor, cross)
    return {linear.key: packed[linear.key] for linear in linears.values()}


def _routed(
    config: ModelConfig, layer: int, weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], streams: Streams
) -> tuple[Tensor, Tensor]:
    """What the router reads, f32 `(tokens, H)`: in the dense model, and in what is quantised so far."""
    router, dense_parts, made_parts = config.names.at(layer, "router"), [], []
    for _, x, y in streams.batches():
        dense_parts.append(inputs_at(config, layer, weights[0], x, [router])[router][0])
        made_parts.append(inputs_at(config, layer, weights[1], y, [router])[router][0])
    return torch.cat(dense_parts), torch.cat(made_parts)


def quantize_head(
    config: ModelConfig, ends: Mapping[str, Tensor], streams: Streams, groups: Sequence[tuple[int, int]], rounding: Rounding
) -> tuple[Exl2Tensors, float]:
    """Quantise the head's matrix on the streams after the last layer."""
    key, moments = head_linear(config).key, Moments()
    for _, x, y in streams.batches():
        wanted, found = (reference.final_norm(config, ends, part) for part in (x, y))
        moments.add("head", found)
        if rounding.strength:
            moments.add_cross("cross", found, wanted - found)
    hessians = moments.hessians()
    factor, weight = factorize(hessians["head"], name="input of the head"), ends[f"{key}.weight"]
    if rounding.strength:
        weight = weight + factor.correction(hessians["cross"], weight, rounding.strength)
    return quantize(weight, factor, groups)


def _held(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Tensor],
    streams: Streams,
    linears: Mapping[str, Linear],
    names: Mapping[str, str],
) -> list[Inputs] | None:
    """The dense model's inputs of the linears in `names`, per batch, where they fit."""
    firsts = [linears[name] for name in dict.fromkeys(names.values())]
    if streams.used * streams.dense.shape[1] * 4 * sum(linear.in_features for linear in firsts) > HELD_BYTES:
        return None
    return [inputs_at(config, layer, weights, x, [linear.key for linear in firsts]) for _, x, _ in streams.batches()]


def _moments(
    config: ModelConfig,
    layer: int,
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    streams: Streams,
    linears: Sequence[Linear],
    held: list[Inputs] | None,
    statistics: Mapping[str, Tensor],
    rounding: Rounding,
) -> dict[str, Tensor]:
    """Hessians by key and, where wanted, cross moments by "key cross". weights: dense, and quantised so far."""
    moments, length = Moments(), streams.dense.shape[1]
    keys = [linear.key for linear in linears]
    for place, (part, x, y) in enumerate(streams.batches()):
        found = inputs_at(config, layer, weights[1], y, keys)
        wanted: Inputs = {}
        if rounding.strength:
            wanted = held[place] if held else inputs_at(config, layer, weights[0], x, keys)
        for linear in linears:
            value, _ = found[linear.key]
            tokens = statistics.get(f"{layer}.{linear.role}")
            weight = None if tokens is None else tokens[part.start * length : part.stop * length].to(value.device)
            moments.add(linear.key, value, weight)
            if linear.key in wanted:
                moments.add_cross(f"{linear.key} cross", value, wanted[linear.key][0] - value, weight)
    return moments.hessians()
