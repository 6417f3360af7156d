"""The most memory that a conversion takes, before it begins: one layer at a time, whatever the model's depth. Knows nothing of files."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from exl2nb.converter.blockwise import needed_bytes as block_bytes
from exl2nb.converter.hessian import AT_ONCE, MOST_IN_F64, ROWS_PER_BATCH, coupled_block, gpu_rows, role_inputs
from exl2nb.converter.pipeline import HELD_STATISTICS
from exl2nb.converter.polish import JUDGED_ROWS, JUDGED_TOKENS, ROUNDED_ON
from exl2nb.converter.quantization import HELD_BYTES
from exl2nb.converter.quantization import WORKING_STREAMS as BOTH
from exl2nb.converter.sensitivity import DISK_BYTES, HOST_BYTES, WORKING_STREAMS, kept_streams
from exl2nb.converter.streams import STREAM_BYTES, fits_in_memory
from exl2nb.converter.tuning import VALIDATION_ROWS, needed_bytes
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.ops.bf16x3 import RESULT_NUMBERS, SPLIT_NUMBERS
from exl2nb.ops.gptq import COPIES_BYTES, SPAN_ROWS

F32_BYTES = 4
F64_BYTES = 8
PER_WEIGHT = 20  # bytes that rounding takes for each weight of one matrix: shifted targets, stored orders, working copy, codes
PER_DESCENT = 44  # the same while coordinate descent goes over it: targets, codes as numbers, a copy of them, products
PER_HEAD_WEIGHT = 10  # the same for the head, whose columns keep their order, without targets
FACTOR_BYTES = 20  # bytes per number of a Hessian while it is factored, itself not counted
PROBE_BYTES_PER_WEIGHT = 8  # while allocations are tried: dense and as one allocation has it
PACKED_BYTES_PER_WEIGHT = 3  # on the host, in three ways
CONCURRENT_ALLOCATIONS = 16  # allocations at once
ALLOCATOR_SLACK = 1.1  # memory that the allocator has not returned yet
SPLIT_BYTES = 20  # bytes per number of a factor while it is split (ops.bf16x3)


@dataclass(frozen=True)
class StageMemory:
    """Bytes at the worst moment of each stage, the interpreter and its libraries (some 0.4 GB) not counted.

    held: throughout: statistics. sweep, measure, polish, quantize, tune: on top of that. disk: of streams in files of the work folder.
    """

    held: int
    sweep: int
    measure: int
    polish: int
    quantize: int
    disk: int = 0
    tune: int = 0

    @property
    def nbytes(self) -> int:
        """The bound."""
        return int(ALLOCATOR_SLACK * (self.held + max(self.sweep, self.measure, self.polish, self.quantize, self.tune)))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a conversion does.

    rows, length: of calibration; report_rows: beside them. polish: whether allocations are tried. tuned: whether it is tuned end to end.
    descent: whether coordinate descent follows GPTQ. blocks: whether layers learn then.
    """

    rows: int
    length: int
    report_rows: int = 0
    polish: bool = False
    tuned: bool = False
    descent: bool = False
    blocks: bool = False


class _Sizes:
    """What both bounds are made of.

    weights, largest, head: numbers in a layer's matrices, in one of them, in the head. widest: inputs of a matrix. moment: bytes of its
    sum of products. inputs, products: bytes of a layer's Hessians, and of its products of gradients. sweep, quantize: shapes of their
    streams. descended, descended_head: bytes of coordinate descent over a matrix, over the head.
    tried: bytes of the streams of allocations that are tried.
    """

    def __init__(self, config: ModelConfig, asked: Asked) -> None:
        self.length, hidden = min(asked.length, config.max_position_embeddings), config.hidden_size
        rows, report_rows = asked.rows, asked.report_rows + (VALIDATION_ROWS if asked.blocks else 0)
        self.layers = [list(layer_linears(config, layer).values()) for layer in range(config.num_layers)]
        self.head = _weight_bytes(head_linear(config))
        self.weights = max(sum(map(_weight_bytes, layer)) for layer in self.layers)
        self.largest = max(_weight_bytes(linear) for layer in self.layers for linear in layer)
        self.widest = max(linear.in_features for layer in self.layers for linear in layer)
        self.moment = _moment_bytes(self.widest)
        self.inputs = max(sum(map(_moment_bytes, _input_sizes(layer).values())) for layer in self.layers)
        self.products = max(sum(F64_BYTES * linear.out_features * _coupled_block(linear) for linear in layer) for layer in self.layers)
        self.sweep, self.quantize = (rows, self.length, hidden), (rows + report_rows, self.length, hidden)
        self.tried = 2 * F32_BYTES * hidden * (CONCURRENT_ALLOCATIONS * JUDGED_ROWS * JUDGED_TOKENS + ROUNDED_ON * self.length)
        # of coordinate descent: targets and what it works on, the Hessian while it is inverted in fp64
        self.descended = (F32_BYTES + PER_DESCENT) * self.largest + FACTOR_BYTES * self.widest**2
        # of what the stream lacks before down: its product with the inputs, twice
        self.lacking = 2 * self.widest * hidden * (F64_BYTES if self.widest <= MOST_IN_F64 else F32_BYTES)
        self.descended_head = 2 * self.head + PER_DESCENT * min(self.head, 2 * AT_ONCE) + FACTOR_BYTES * hidden**2
        self.sparse = any(config.experts(layer) is not None for layer in range(config.num_layers))


