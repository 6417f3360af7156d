"""The stage "polish": swaps of bits between kinds of matrices, kept only where the true KL of a quick trial falls.

Sensitivity is measured at the dense model and for small errors; a plan lives elsewhere. So probes narrow all matrices of one kind (a role,
a stretch of layers, the head) and say how much more or less that costs than was predicted. With prices corrected by it, wholly and by half,
the allocation is solved again: plans that swap bits within the same budget. Whichever of them and the first plan has the least true KL is
the one to carry out. The rows are those for sensitivity, of which rounding sees nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from exl2nb.converter.calibrate import Rows
from exl2nb.converter.context import Context
from exl2nb.converter.measure import Measured, Measurement
from exl2nb.converter.options import Groups
from exl2nb.converter.plan import Plan, Slot
from exl2nb.converter.trial import true_kl
from exl2nb.converter.work import hash_of

ROUNDED_ON = 12  # rows whose Hessians the trial's rounding uses
ROWS, LENGTH = 8, 256  # judged, and tokens of each
NARROWER = 0.4  # bits per weight that a probe takes away
STRETCHES = 4  # of layers
STRENGTHS = (1.0, 0.5)
TRUST = 0.15  # how far, as a logarithm, predictions of a kind are expected to be off; a noisier correction counts less


@dataclass(frozen=True)
class Polished:
    """What the stage found. plan: to carry out. kl: true KL of the first plan and of those tried, nats per token on the rows judged.

    corrections: kind -> what its predicted cost was multiplied with, at full strength.
    """

    plan: Plan
    kl: tuple[float, ...]
    corrections: dict[str, float]

    @property
    def swapped(self) -> bool:
        """Whether another plan than the first one won."""
        return min(self.kl) < self.kl[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"swapped": self.swapped, "kl": list(self.kl), "corrections": self.corrections}


def polish(context: Context, rows: Rows, measurement: Measurement, plan: Plan, wanted: Mapping[str, Any]) -> Polished:
    """Try swaps.

    Args:
        context: the dense model, without experts, and where the true KLs are filed, so that a killed job does not try again.
        rows: calibration rows; those for sensitivity judge.
        measurement: the plan's.
        plan: to begin with.
        wanted: keywords of `Measurement.solve` that gave it.
    """
    weights, work = context.weights, context.work
    ids, judged = rows.hessians[:: max(1, rows.used // ROUNDED_ON)][:ROUNDED_ON], rows.sensitivity[:ROWS, :LENGTH]
    texts = hash_of(measurement.key, weights.fingerprint(), ids.numpy().tobytes(), judged.numpy().tobytes())
    with context.meter("polish", total=2 * (weights.config.num_layers + 1), unit="layers") as meter:

        def tried(plans: Sequence[Mapping[str, Groups]]) -> Tensor:
            key = hash_of(texts, *(sorted(one.items()) for one in plans))
            found = work.load_trial(key, (len(plans), len(judged)))
            if found is None:
                found = true_kl(weights, ids, judged, plans, step)
                work.save_trial(key, found)
            else:
                meter.step(weights.config.num_layers + 1)
            return found

        def step(detail: str) -> None:
            context.check()
            meter.step(detail=detail)

        kinds = _kinds(measurement.linears, weights.config.num_layers)
        probes = _probes(measurement.slots, plan, kinds)
        corrections = _corrections(tried([plan.groups(), *(groups for groups, _ in probes.values())]), [p for _, p in probes.values()])
        factors = dict(zip(probes, corrections))
        plans = [plan]
        for strength in STRENGTHS:
            other = _corrected(measurement, kinds, factors, strength).solve(**wanted)
            if all(other.groups() != one.groups() for one in plans):
                plans.append(other)
        kl = tuple(float(value) for value in tried([one.groups() for one in plans]).mean(1))
        found = Polished(plans[kl.index(min(kl))], kl, factors)
        meter.step(0, detail=f"true KL {kl[0]:.5f} to {min(kl):.5f}", kl=list(kl))
    return found


def _kinds(linears: Mapping[str, Measured], layers: int) -> dict[str, list[str]]:
    """Kind -> keys: every role, and stretches of layers where there are two and more of each."""
    kinds: dict[str, list[str]] = {}
    for key, m in linears.items():
        kinds.setdefault(m.role, []).append(key)
        if m.layer >= 0 and layers >= 2 * STRETCHES:
            kinds.setdefault(f"stretch {m.layer * STRETCHES // layers}", []).append(key)
    return kinds


def _probes(slots: Sequence[Slot], plan: Plan, kinds: Mapping[str, Sequence[str]]) -> dict[str, tuple[dict[str, Groups], float]]:
    """Kind -> the plan with its matrices narrower, and what that is predicted to cost; none for a kind that cannot be narrower."""
    table, chosen, found = {slot.key: slot for slot in slots}, {choice.key: choice for choice in plan.choices}, {}
    for kind, keys in kinds.items():
        groups, predicted = plan.groups(), 0.0
        for key in keys:
            slot, choice = table[key], chosen[key]
            most = 8 * choice.nbytes - NARROWER * choice.in_features * choice.out_features
            index = max(0, int(np.searchsorted(slot.menu.bits, most, side="right")) - 1)
            if slot.menu.bits[index] < 8 * choice.nbytes:
                groups[key] = slot.menu.groups(index)
                predicted += float(slot.menu.error[index]) - choice.predicted_kl
        if predicted > 0:
            found[kind] = groups, predicted
    return found


def _corrections(kl: Tensor, predicted: Sequence[float]) -> list[float]:
    """True over predicted cost of each probe, the less believed the more it differs from row to row, over their mean.

    kl: f64 `(1 + probes, rows)`, the plan's own first.
    """
    rise = kl[1:] - kl[0]
    logs = []
    for row, expected in zip(rise, predicted):
        ratio = float(row.mean()) / expected
        noise = float(row.std()) / math.sqrt(len(row)) / expected if len(row) > 1 else math.inf
        ratio = max(ratio, 0.25)
        logs.append(math.log(min(ratio, 4.0)) / (1.0 + (noise / ratio / TRUST) ** 2))
    middle = sum(logs) / max(1, len(logs))
    return [math.exp(value - middle) for value in logs]


def _corrected(measurement: Measurement, kinds: Mapping[str, Sequence[str]], factors: Mapping[str, float], strength: float) -> Measurement:
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
