"""Refinement of an allocation by true KL: that of quickly rounded models on a few rows, and the search that uses it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2nb.converter.allocation import Allocation, Groups, MatrixOptions
from exl2nb.converter.calibration import Rows
from exl2nb.converter.hessian import Factor, Moments, advance_stream, factorize, role_inputs, row_batches
from exl2nb.converter.measurement import Measured, Measurement
from exl2nb.converter.rounding import dense_weight, quantize_matrix
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import Context, hash_of
from exl2nb.model import reference
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.quant.exl2 import Exl2Tensors

Choices = Mapping[str, Groups]
Made = dict[tuple[str, Groups], Exl2Tensors]  # packed, in host memory: a GPU cannot hold more of a large model


def true_kl(
    weights: DenseWeights, ids: Tensor, judged: Tensor, allocations: Sequence[Choices], step: Callable[[str], None] = lambda detail: None
) -> Tensor:
    """KL of the model rounded by each of several allocations.

    A matrix is rounded once for each different choice, for the inputs that the dense model gives it on `ids`. Allocations share all layers
    before the first one in which they differ. So similar allocations cost little more than one.

    Args:
        ids: calibration rows int32 `(R, S)`.
        judged: rows int32 `(J, S')` that share nothing with them.
        allocations: module key -> groups.
        step: called with a line of text after every layer and the head.

    Returns:
        f64 `(len(allocations), J)`: nats per token, a mean per row.
    """
    config, device, ends = weights.config, weights.device, weights.ends()
    x, wanted = (reference.embed(config, ends, rows.to(device)) for rows in (ids, judged))
    del ends
    streams, place = [wanted], [0] * len(allocations)
    for layer in range(config.num_layers):
        linears, tensors = list(layer_linears(config, layer).values()), weights.layer(layer)
        hessians, x = _layer_hessians(weights, layer, tensors, x)
        names, made = role_inputs({linear.role: linear for linear in linears}), Made()
        for name in dict.fromkeys(names.values()):
            factor = factorize(hessians.pop(name), name=f"layer {layer}, input of {name}")
            made |= _round_linears([linear for linear in linears if names[linear.role] == name], tensors, factor, allocations)
        ways = [(at, tuple(allocation[linear.key] for linear in linears)) for at, allocation in zip(place, allocations)]
        apart = list(dict.fromkeys(ways))
        place = [apart.index(way) for way in ways]
        streams = [
            advance_stream(
                config, layer, {**tensors, **_dense_weights(made, linears, how, device)}, streams[at], torch.empty_like(streams[at])
            )
            for at, how in apart
        ]
        wanted = advance_stream(config, layer, tensors, wanted, torch.empty_like(wanted))
        step(f"layer {layer}")
    found = _judge_head(weights, x, wanted, [streams[at] for at in place], allocations)
    step("head")
    return found


def _layer_hessians(weights: DenseWeights, layer: int, tensors: Mapping[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Hessians of a layer's inputs, and the stream after it."""
    config, moments, out = weights.config, Moments(), torch.empty_like(x)
    roles = {linear.key: role for role, linear in layer_linears(config, layer).items()}
    first = set(role_inputs(roles.values()).values())

    def capture(key: str, value: Tensor, rows: Tensor | None = None) -> None:
        if roles.get(key) in first:
            moments.add(roles[key], value)

    for part in row_batches(config, x, 0, len(x)):
        out[part] = reference.block(config, layer, tensors, x[part], capture)
    return moments.hessians(), out


def _round_linears(linears: Sequence[Linear], tensors: Mapping[str, Tensor], factor: Factor, allocations: Sequence[Choices]) -> Made:
    """Each linear, rounded once for each different choice."""
    made = Made()
    for linear in linears:
        weight = tensors[f"{linear.key}.weight"]
        for groups in dict.fromkeys(allocation[linear.key] for allocation in allocations):
            made[linear.key, groups] = quantize_matrix(weight, factor, groups)[0]
    return made