def plan_cpu_memory(config: ModelConfig, asked: Asked) -> StageMemory:
    """What a conversion on the CPU will take."""
    s = _Sizes(config, asked)
    learning = block_bytes(config, torch.device("cpu"), s.length) if asked.blocks else 0
    factor, square = FACTOR_BYTES * s.widest * s.widest, F32_BYTES * s.widest * s.widest
    logits, judged = (count * F32_BYTES * s.length * config.vocab_size for count in (8, 6))
    statistics = [sum(_statistics_bytes(linear, asked.rows * s.length) for linear in layer) for layer in s.layers]
    each, kept, disk = _sweep_bytes(s.sweep, config.num_layers, STREAM_BYTES)
    forward, backward = (ROWS_PER_BATCH * s.length * F32_BYTES * count for count in _floats_per_token(config))
    stream = F32_BYTES * math.prod(s.sweep)
    partly_run = 2 * stream + 2 * F32_BYTES * asked.rows * s.length * max(s.widest, config.q_size)  # layers
    layer = (2 * F32_BYTES + 1) * s.weights + (partly_run if partly_run <= HELD_BYTES else 0) + (4 * stream if s.sparse else 0)
    head, rounding = F32_BYTES * s.head, factor + PER_WEIGHT * s.largest
    rounded = head + PER_HEAD_WEIGHT * s.head + FACTOR_BYTES * config.hidden_size**2
    gradients = 2 * each + F32_BYTES * s.weights + s.inputs + s.products + square + backward
    return StageMemory(
        held=min(sum(statistics), HELD_STATISTICS) + max(statistics),
        sweep=kept + max(each + 2 * head, 2 * each + head + logits, 3 * each + F32_BYTES * s.weights + forward, gradients),
        measure=kept + each + max(rounded, F32_BYTES * s.weights + s.inputs + s.products + rounding),
        polish=max(rounded + logits, (PROBE_BYTES_PER_WEIGHT + PACKED_BYTES_PER_WEIGHT) * s.weights + s.inputs + rounding) + s.tried
        if asked.polish and not s.sparse
        else 0,
        quantize=BOTH * _stream_bytes(s.quantize, BOTH)
        + max(
            head + max(rounded, PER_HEAD_WEIGHT * s.head, head + judged, head + s.descended_head if asked.descent else 0),
            layer
            + max(
                2 * forward + 3 * s.moment + s.lacking,
                s.moment + s.lacking + factor,
                PER_WEIGHT * s.largest + square,
                s.descended if asked.descent else 0,
            ),
            learning,
        ),
        disk=max(disk, BOTH * (F32_BYTES * math.prod(s.quantize) - _stream_bytes(s.quantize, BOTH))),
        tune=needed_bytes(config, torch.device("cpu"), s.length) if asked.tuned else 0,
    )


