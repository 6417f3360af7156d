"""The stage "measure": a sweep over the model, every linear measured on the way. Knows nothing of bitrates or of rounding."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch import Tensor

from exl2nb.converter import measure
from exl2nb.converter.calibrate import Rows
from exl2nb.converter.context import Context
from exl2nb.converter.hessian import factorize, input_of
from exl2nb.converter.measure import Measured, Measurement
from exl2nb.converter.sensitivity import LayerStatistics, sweep
from exl2nb.converter.sizes import CacheShape
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import HEAD, REVISION, Work, hash_of
from exl2nb.model.layout import head_linear, layer_linears

HELD_STATISTICS = 256 << 20  # bytes of statistics that a measurement keeps in memory for further bitrates


def measured(context: Context, rows: Rows, seed: int, calibration: dict[str, Any], given: Measurement | None) -> tuple[Measurement, str]:
    """The measurement given, the one in the work folder, or a new one; and the key of the statistics on these rows.

    A measurement given without statistics of these rows costs one sweep, in which no linear is measured again.

    Args:
        context: the model, and where measured layers and statistics are filed.
        rows: calibration rows.
        seed: of the random changes of logits.
        calibration: what the measurement says of its rows.
        given: a measurement of this model.
    """
    weights, work = context.weights, context.work
    fingerprint, layers = weights.fingerprint(), weights.config.num_layers
    key = hash_of(
        REVISION, measure.FORMAT, fingerprint, rows.calibrating.numpy().tobytes(), rows.used, seed, measure.ANCHORS, weights.scaled
    )
    found = given if given is not None else work.load_measurement(key)
    if found is not None and ((found.key == key and found.statistics) or work.has_statistics(key, layers)):
        return found, key
    made = _measure(context, rows, key, found, {**calibration, "seed": seed})
    work.save_measurement(made, layers)
    return made, key


def _measure(context: Context, rows: Rows, key: str, known: Measurement | None, calibration: dict[str, Any]) -> Measurement:
    weights, work, config, held, visits = context.weights, context.work, context.weights.config, _Held(), {}
    linears: dict[str, Measured] = dict(known.linears) if known is not None else {}
    with context.meter("measure", total=2 * config.num_layers + 1, unit="layers") as meter:

        def step(detail: str) -> None:
            context.check()
            meter.step(detail=detail)

        for statistics in sweep(weights, rows.calibrating, used=rows.used, seed=calibration["seed"], step=step, directory=work.directory):
            if statistics.layer != HEAD:
                tensors = statistics.tensors()
                work.save_statistics(key, statistics.layer, tensors)
                held.add(tensors)
            if statistics.visits:
                visits[str(statistics.layer)] = list(statistics.visits)
            if known is None:
                linears |= _layer(weights, work, key, statistics)
            del statistics  # its Hessians: the next layer's come while this name is still there
    if known is not None:
        return dataclasses.replace(known, statistics=held.tensors if known.key == key else {})
    table = [linear for layer in range(config.num_layers) for linear in layer_linears(config, layer).values()]
    return Measurement(
        key=key,
        linears={linear.key: linears[linear.key] for linear in (*table, head_linear(config))},
        fingerprint=weights.fingerprint(),
        others=measure.others_of(config),
        cache=CacheShape(config.num_layers, config.num_kv_heads, config.head_dim),
        calibration={**calibration, **({"expert_tokens": visits} if visits else {})},
        statistics=held.tensors,
    )


class _Held:
    """Statistics of all layers, or nothing once they are more than HELD_STATISTICS."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._nbytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Keep those of one layer."""
        self._nbytes += sum(tensor.nbytes for tensor in tensors.values())
        self.tensors = self.tensors | tensors if self._nbytes <= HELD_STATISTICS else {}


def _layer(weights: DenseWeights, work: Work, key: str, statistics: LayerStatistics) -> dict[str, Measured]:
    """Measure one layer, or the head, unless a run before this one did."""
    layer = statistics.layer
    done = work.load_part(key, layer)
    if done is not None:
        return done
    where = "head" if layer == HEAD else f"layer {layer}"
    linears = {"head": head_linear(weights.config)} if layer == HEAD else layer_linears(weights.config, layer)
    names = {"head": "head"} if layer == HEAD else input_of(linears)
    dense = {} if layer == HEAD else weights.layer(layer)
    done = {}
    for name, roles in itertools.groupby(linears, names.__getitem__):  # one factor in memory at a time
        hessian = statistics.hessians[name]
        factor = factorize(hessian, name=f"{where}, input of {name}")
        for linear in (linears[role] for role in roles):
            weight = weights.weight(linear) if layer == HEAD else dense[f"{linear.key}.weight"]
            done[linear.key] = measure.measure_linear(linear, weight, factor, hessian, statistics.gradients[linear.key])
    work.save_part(key, layer, done)
    return done