def _dense_weights(made: Made, linears: Sequence[Linear], how: Sequence[Groups], device: torch.device) -> dict[str, Tensor]:
    """Matrices as the network takes them."""
    return {
        f"{linear.key}.weight": dense_weight(made[linear.key, groups], linear.out_features, device) for linear, groups in zip(linears, how)
    }


def _judge_head(weights: DenseWeights, x: Tensor, wanted: Tensor, streams: Sequence[Tensor], allocations: Sequence[Choices]) -> Tensor:
    config, ends, moments = weights.config, weights.ends(embedding=False), Moments()
    linear = head_linear(config)
    for part in row_batches(config, x, 0, len(x)):
        moments.add("head", reference.final_norm(config, ends, x[part]))
    factor = factorize(moments.hessians()["head"], name="input of the head")
    made = _round_linears([linear], ends, factor, allocations)
    found = torch.zeros(len(allocations), len(wanted), dtype=torch.float64)
    for groups in dict.fromkeys(allocation[linear.key] for allocation in allocations):
        quantised = {**ends, **_dense_weights(made, [linear], [groups], weights.device)}
        same = [i for i, allocation in enumerate(allocations) if allocation[linear.key] == groups]
        for i, row in itertools.product(same, range(len(wanted))):
            target, got = (
                reference.head(config, tensors, reference.final_norm(config, ends, stream)).log_softmax(-1)
                for tensors, stream in ((ends, wanted[row]), (quantised, streams[i][row]))
            )
            found[i, row] = (target.exp() * (target - got)).sum(-1).mean(dtype=torch.float64).cpu()
    return found


ROUNDED_ON = 12  # rows whose Hessians the trial's rounding uses
JUDGED_ROWS = 8
JUDGED_TOKENS = 256  # of each row
PROBE_BITS = 0.4  # bits per weight that a probe takes away
LAYER_STRETCHES = 4  # of layers
CORRECTION_STRENGTHS = (1.0, 0.5)
EXPECTED_LOG_ERROR = 0.15  # how far, as a logarithm, predictions of a kind are expected to be off; a noisier correction counts less


@dataclass(frozen=True)
class Polished:
    """What the stage found. allocation: the one with the least true KL.

    kl: true KL of the first allocation and of those tried, nats per token on the rows that judge.
    corrections: kind -> what its predicted cost was multiplied with, at full strength.
    """

    allocation: Allocation
    kl: tuple[float, ...]
    corrections: dict[str, float]

    @property
    def swapped(self) -> bool:
        """Whether another allocation than the first one won."""
        return min(self.kl) < self.kl[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"swapped": self.swapped, "kl": list(self.kl), "corrections": self.corrections}


