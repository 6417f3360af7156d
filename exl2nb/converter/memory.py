"""The most memory that a conversion takes, before it begins: one layer at a time, whatever the model's depth. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass

from exl2nb.converter.hessian import MOST_IN_F64, ROWS_PER_BATCH, block_of, gpu_rows, input_of
from exl2nb.converter.layers import HELD_BYTES
from exl2nb.converter.measuring import HELD_STATISTICS
from exl2nb.converter.polish import LENGTH, ROUNDED_ON, ROWS
from exl2nb.converter.sensitivity import STREAM_BYTES, kept_streams
from exl2nb.converter.tensor_cores import PIECE
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.ops.gptq_blocks import COPIES_BYTES

FLOAT, DOUBLE = 4, 8
PER_WEIGHT = 20  # bytes that rounding takes for each weight of one matrix: shifted targets, stored orders, working copy, codes
PROBED, PACKED = 8, 3  # bytes of a weight while plans are tried: dense and as one plan has it; on the host, in three ways
TRIED = 16  # plans at once
SLACK = 1.1  # what an allocator does not give back at once
SPLIT = 20  # bytes per number of a factor while it is split (tensor_cores)


@dataclass(frozen=True)
class Planned:
    """Bytes at the worst moment of each stage, the interpreter and its libraries (some 0.4 GB) not counted.

    held: throughout: embedding, head, statistics. sweep, measure, polish, quantize: beside that.
    """

    held: int
    sweep: int
    measure: int
    polish: int
    quantize: int

    @property
    def nbytes(self) -> int:
        """The bound."""
        return int(SLACK * (self.held + max(self.sweep, self.measure, self.polish, self.quantize)))


def planned(config: ModelConfig, *, rows: int, length: int, report_rows: int = 0) -> Planned:
    """What a conversion on the CPU will take.

    Args:
        config: the model.
        rows, length: calibration rows and tokens per row.
        report_rows: rows for the report.
    """
    length = min(length, config.max_position_embeddings)
    layers, head = [list(layer_linears(config, layer).values()) for layer in range(config.num_layers)], _weights(head_linear(config))
    weights = max(sum(map(_weights, layer)) for layer in layers)
    largest = max(_weights(linear) for layer in layers for linear in layer)
    widest = max(linear.in_features for layer in layers for linear in layer)
    square, stream = DOUBLE * widest * widest, FLOAT * rows * length * config.hidden_size
    streams = 2 * FLOAT * (rows + report_rows) * length * config.hidden_size
    logits = 8 * FLOAT * length * config.vocab_size
    statistics = [sum(_statistics(linear, rows * length) for linear in layer) for layer in layers]
    inputs = max(sum(DOUBLE * size * size for size in _inputs(layer).values()) for layer in layers)
    products = max(sum(DOUBLE * linear.out_features * _block(linear) for linear in layer) for layer in layers)
    kept = (kept_streams(stream, config.num_layers) + 2) * stream
    forward, backward = (ROWS_PER_BATCH * length * FLOAT * count for count in _floats(config))
    waiting = 2 * FLOAT * rows * length * (config.hidden_size + max(widest, config.q_size))
    return Planned(
        held=2 * FLOAT * config.vocab_size * config.hidden_size + min(sum(statistics), HELD_STATISTICS) + max(statistics),
        sweep=kept + max(logits, FLOAT * weights + inputs + products + square + backward),
        measure=kept + max(PER_WEIGHT * head, FLOAT * weights + inputs + products + 4 * square + PER_WEIGHT * largest),
        polish=0
        if _sparse(config)
        else max(
            PER_WEIGHT * head + logits,
            (PROBED + PACKED) * weights + inputs + 4 * square + PER_WEIGHT * largest,
        )
        + TRIED * 2 * FLOAT * ROWS * LENGTH * config.hidden_size
        + 2 * FLOAT * ROUNDED_ON * length * config.hidden_size,
        quantize=streams
        + max(
            2 * logits + PER_WEIGHT * head,
            (2 * FLOAT + 1) * weights + (waiting if waiting <= HELD_BYTES else 0) + 2 * forward + 6 * square + PER_WEIGHT * largest,
        ),
    )


def planned_on_gpu(config: ModelConfig, *, rows: int, length: int, report_rows: int = 0) -> Planned:
    """What a conversion on a GPU will take of it, torch's and the driver's own (some 0.5 GB) not counted.

    Layers that wait half-run are left out: they do so only where a sixth of the GPU holds them (layers._room).

    Args:
        config: the model.
        rows, length: calibration rows and tokens per row.
        report_rows: rows for the report.
    """
    length = min(length, config.max_position_embeddings)
    layers = [list(layer_linears(config, layer).values()) for layer in range(config.num_layers)]
    head = FLOAT * _weights(head_linear(config))
    weights = FLOAT * max(sum(map(_weights, layer)) for layer in layers)
    largest = FLOAT * max(_weights(linear) for layer in layers for linear in layer)
    widest = max(linear.in_features for layer in layers for linear in layer)
    square, moment = widest * widest, widest * widest * (DOUBLE if widest <= MOST_IN_F64 else FLOAT)
    inputs = max(sum(size * size * (DOUBLE if size <= MOST_IN_F64 else FLOAT) for size in _inputs(layer).values()) for layer in layers)
    products = max(sum(2 * DOUBLE * linear.out_features * _block(linear) for linear in layer) for layer in layers)
    stream = FLOAT * rows * length * config.hidden_size
    streams, held = 2 * FLOAT * (rows + report_rows) * length * config.hidden_size, 2 * stream
    if stream * config.num_layers <= STREAM_BYTES:
        held += stream * config.num_layers
    batch = min(rows, gpu_rows(config, length))
    forward, backward = (batch * length * FLOAT * count for count in _floats(config))
    backward += 5 * FLOAT * batch * config.num_heads * length * length  # scores
    logits = 8 * FLOAT * length * config.vocab_size
    pieces = SPLIT * min(PIECE, max(square, _weights(head_linear(config))))
    rounding = max(2 * DOUBLE * square, 2 * FLOAT * square + pieces + 6 * largest)
    return Planned(
        held=0,
        sweep=held + max(2 * head + stream + logits, weights + inputs + products + backward) + pieces,
        measure=held + max(2 * head + max(head, COPIES_BYTES) + pieces, weights + inputs + max(rounding, moment + COPIES_BYTES)),
        polish=0
        if _sparse(config)
        else max(3 * head + pieces + logits, weights * PROBED // FLOAT + inputs + max(rounding, forward))
        + TRIED * 2 * FLOAT * ROWS * LENGTH * config.hidden_size
        + 2 * FLOAT * ROUNDED_ON * length * config.hidden_size,
        quantize=streams + max(7 * head + pieces, 2 * weights + moment + max(FLOAT * square + moment + forward + pieces, rounding)),
    )


def _sparse(config: ModelConfig) -> bool:
    """Whether it has experts; then no plans are tried."""
    return any(config.experts(layer) is not None for layer in range(config.num_layers))


def _weights(linear: Linear) -> int:
    return linear.in_features * linear.out_features


def _block(linear: Linear) -> int:
    return 1 if "." in linear.role else block_of(linear.out_features)


def _statistics(linear: Linear, tokens: int) -> int:
    """Products of gradients and, at most, a weight per token."""
    return FLOAT * (linear.out_features * _block(linear) + (0 if "." in linear.role else tokens))


def _inputs(layer: list[Linear]) -> dict[str, int]:
    """Name -> size of the inputs whose Hessians a sweep keeps at the same time."""
    sizes = {linear.role: linear.in_features for linear in layer}
    return {name: sizes[name] for name in input_of(sizes).values()}


def _floats(config: ModelConfig) -> tuple[int, int]:
    """Numbers per token that one layer's forward pass holds at once, and that a forward and backward pass keep."""
    inner = config.intermediate_size
    for layer in range(config.num_layers):
        moe = config.experts(layer)
        if moe is not None:
            inner = max(inner, moe.top_k * moe.intermediate_size + moe.shared_size)
    return 8 * config.hidden_size + 6 * config.q_size + 4 * inner, 20 * config.hidden_size + 14 * config.q_size + 12 * inner
