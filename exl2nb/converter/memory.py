"""The most memory that a conversion takes, before it begins: one layer at a time, whatever the model's depth. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass

from exl2nb.converter.hessian import ROWS_PER_BATCH, block_of, input_of
from exl2nb.converter.layers import HELD_BYTES
from exl2nb.converter.measuring import HELD_STATISTICS
from exl2nb.converter.sensitivity import STREAM_BYTES, kept_streams
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, head_linear, layer_linears

FLOAT, DOUBLE = 4, 8
PER_WEIGHT = 24  # bytes that rounding takes for each weight of one matrix: stored order, working copy, codes
SLACK = 1.1  # what an allocator does not give back at once


@dataclass(frozen=True)
class Planned:
    """Bytes at the worst moment of each stage, the interpreter and its libraries (some 0.4 GB) not counted.

    held: throughout: embedding, head, statistics. sweep, measure, quantize: beside that.
    """

    held: int
    sweep: int
    measure: int
    quantize: int

    @property
    def nbytes(self) -> int:
        """The bound."""
        return int(SLACK * (self.held + max(self.sweep, self.measure, self.quantize)))


def planned(config: ModelConfig, *, rows: int, length: int, report_rows: int = 0) -> Planned:
    """What a conversion on the CPU will take.

    Args:
        config: the model.
        rows, length: calibration rows and tokens per row.
        report_rows: rows for the report.
    """
    length = min(length, config.max_position_embeddings)
    layers = [list(layer_linears(config, layer).values()) for layer in range(config.num_layers)]
    weights = max(sum(_weights(linear) for linear in layer) for layer in layers)
    linears = [linear for layer in layers for linear in layer] + [head_linear(config)]
    widest, largest = max(linear.in_features for linear in linears), max(map(_weights, linears))
    stream = FLOAT * rows * length * config.hidden_size
    both = 2 * FLOAT * (rows + report_rows) * length * config.hidden_size
    ends = 2 * FLOAT * config.vocab_size * config.hidden_size
    logits = 8 * FLOAT * length * config.vocab_size
    statistics = sum(_statistics(linear, rows * length) for layer in layers for linear in layer)
    inputs = max(sum(DOUBLE * size * size for size in _inputs(layer).values()) for layer in layers)
    products = max(sum(DOUBLE * linear.out_features * _block(linear) for linear in layer) for layer in layers)
    square, rounding = DOUBLE * widest * widest, PER_WEIGHT * largest
    batch = ROWS_PER_BATCH * length * FLOAT * _floats(config)
    waiting = 2 * FLOAT * rows * length * (config.hidden_size + max(widest, config.q_size))
    kept = kept_streams(stream, config.num_layers, STREAM_BYTES)
    return Planned(
        held=ends + FLOAT * largest + min(statistics, HELD_STATISTICS) + statistics // len(layers),
        sweep=(kept + 4) * stream + FLOAT * weights + inputs + products + square + max(2 * batch, logits),
        measure=(kept + 2) * stream + FLOAT * weights + inputs + products + 4 * square + rounding,
        quantize=3 * both
        + 3 * FLOAT * weights
        + (waiting if waiting <= HELD_BYTES else batch)
        + batch
        + 6 * square
        + rounding
        + 2 * logits,
    )


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


def _floats(config: ModelConfig) -> int:
    """Numbers per token that one layer's forward and backward pass keep."""
    inner = config.intermediate_size
    for layer in range(config.num_layers):
        moe = config.experts(layer)
        if moe is not None:
            inner = max(inner, moe.top_k * moe.intermediate_size + moe.shared_size)
    return 20 * config.hidden_size + 14 * config.q_size + 12 * inner
