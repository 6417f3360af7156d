"""The stage "quantize": layer by layer on the stream of what is quantised so far, one file each. Knows nothing of how codes are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exl2nb.converter.calibrate import Rows
from exl2nb.converter.context import Context
from exl2nb.converter.gptq import dense
from exl2nb.converter.layers import Rounding, Streams, quantize_head, quantize_layer
from exl2nb.converter.measure import Measurement
from exl2nb.converter.plan import Choice, Plan
from exl2nb.converter.report import Quality, judge
from exl2nb.converter.result import Matrix
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import HEAD, Packed, Work, hash_of
from exl2nb.core.errors import ConversionError
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.quant.exl2 import Exl2Tensors


@dataclass
class Made:
    """What was quantised. key: of its files. matrices: in running order, the head last. resumed: layers taken over from an earlier run."""

    key: str
    matrices: list[Matrix] = field(default_factory=list)
    resumed: int = 0
    quality: Quality | None = None


def quantize_model(context: Context, rows: Rows, measurement: Measurement, plan: Plan, statistics: str, rounding: Rounding) -> Made:
    """Quantise every layer and the head into the work folder; those that are there already are taken over.

    Args:
        context: the model and the folder.
        rows: calibration rows, of which those for sensitivity are not used, and those for the report.
        measurement: the plan's.
        plan: widths of every matrix.
        statistics: key of the statistics on these rows.
        rounding: how codes are chosen.
    """
    held_out, weights, work, config = rows.report, context.weights, context.work, context.weights.config
    made = Made(hash_of(statistics, rounding, list(plan.groups().items())))
    layers, filed = config.num_layers, _Filed(weights, work, made, {c.key: c for c in plan.choices})
    streams = Streams.of(config, weights.ends(), torch.cat([rows.hessians, held_out]), rows.used, work.directory)
    with context.meter("quantize", total=layers + 1, unit="layers") as meter:
        for layer in range(layers):
            context.check()
            known = measurement.statistics if measurement.key == statistics else {}
            done = filed.layer(layer, streams, known or work.load_statistics(statistics, layer), rounding)
            meter.step(detail=f"layer {layer}", bpw=[round(m.bpw, 3) for m in done])
        context.check()
        quantised = filed.head(streams, rounding)
        if len(held_out):
            ends = weights.ends(embedding=False)  # not kept meanwhile: of a model with a large vocabulary it is GBs
            found = {**ends, **filed.dense(quantised, {"head": head_linear(config)})}
            made.quality = judge(config, held_out, (ends, streams.dense[rows.used :]), (found, streams.made[rows.used :]))
        meter.step(detail="head" if made.quality is None else str(made.quality))
    return made


class _Filed:
    """Layers made and filed, or taken over from the work folder."""

    def __init__(self, weights: DenseWeights, work: Work, made: Made, choices: Mapping[str, Choice]) -> None:
        self._weights, self._work, self._made, self._choices = weights, work, made, choices

    def layer(self, layer: int, streams: Streams, statistics: Mapping[str, Tensor] | None, rounding: Rounding) -> list[Matrix]:
        """Quantise one layer, or take over its file, and move the streams behind it."""
        config, weights = self._weights.config, self._weights.layer(layer, then=layer + 1)
        linears = layer_linears(config, layer)
        packed = self._work.load(self._made.key, layer, linears)
        if packed is None:
            if statistics is None:
                raise ConversionError(f"{self._work.directory}: the statistics of layer {layer} are gone; run the conversion again")
            groups = {linear.key: self._choices[linear.key].groups for linear in linears.values()}
            packed = quantize_layer(config, layer, weights, streams, statistics, groups, rounding)
            self._work.save(self._made.key, layer, packed)
        else:
            self._made.resumed += 1
            streams.advance(config, layer, weights, {**weights, **self.dense(packed, linears)})
        return self._add(packed, linears)

    def head(self, streams: Streams, rounding: Rounding) -> Packed:
        """The same for the head."""
        linear = head_linear(self._weights.config)
        packed = self._work.load(self._made.key, HEAD, {"head": linear})
        if packed is None:
            ends, groups = self._weights.ends(embedding=False), self._choices[linear.key].groups
            packed = {linear.key: quantize_head(self._weights.config, ends, streams, groups, rounding)}
            self._work.save(self._made.key, HEAD, packed)
        else:
            self._made.resumed += 1
        self._add(packed, {"head": linear})
        return packed

    def dense(self, packed: Packed, linears: Mapping[str, Linear]) -> dict[str, Tensor]:
        """What the loader will compute with."""
        device = self._weights.device
        return {f"{line.key}.weight": dense(packed[line.key][0], line.out_features, device) for line in linears.values()}

    def _add(self, packed: Packed, linears: Mapping[str, Linear]) -> list[Matrix]:
        done = [_matrix(linear, *packed[linear.key], self._choices[linear.key]) for linear in linears.values()]
        self._made.matrices += done
        return done


def _matrix(linear: Linear, tensors: Exl2Tensors, loss: float, choice: Choice) -> Matrix:
    shape = (linear.in_features, linear.out_features)
    return Matrix(linear.key, linear.role, linear.layer, *shape, tuple(tensors.groups), choice.predicted_kl, loss)