def polish(context: Context, rows: Rows, measurement: Measurement, allocation: Allocation, wanted: Mapping[str, Any]) -> Polished:
    """Correct predictions by the true KL of probes, solve again, and keep the allocation with the least true KL.

    Args:
        context: the dense model, without experts, and where the true KLs are filed, so that a killed job does not try again.
        rows: calibration rows; those for sensitivity judge.
        wanted: keywords of `Measurement.solve` that gave it.
    """
    weights, work = context.weights, context.work
    ids, judged = rows.hessians[:: max(1, rows.used // ROUNDED_ON)][:ROUNDED_ON], rows.sensitivity[:JUDGED_ROWS, :JUDGED_TOKENS]
    texts = hash_of(measurement.key, weights.fingerprint(), ids.numpy().tobytes(), judged.numpy().tobytes())
    with context.meter("polish", total=2 * (weights.config.num_layers + 1), unit="layers") as meter:

        def tried(allocations: Sequence[Mapping[str, Groups]]) -> Tensor:
            key = hash_of(texts, *(sorted(one.items()) for one in allocations))
            found = work.load_trial(key, (len(allocations), len(judged)))
            if found is None:
                found = true_kl(weights, ids, judged, allocations, step)
                work.save_trial(key, found)
            else:
                meter.step(weights.config.num_layers + 1)
            return found

        def step(detail: str) -> None:
            context.check()
            meter.step(detail=detail)

        kinds = _probe_kinds(measurement.linears, weights.config.num_layers)
        probes = _make_probes(measurement.matrices, allocation, kinds)
        found = tried([allocation.groups(), *(groups for groups, _ in probes.values())])
        corrections = corrections_of(found, [predicted for _, predicted in probes.values()])
        factors = dict(zip(probes, corrections))
        allocations = [allocation]
        for strength in CORRECTION_STRENGTHS:
            other = _correct_measurement(measurement, kinds, factors, strength).solve(**wanted)
            if all(other.groups() != one.groups() for one in allocations):
                allocations.append(other)
        kl = tuple(float(value) for value in tried([one.groups() for one in allocations]).mean(1))
        found = Polished(allocations[kl.index(min(kl))], kl, factors)
        meter.step(0, detail=f"true KL {kl[0]:.5f} to {min(kl):.5f}", kl=list(kl))
    return found


def _probe_kinds(linears: Mapping[str, Measured], layers: int) -> dict[str, list[str]]:
    """Kind -> keys: every role, and stretches of layers where there are two and more of each."""
    kinds: dict[str, list[str]] = {}
    for key, m in linears.items():
        kinds.setdefault(m.role, []).append(key)
        if m.layer >= 0 and layers >= 2 * LAYER_STRETCHES:
            kinds.setdefault(f"stretch {m.layer * LAYER_STRETCHES // layers}", []).append(key)
    return kinds


def _make_probes(
    matrices: Sequence[MatrixOptions], allocation: Allocation, kinds: Mapping[str, Sequence[str]]
) -> dict[str, tuple[dict[str, Groups], float]]:
    """Kind -> the allocation with its matrices narrower, and what that is predicted to cost; none for a kind that cannot be narrower."""
    table, chosen, found = {matrix.key: matrix for matrix in matrices}, {choice.key: choice for choice in allocation.choices}, {}
    for kind, keys in kinds.items():
        groups, predicted = allocation.groups(), 0.0
        for key in keys:
            matrix, choice = table[key], chosen[key]
            most = 8 * choice.nbytes - PROBE_BITS * choice.in_features * choice.out_features
            index = max(0, int(np.searchsorted(matrix.front.bits, most, side="right")) - 1)
            if matrix.front.bits[index] < 8 * choice.nbytes:
                groups[key] = matrix.front.groups(index)
                predicted += float(matrix.front.error[index]) - choice.predicted_kl
        if predicted > 0:
            found[kind] = groups, predicted
    return found


def corrections_of(kl: Tensor, predicted: Sequence[float]) -> list[float]:
    """True over predicted cost of each probe, the less believed the more it differs from row to row, over their mean.

    kl: f64 `(1 + probes, rows)`, the allocation's own first.
    """
    rise = kl[1:] - kl[0]
    logs = []
    for row, expected in zip(rise, predicted):
        ratio = float(row.mean()) / expected
        noise = float(row.std()) / math.sqrt(len(row)) / expected if len(row) > 1 else math.inf
        ratio = max(ratio, 0.25)
        logs.append(math.log(min(ratio, 4.0)) / (1.0 + (noise / ratio / EXPECTED_LOG_ERROR) ** 2))
    middle = sum(logs) / max(1, len(logs))
    return [math.exp(value - middle) for value in logs]


def _correct_measurement(
    measurement: Measurement, kinds: Mapping[str, Sequence[str]], factors: Mapping[str, float], strength: float
) -> Measurement:
    """The measurement with the predicted costs of every kind multiplied."""
    by = dict.fromkeys(measurement.linears, 1.0)
    for kind, factor in factors.items():
        for key in kinds[kind]:
            by[key] *= factor**strength
    linears = {
        key: dataclasses.replace(m, power=m.power * by[key], anchors={a: [v * by[key] for v in values] for a, values in m.anchors.items()})
        for key, m in measurement.linears.items()
    }
    return dataclasses.replace(measurement, linears=linears)