def plan_gpu_memory(config: ModelConfig, asked: Asked) -> StageMemory:
    """GPU memory of a conversion, not counting the driver and the libraries (0.8 GiB on an H200) and what torch keeps for later.

    Arguments as of `plan_cpu_memory`. Partly run layers are not counted: they are held only where a sixth of the GPU is enough for them
    (quantization._held_limit).
    """
    s = _Sizes(config, asked)
    learning = block_bytes(config, torch.device("cuda"), s.length) if asked.blocks else 0
    head, weights, largest, square = F32_BYTES * s.head, F32_BYTES * s.weights, F32_BYTES * s.largest, F32_BYTES * s.widest * s.widest
    each, held, disk = _sweep_bytes(s.sweep, config.num_layers, HOST_BYTES)
    if F32_BYTES * math.prod(s.sweep) * config.num_layers > STREAM_BYTES:
        held = 0  # those are on the host
    batch = min(asked.rows, gpu_rows(config, s.length))
    forward, backward = (batch * s.length * F32_BYTES * count for count in _floats_per_token(config))
    backward += 5 * F32_BYTES * batch * config.num_heads * s.length * s.length  # scores
    logits = 8 * F32_BYTES * s.length * config.vocab_size
    pieces = SPLIT_BYTES * min(SPLIT_NUMBERS, max(s.widest * s.widest, s.head))
    rounding = max(4 * square, 2 * square + pieces + 6 * largest)
    narrow = max(SPAN_ROWS, min(linear.in_features for layer in s.layers for linear in layer))
    copies = (
        COPIES_BYTES + 2 * SPAN_ROWS * COPIES_BYTES // narrow + (F32_BYTES + SPLIT_BYTES) * RESULT_NUMBERS
    )  # with errors of a span, and what they change
    # the head, its copy for rounding and the part that is shifted at a time; then that copy, the working copy, codes, errors of a span
    shifted = 2 * head + 4 * min(F32_BYTES * AT_ONCE, head) + pieces
    errors = 2 * F32_BYTES * SPAN_ROWS * config.vocab_size + (F32_BYTES + SPLIT_BYTES) * RESULT_NUMBERS
    rounded = max(shifted, 2 * head + head // 2 + errors)
    gradients = 2 * each + weights + s.inputs + 2 * s.products + backward
    trial = max(3 * head + pieces + logits, s.weights * PROBE_BYTES_PER_WEIGHT + s.inputs + max(rounding, forward)) + s.tried
    layer = (
        2 * weights
        + s.moment
        + max(square + s.moment + s.lacking + forward + pieces, s.lacking + rounding, s.descended if asked.descent else 0)
    )
    rounded = max(rounded, 2 * head + s.descended_head if asked.descent else 0)
    return StageMemory(
        held=0,
        sweep=held + max(each + 2 * head, 2 * each + head + logits, 3 * each + weights + forward, gradients) + pieces,
        measure=held + each + max(2 * head + max(head, copies) + pieces, weights + s.inputs + max(rounding, s.moment + copies)),
        polish=trial if asked.polish and not s.sparse else 0,
        quantize=BOTH * _stream_bytes(s.quantize, BOTH) + max(rounded, 2 * head + max(head // 2, logits), layer, learning),
        disk=disk,
        tune=needed_bytes(config, torch.device("cuda"), s.length) if asked.tuned else 0,
    )


def _stream_bytes(shape: tuple[int, int, int], count: int) -> int:
    """Bytes of memory that one of the streams a stage works on takes: all of it or, in a file, none."""
    return F32_BYTES * math.prod(shape) if fits_in_memory(shape, count) else 0


def _sweep_bytes(shape: tuple[int, int, int], layers: int, room: int) -> tuple[int, int, int]:
    """Of a sweep: bytes of memory of a stream it works on, and of all those it keeps, for which there is `room`; bytes in files."""
    stream, each = F32_BYTES * math.prod(shape), _stream_bytes(shape, WORKING_STREAMS)
    every = kept_streams(stream, layers, room + DISK_BYTES) * stream
    kept = min(every, room // stream * stream) if each else 0
    return each, kept, every - kept + (0 if each else WORKING_STREAMS * stream)


def _moment_bytes(size: int) -> int:
    """Bytes of a sum of products of inputs."""
    return size * size * (F64_BYTES if size <= MOST_IN_F64 else F32_BYTES)


def _weight_bytes(linear: Linear) -> int:
    return linear.in_features * linear.out_features


def _coupled_block(linear: Linear) -> int:
    return 1 if "." in linear.role else coupled_block(linear.out_features)


def _statistics_bytes(linear: Linear, tokens: int) -> int:
    """Products of gradients and, at most, a weight per token."""
    return F32_BYTES * (linear.out_features * _coupled_block(linear) + (0 if "." in linear.role else tokens))


def _input_sizes(layer: list[Linear]) -> dict[str, int]:
    """Name -> size of the inputs whose Hessians a sweep keeps at the same time."""
    sizes = {linear.role: linear.in_features for linear in layer}
    return {name: sizes[name] for name in role_inputs(sizes).values()}


def _floats_per_token(config: ModelConfig) -> tuple[int, int]:
    """Numbers per token that one layer's forward pass holds at once, and that a forward and backward pass keep."""
    inner = config.intermediate_size
    for layer in range(config.num_layers):
        moe = config.experts(layer)
        if moe is not None:
            inner = max(inner, moe.top_k * moe.intermediate_size + moe.shared_size)
    return 8 * config.hidden_size + 6 * config.q_size + 4 * inner, 20 * config.hidden_size + 14 * config.q_size + 12 * inner
