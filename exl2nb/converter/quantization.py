"""Quantising one layer: Hessians on what is quantised so far, targets that make up for it, codes. Knows nothing of files or budgets.

Two residual streams run side by side, the dense model's x and the quantised one's y. A linear W sees inputs from y, but should give what
the dense model gives on x: its target is W + strength * H^-1 C W with H = y^T y and C = y^T (x - y) (asymmetric calibration). Within a
layer the inputs of o, gate/up and down come from the matrices already quantised.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from exl2nb.converter.allocation import Allocation, MatrixChoice
from exl2nb.converter.blockwise import Blocks, Learned, Learner, further_rows
from exl2nb.converter.calibration import Rows
from exl2nb.converter.experts import expert_inputs
from exl2nb.converter.hessian import HESSIAN_DAMPING, Factor, Moments, couple_outputs, factorize, role_inputs, row_batches
from exl2nb.converter.measurement import Measurement
from exl2nb.converter.result import Quality, QuantizedMatrix, judge_rows
from exl2nb.converter.rounding import dense_weight, quantize_stored
from exl2nb.converter.streams import Stream, new_stream
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import HEAD_LAYER, Context, Packed, Work, hash_of
from exl2nb.core.errors import ConversionError
from exl2nb.core.options import check_range
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.ops.gpu import fast_products_on_cpu
from exl2nb.quant.exl2 import Exl2Tensors

WORKING_STREAMS = 2  # streams
DESCENT_COST = 0.8  # of one sweep over a layer, beside 3.5 without: demo model on the CPU, 10 to 13 s of processor time beside 50
BLOCK_COST = 2.0  # of one pass of block-wise learning
HELD_BYTES = 2 << 30  # limit for activations of partly run layers; above it a layer is run again from its start for every stage


@dataclass(frozen=True)
class Rounding:
    """How codes are chosen. Each field turns one idea off, or says how far it goes; benchmarks/quality.py says what it is worth.

    strength: of asymmetric calibration, 0 to 1. coupled: columns of a matrix are rounded together. refresh: inputs inside a layer come from
    what is already quantised of it. weighted: tokens count half by how much the prediction depends on them. damping: added to the diagonal
    of a Hessian, as a share of its mean. folded: channels between v and o, up and down are scaled first (converter.equalization).
    """

    strength: float = 0.5
    coupled: bool = True
    refresh: bool = True
    residual: float = 0.5
    weighted: bool = True
    damping: float = HESSIAN_DAMPING
    folded: bool = True

    def __post_init__(self) -> None:
        for name in ("strength", "residual"):
            check_range(name, getattr(self, name), 0, 1, where="Rounding")
        check_range("damping", self.damping, 1e-6, 10, where="Rounding")


def layer_cost(sweeps: int, blocks: Blocks | None) -> float:
    """What one layer takes, in the unit of `pipeline.forecast_costs`."""
    return 3.5 + DESCENT_COST * sweeps + (0 if blocks is None else BLOCK_COST * blocks.passes)


@dataclass
class Streams:
    """Residual streams f32 `(rows, S, H)`: of the dense model, and of the model quantised so far. The first `used` rows calibrate."""

    dense: Stream
    made: Stream
    used: int

    @classmethod
    def of(cls, config: ModelConfig, ends: Mapping[str, Tensor], ids: Tensor, used: int, directory: Path | None = None) -> Streams:
        """Two streams that begin alike.

        Args:
            config: the model. ends: its embedding.
            ids: int `(rows, S)`.
            used: rows that calibrate.
            directory: for streams too large for memory; None: all are in memory.
        """
        shape, device = (*ids.shape, config.hidden_size), ends[f"{config.names.embed}.weight"].device
        dense, made = (new_stream(shape, device, beside=WORKING_STREAMS, directory=directory) for _ in range(WORKING_STREAMS))
        for part in row_batches(config, dense, 0, len(ids)):
            dense[part] = made[part] = reference.embed(config, ends, ids[part].to(device))
        return cls(dense, made, used)

    def parts(self, config: ModelConfig) -> list[slice]:
        """All rows in batches, none with rows on both sides of `used`: a resumed run computes with the same shapes, so the same bits."""
        return [*row_batches(config, self.dense, 0, self.used), *row_batches(config, self.dense, self.used, len(self.dense))]

    def move(self, part: slice, dense: Tensor, made: Tensor) -> None:
        """Replace some rows, in place: memory does not hold two copies."""
        self.dense[part], self.made[part] = dense, made

    def advance_made(self, config: ModelConfig, layer: int, made: Mapping[str, Tensor]) -> None:
        """Run the quantised model's alone through a layer."""
        for part in self.parts(config):
            self.made[part] = reference.block(config, layer, made, self.made[part])

    def advance(self, config: ModelConfig, layer: int, dense: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
        """Run both through a layer that is quantised already."""
        for part in self.parts(config):
            x, y = (reference.block(config, layer, w, stream[part]) for w, stream in ((dense, self.dense), (made, self.made)))
            self.move(part, x, y)


def _held_limit(x: Stream) -> int:
    """Limit in bytes for activations of partly run layers on the device of x: HELD_BYTES, at most a sixth of a GPU."""
    if not x.is_cuda:
        return HELD_BYTES
    whole = torch.cuda.get_device_properties(x.device).total_memory * torch.cuda.get_per_process_memory_fraction(x.device)
    return min(HELD_BYTES, int(whole / 6))


class _LayerRun:
    """Runs both streams' calibration rows through one layer, stage by stage (reference.stages); every batch pauses between stages.

    dense, made: weights of the two; the latter may change between stages.
    """

    def __init__(self, config: ModelConfig, layer: int, dense: Mapping[str, Tensor], made: Mapping[str, Tensor], streams: Streams) -> None:
        self._config, self._layer, self._weights, self._streams = config, layer, (dense, made), streams
        self._parts = row_batches(config, streams.dense, 0, streams.used)
        wide = max(config.hidden_size, config.q_size, *(linear.in_features for linear in layer_linears(config, layer).values()))
        held = 2 * 4 * streams.used * streams.dense.shape[1] * (config.hidden_size + wide)
        self._apart: dict[str, Tensor] = {}
        self._running = [self._start(part) for part in self._parts] if held <= _held_limit(streams.dense) else None
        self._stage = 0

    def _start(self, part: slice) -> tuple[reference.Steps, reference.Steps]:
        def step(at: int, name: str) -> reference.Steps:
            keep = functools.partial(self._apart.__setitem__, name)
            return reference.steps(self._config, self._layer, self._weights[at], self._rows(part)[at], residual=keep)

        return step(0, "dense"), step(1, "made")

    def _rows(self, part: slice) -> tuple[Tensor, Tensor]:
        return self._streams.dense[part], self._streams.made[part]

    def stage(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Per batch: its rows, and what the linears of the next stage read, in the dense model and in the quantised one; before o and down
        also what the quantised stream lacks that their outputs are added to.
        """
        for place, part in enumerate(self._parts):
            if self._running is not None:
                pair = self._running[place]
            else:
                pair = self._start(part)
                for running in pair:
                    for _ in range(self._stage):
                        next(running)
            self._apart.clear()
            x, y = next(pair[0]), next(pair[1])
            yield part, x, y, self._apart["dense"] - self._apart["made"] if self._apart else None
        self._stage += 1

    def finish(self) -> None:
        """Advance the streams, all rows, past the layer."""
        for place, part in enumerate(self._streams.parts(self._config)):
            steps = self._running[place] if self._running is not None and place < len(self._parts) else self._start(part)
            x, y = (reference.finish(running) for running in steps)
            self._streams.move(part, x, y)

    def finish_dense(self) -> None:
        """Advance the dense stream alone; the quantised one stays before the layer."""
        for place, part in enumerate(self._streams.parts(self._config)):
            held = self._running is not None and place < len(self._parts)
            running = self._running[place] if self._running is not None and held else self._start(part)
            self._streams.dense[part] = reference.finish(running[0])
        self._running = None  # what the quantised one has held is no longer needed


def quantize_layer(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Tensor],
    streams: Streams,
    statistics: Mapping[str, Tensor],
    groups: Mapping[str, Sequence[tuple[int, int]]],
    rounding: Rounding,
    sweeps: int = 0,
    learner: Learner | None = None,
) -> tuple[Packed, Learned | None]:
    """Quantise all linears of one layer.

    Args:
        streams: before the layer; afterwards after it.
        statistics: token weights ("layer.input") and couplings ("key.coupling") of the layer.
        groups: key -> (bits, rows) of each linear.
        sweeps: of coordinate descent over each matrix.
        learner: block-wise learning of the layer afterwards; None: none.

    Returns:
        Key -> tensors and loss; and what was learned.
    """
    linears = layer_linears(config, layer)
    names = role_inputs(linears)
    current, packed = dict(weights), {}

    def make(name: str, factor: Factor, cross: Tensor | None, lacking: Tensor | None = None) -> None:
        for linear in (linears[role] for role, source in names.items() if source == name):
            weight = weights[f"{linear.key}.weight"]
            products = statistics.get(f"{linear.key}.coupling") if rounding.coupled else None
            coupling = None if products is None else couple_outputs(products.to(weight.device))
            bias = weights[f"{linear.key}.bias"].half() if linear.bias else None
            stored = factor.stored(weight, cross, rounding.strength, lacking)
            packed[linear.key] = quantize_stored(stored, factor, groups[linear.key], bias=bias, coupling=coupling, sweeps=sweeps)
            current[f"{linear.key}.weight"] = dense_weight(packed[linear.key][0], linear.out_features, weight.device)

    seen = current if rounding.refresh else dict(weights)
    walk, routed = _LayerRun(config, layer, weights, seen, streams), []
    for roles in reference.stages(config, layer):
        if roles == ("router",):
            routed = [(x.detach(), y.detach()) for _, x, y, _ in walk.stage()]
            continue
        name = names[roles[0]]
        tokens = statistics.get(f"{layer}.{name}") if rounding.weighted else None
        cross, residual = bool(rounding.strength), 0.0 if config.post_norm else rounding.residual / config.residual_scale
        moments = _stage_moments(walk.stage(), tokens, streams.dense.shape[1], cross=cross, residual=bool(residual))
        factor = factorize(moments.pop("found"), damping=rounding.damping, name=f"layer {layer}, input of {name}")
        lacking = moments.pop("residual", None)
        make(name, factor, moments.pop("cross", None), None if lacking is None else residual * lacking)
    if routed:
        both = torch.cat([x for x, _ in routed]), torch.cat([y for _, y in routed])
        for name, factor, cross in expert_inputs(config, layer, (weights, seen), both, statistics, cross=bool(rounding.strength)):
            make(name, factor, cross)
    packed = {linear.key: packed[linear.key] for linear in linears.values()}
    if learner is not None:
        walk.finish_dense()
        metric = learner.metric(layer, statistics, coupled=rounding.coupled, weighted=rounding.weighted)
        learned = learner.learn(layer, weights, packed, streams.made, streams.dense, metric)
        streams.advance_made(config, layer, reconstruct_layer(learned.packed, linears, learned.vectors, streams.dense.device))
        return learned.packed, learned
    if rounding.refresh:
        walk.finish()
    else:
        streams.advance(config, layer, weights, current)
    return packed, None


def reconstruct_layer(
    packed: Packed, linears: Mapping[str, Linear], vectors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """What the loader will compute a layer with."""
    found = {name: tensor.to(device).float() for name, tensor in vectors.items()}
    for line in linears.values():
        matrix = packed[line.key][0]
        found[f"{line.key}.weight"] = dense_weight(matrix, line.out_features, device)
        if matrix.bias is not None:
            found[f"{line.key}.bias"] = matrix.bias[: line.out_features].to(device).float()
    return found


def _stage_moments(
    stage: Iterable[tuple[slice, Tensor, Tensor, Tensor | None]], tokens: Tensor | None, length: int, *, cross: bool, residual: bool
) -> dict[str, Tensor]:
    """The Hessian "found" of what the quantised model reads and, where wanted, its "cross" moments with what the dense one reads more, and
    its moments with what the stream lacks, "residual".

    tokens: what each token counts, f32 `(rows * length,)`.
    """
    moments = Moments()
    for part, x, y, lacking in stage:
        weight = None if tokens is None else tokens[part.start * length : part.stop * length].to(y.device)
        moments.add("found", y, weight)
        if cross:
            moments.add_cross("cross", y, x - y, weight)
        if residual and lacking is not None:
            moments.add_cross("residual", y, lacking, weight)
    return moments.hessians()


def quantize_head(
    config: ModelConfig, ends: dict[str, Tensor], streams: Streams, groups: Sequence[tuple[int, int]], rounding: Rounding, sweeps: int = 0
) -> tuple[Exl2Tensors, float]:
    """Quantise the head's matrix, which is taken out of `ends`, on the streams after the last layer."""
    moments = Moments()
    for part in row_batches(config, streams.dense, 0, streams.used):
        wanted, found = (reference.final_norm(config, ends, stream[part]) for stream in (streams.dense, streams.made))
        moments.add("head", found)
        if rounding.strength:
            moments.add_cross("cross", found, wanted - found)
    hessians = moments.hessians()
    factor = factorize(hessians["head"], damping=rounding.damping, name="input of the head")
    stored = factor.stored(ends.pop(f"{head_linear(config).key}.weight"), hessians.get("cross"), rounding.strength)
    return quantize_stored(stored, factor, groups, sweeps=sweeps)


@dataclass
class QuantizedLayers:
    """What was quantised.

    key: of its files. matrices: in running order, the head last. resumed: layers taken over from an earlier run. vectors: norms that have
    learned, by name, f16. learned: what block-wise learning found in each layer.
    """

    key: str
    matrices: list[QuantizedMatrix] = field(default_factory=list)
    resumed: int = 0
    quality: Quality | None = None
    vectors: dict[str, Tensor] = field(default_factory=dict)
    learned: list[Learned] = field(default_factory=list)


def quantize_model(
    context: Context,
    rows: Rows,
    measurement: Measurement,
    allocation: Allocation,
    statistics: str,
    rounding: Rounding,
    sweeps: int = 0,
    blocks: Blocks | None = None,
) -> QuantizedLayers:
    """Quantise every layer and the head into the work folder; those that are there already are taken over.

    Args:
        rows: calibration rows, of which those for sensitivity are not used, and those for the report.
        statistics: key of the statistics on these rows.
        sweeps: of coordinate descent over each matrix.
        blocks: how every layer learns afterwards; None: it does not.
    """
    held_out, weights, work, config = rows.report, context.weights, context.work, context.weights.config
    ids, judged = torch.cat([rows.hessians, held_out]), slice(rows.used, rows.used + len(held_out))
    parts: list[object] = [statistics, rounding, list(allocation.groups().items()), *([sweeps] if sweeps else [])]
    if blocks is not None:
        further = further_rows(rows, blocks)
        parts += [blocks, weights.device.type, further.numpy().tobytes()]
        ids = torch.cat([ids, further])
    made, layers = QuantizedLayers(hash_of(*parts)), config.num_layers
    streams = Streams.of(config, weights.ends(), ids, rows.used, work.directory)
    with fast_products_on_cpu(weights.device), context.meter("quantize", total=layers + 1, unit="layers") as meter:
        rounded = layer_cost(sweeps, None) / layer_cost(sweeps, blocks)

        def learned(share: float, detail: str) -> None:
            context.check()
            meter.at(round(len(made.learned) + rounded + (1 - rounded) * share, 2), detail=f"layer {len(made.learned)}, {detail}")

        learner = None if blocks is None else Learner(config, blocks, rows.used, judged.stop, len(rows.choosing), len(ids), learned)
        filed = _Filed(weights, work, made, {c.key: c for c in allocation.choices}, sweeps, learner)
        for layer in range(layers):
            context.check()
            known = measurement.statistics if measurement.key == statistics else {}
            done = filed.layer(layer, streams, known or work.load_statistics(statistics, layer), rounding)
            meter.at(layer + 1, detail=f"layer {layer}", bpw=[round(m.bpw, 3) for m in done])
        context.check()
        quantised = filed.head(streams, rounding)
        if len(held_out):
            ends = weights.ends(embedding=False)  # loaded again: for a large vocabulary it takes GBs
            found = {**ends, **filed.dense(quantised, {"head": head_linear(config)})}
            made.quality = judge_rows(config, held_out, (ends, streams.dense[judged]), (found, streams.made[judged]))
        meter.step(detail="head" if made.quality is None else str(made.quality))
    return made


class _Filed:
    """Layers made and filed, or taken over from the work folder."""

    def __init__(
        self,
        weights: DenseWeights,
        work: Work,
        made: QuantizedLayers,
        choices: Mapping[str, MatrixChoice],
        sweeps: int,
        learner: Learner | None,
    ) -> None:
        self._weights, self._work, self._made, self._choices, self._sweeps = weights, work, made, choices, sweeps
        self._learner = learner

    def layer(self, layer: int, streams: Streams, statistics: Mapping[str, Tensor] | None, rounding: Rounding) -> list[QuantizedMatrix]:
        """Quantise one layer, or take over its file, and advance the streams past it."""
        config, weights = self._weights.config, self._weights.layer(layer, then=layer + 1)
        linears = layer_linears(config, layer)
        packed, learned = self._work.load(self._made.key, layer, linears), None
        if packed is not None and self._learner is not None:
            learned = self._learner.of(layer, packed, self._work.load_more(self._made.key, layer))
        if packed is None:
            if statistics is None:
                raise ConversionError(f"{self._work.directory}: the statistics of layer {layer} are gone; run the conversion again")
            groups = {linear.key: self._choices[linear.key].groups for linear in linears.values()}
            packed, learned = quantize_layer(config, layer, weights, streams, statistics, groups, rounding, self._sweeps, self._learner)
            self._work.save(self._made.key, layer, packed, {} if learned is None else learned.filed())
        else:
            self._made.resumed += 1
            vectors = {} if learned is None else learned.vectors
            device = self._weights.device
            streams.advance(config, layer, weights, {**weights, **reconstruct_layer(packed, linears, vectors, device)})
        if learned is not None:
            self._made.learned.append(learned)
            self._made.vectors |= learned.vectors
        return self._add(packed, linears)

    def head(self, streams: Streams, rounding: Rounding) -> Packed:
        """The same for the head."""
        linear = head_linear(self._weights.config)
        packed = self._work.load(self._made.key, HEAD_LAYER, {"head": linear})
        if packed is None:
            ends, groups = self._weights.ends(embedding=False), self._choices[linear.key].groups
            packed = {linear.key: quantize_head(self._weights.config, ends, streams, groups, rounding, self._sweeps)}
            self._work.save(self._made.key, HEAD_LAYER, packed)
        else:
            self._made.resumed += 1
        self._add(packed, {"head": linear})
        return packed

    def dense(self, packed: Packed, linears: Mapping[str, Linear]) -> dict[str, Tensor]:
        """What the loader will compute with."""
        device = self._weights.device
        return {f"{line.key}.weight": dense_weight(packed[line.key][0], line.out_features, device) for line in linears.values()}

    def _add(self, packed: Packed, linears: Mapping[str, Linear]) -> list[QuantizedMatrix]:
        done = [_quantized_matrix(linear, *packed[linear.key], self._choices[linear.key]) for linear in linears.values()]
        self._made.matrices += done
        return done


def _quantized_matrix(linear: Linear, tensors: Exl2Tensors, loss: float, choice: MatrixChoice) -> QuantizedMatrix:
    shape = (linear.in_features, linear.out_features)
    return QuantizedMatrix(linear.key, linear.role, linear.layer, *shape, tuple(tensors.groups), choice.predicted_kl, loss)
