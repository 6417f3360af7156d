"""The most memory that a conversion takes, before it begins: one layer at a time, whatever the model's depth. Knows nothing of files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from exl2nb.converter.hessian import AT_ONCE, MOST_IN_F64, ROWS_PER_BATCH, block_of, gpu_rows, input_of
from exl2nb.converter.pipeline import HELD_STATISTICS
from exl2nb.converter.polish import LENGTH, ROUNDED_ON, ROWS
from exl2nb.converter.quantization import HELD_BYTES
from exl2nb.converter.quantization import WORKING as BOTH
from exl2nb.converter.sensitivity import DISK_BYTES, HOST_BYTES, WORKING, kept_streams
from exl2nb.converter.streams import STREAM_BYTES, in_memory
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.ops.bf16x3 import PIECE, RESULT
from exl2nb.ops.gptq import COPIES_BYTES, SPAN_ROWS

FLOAT, DOUBLE = 4, 8
PER_WEIGHT = 20  # bytes that rounding takes for each weight of one matrix: shifted targets, stored orders, working copy, codes
PER_HEAD_WEIGHT = 10  # the same for the head, whose columns keep their order, without targets
FACTOR = 20  # bytes per number of a Hessian while it is factored, itself not counted
PROBED, PACKED = 8, 3  # bytes of a weight while plans are tried: dense and as one plan has it; on the host, in three ways
TRIED = 16  # plans at once
SLACK = 1.1  # what an allocator does not give back at once
SPLIT = 20  # bytes per number of a factor while it is split (ops.bf16x3)


@dataclass(frozen=True)
class Planned:
    """Bytes at the worst moment of each stage, the interpreter and its libraries (some 0.4 GB) not counted.

    held: throughout: statistics. sweep, measure, polish, quantize: beside that. disk: of streams in files of the work folder.
    """

    held: int
    sweep: int
    measure: int
    polish: int
    quantize: int
    disk: int = 0

    @property
    def nbytes(self) -> int:
        """The bound."""
        return int(SLACK * (self.held + max(self.sweep, self.measure, self.polish, self.quantize)))


def planned(config: ModelConfig, *, rows: int, length: int, report_rows: int = 0, polish: bool = False) -> Planned:
    """What a conversion on the CPU will take.

    Args:
        config: the model.
        rows, length: calibration rows and tokens per row.
        report_rows: rows for the report.
        polish: whether plans are tried.
    """
    length = min(length, config.max_position_embeddings)
    layers, head = [list(layer_linears(config, layer).values()) for layer in range(config.num_layers)], _weights(head_linear(config))
    weights = max(sum(map(_weights, layer)) for layer in layers)
    largest = max(_weights(linear) for layer in layers for linear in layer)
    widest = max(linear.in_features for layer in layers for linear in layer)
    factor, moment = FACTOR * widest * widest, _moment(widest)
    logits, judged = (count * FLOAT * length * config.vocab_size for count in (8, 6))
    statistics = [sum(_statistics(linear, rows * length) for linear in layer) for layer in layers]
    inputs = max(sum(map(_moment, _inputs(layer).values())) for layer in layers)
    products = max(sum(DOUBLE * linear.out_features * _block(linear) for linear in layer) for layer in layers)
    sweep, quantize = (rows, length, config.hidden_size), (rows + report_rows, length, config.hidden_size)
    each, kept, disk = _kept(sweep, config.num_layers, STREAM_BYTES)
    forward, backward = (ROWS_PER_BATCH * length * FLOAT * count for count in _floats(config))
    held_streams = 2 * FLOAT * rows * length * (config.hidden_size + max(widest, config.q_size))
    routed = 4 * FLOAT * rows * length * config.hidden_size if _sparse(config) else 0
    ends, rounded = 2 * FLOAT * head, (FLOAT + PER_HEAD_WEIGHT) * head + FACTOR * config.hidden_size**2
    return Planned(
        held=min(sum(statistics), HELD_STATISTICS) + max(statistics),
        sweep=kept
        + max(
            each + ends,
            2 * each + FLOAT * head + logits,
            3 * each + FLOAT * weights + forward,
            2 * each + FLOAT * weights + inputs + products + FLOAT * widest * widest + backward,
        ),
        measure=kept + each + max(rounded, FLOAT * weights + inputs + products + factor + PER_WEIGHT * largest),
        polish=0
        if not polish or _sparse(config)
        else max(rounded + logits, (PROBED + PACKED) * weights + inputs + factor + PER_WEIGHT * largest)
        + TRIED * 2 * FLOAT * ROWS * LENGTH * config.hidden_size
        + 2 * FLOAT * ROUNDED_ON * length * config.hidden_size,
        quantize=BOTH * _in_memory(quantize, BOTH)
        + max(
            ends,
            FLOAT * head + max(rounded, PER_HEAD_WEIGHT * head, FLOAT * head + judged),
            (2 * FLOAT + 1) * weights
            + (held_streams if held_streams <= HELD_BYTES else 0)
            + routed
            + max(2 * forward + 3 * moment, moment + factor, PER_WEIGHT * largest + FLOAT * widest * widest),
        ),
        disk=max(disk, BOTH * (FLOAT * math.prod(quantize) - _in_memory(quantize, BOTH))),
    )


def planned_on_gpu(config: ModelConfig, *, rows: int, length: int, report_rows: int = 0, polish: bool = False) -> Planned:
    """What a conversion on a GPU will take of it, beside the driver and the libraries (0.8 GiB on an H200) and what torch keeps for later.

    Partly run layers are not counted: they are held only where a sixth of the GPU is enough for them (quantization._held_limit).

    Args:
        config: the model.
        rows, length: calibration rows and tokens per row.
        report_rows: rows for the report.
        polish: whether plans are tried.
    """
    length = min(length, config.max_position_embeddings)
    layers = [list(layer_linears(config, layer).values()) for layer in range(config.num_layers)]
    head = FLOAT * _weights(head_linear(config))
    weights = FLOAT * max(sum(map(_weights, layer)) for layer in layers)
    largest = FLOAT * max(_weights(linear) for layer in layers for linear in layer)
    widest = max(linear.in_features for layer in layers for linear in layer)
    square, moment = widest * widest, _moment(widest)
    inputs = max(sum(map(_moment, _inputs(layer).values())) for layer in layers)
    products = max(sum(2 * DOUBLE * linear.out_features * _block(linear) for linear in layer) for layer in layers)
    sweep, quantize = (rows, length, config.hidden_size), (rows + report_rows, length, config.hidden_size)
    each, held, disk = _kept(sweep, config.num_layers, HOST_BYTES)
    if FLOAT * math.prod(sweep) * config.num_layers > STREAM_BYTES:
        held = 0  # those are on the host
    batch = min(rows, gpu_rows(config, length))
    forward, backward = (batch * length * FLOAT * count for count in _floats(config))
    backward += 5 * FLOAT * batch * config.num_heads * length * length  # scores
    logits = 8 * FLOAT * length * config.vocab_size
    pieces = SPLIT * min(PIECE, max(square, _weights(head_linear(config))))
    rounding = max(2 * DOUBLE * square, 2 * FLOAT * square + pieces + 6 * largest)
    narrow = max(SPAN_ROWS, min(linear.in_features for layer in layers for linear in layer))
    copies = COPIES_BYTES + 2 * SPAN_ROWS * COPIES_BYTES // narrow + (FLOAT + SPLIT) * RESULT  # with errors of a span, and what they change
    # the head: itself, as rounding wants it and what is shifted at a time; that, the copy that is changed, codes, errors of a span
    shifted = 2 * head + 4 * min(FLOAT * AT_ONCE, head) + pieces
    errors = 2 * FLOAT * SPAN_ROWS * config.vocab_size + (FLOAT + SPLIT) * RESULT
    rounded = max(shifted, 2 * head + head // 2 + errors)
    return Planned(
        held=0,
        sweep=held
        + max(
            each + 2 * head,
            2 * each + head + logits,
            3 * each + weights + forward,
            2 * each + weights + inputs + products + backward,
        )
        + pieces,
        measure=held + each + max(2 * head + max(head, copies) + pieces, weights + inputs + max(rounding, moment + copies)),
        polish=0
        if not polish or _sparse(config)
        else max(3 * head + pieces + logits, weights * PROBED // FLOAT + inputs + max(rounding, forward))
        + TRIED * 2 * FLOAT * ROWS * LENGTH * config.hidden_size
        + 2 * FLOAT * ROUNDED_ON * length * config.hidden_size,
        quantize=BOTH * _in_memory(quantize, BOTH)
        + max(rounded, 2 * head + max(head // 2, logits), 2 * weights + moment + max(FLOAT * square + moment + forward + pieces, rounding)),
        disk=disk,
    )


def _in_memory(shape: tuple[int, int, int], count: int) -> int:
    """Bytes of memory that one of the streams a stage works on takes: all of it or, in a file, none."""
    return FLOAT * math.prod(shape) if in_memory(shape, count) else 0


def _kept(shape: tuple[int, int, int], layers: int, room: int) -> tuple[int, int, int]:
    """Of a sweep: bytes of memory of a stream it works on, and of all those it keeps, for which there is `room`; bytes in files."""
    stream, each = FLOAT * math.prod(shape), _in_memory(shape, WORKING)
    every = kept_streams(stream, layers, room + DISK_BYTES) * stream
    kept = min(every, room // stream * stream) if each else 0
    return each, kept, every - kept + (0 if each else WORKING * stream)


def _moment(size: int) -> int:
    """Bytes of a sum of products of inputs."""
    return size * size * (DOUBLE if size <= MOST_IN_F64 else FLOAT)


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
