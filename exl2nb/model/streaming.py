"""Layers that live on the host and are computed on a GPU: their weights are copied there, one layer ahead of what is computed.

Long prompts go through all of them. While tokens are decoded, every few layers one is lent to the GPU, and the link, which would be idle
then, brings its weights while the processor computes the layers in front of it.

Two buffers hold two layers: while one is computed, the next is copied, on a stream of its own. Keys and values that lie on the host are
copied along for prompts, those of the step go back to the host's pools; a lent layer's cache lies on the GPU. `ops.host_prefill` computes a
layer of a prompt. Knows no programs but those it is given.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import CachePart
from exl2nb.core.log import logger
from exl2nb.model.batch import Batch
from exl2nb.model.layers import Layer, RoutedMLP, field_tensors
from exl2nb.model.model import LayerRange
from exl2nb.ops import gpu_prefill, kv_codes
from exl2nb.ops.host_prefill import LayerBackend, move_steps
from exl2nb.ops.interpreter import Inputs, interpret
from exl2nb.ops.memory_ops import large_pages
from exl2nb.ops.program import Program
from exl2nb.ops.records import Op, QkvOp

LAYER_ALIGN_BYTES = 256  # bytes; where a tensor of a layer begins
MAX_DECODE_TOKENS = 8  # tokens of a sequence that does not count as a prompt: it decodes, perhaps with draft tokens
LINK_BYTES_PER_S = 12e9  # bytes a second from host to GPU: PCIe 3 with 16 lanes, or 4 with 8
CPU_MACS_PER_S = 1e12  # multiplications and additions a second of a processor, by the CPU engine
LAYER_BUFFERS = 2
MOST_EXPERTS = 2 << 30  # bytes of a GPU for copies of two layers' experts; those of larger layers stay on the CPU
STREAM_EVERY_LAYERS = 3  # layers of the host: odd, so that lent layers take the buffers in turns
TWO_STREAMED_OF_LAYERS = 8  # of so many layers of the host two are lent: a link brings a third of what a processor reads in the same time


def min_streamed_rows(nbytes: int, weights: int) -> int:
    """Rows from which on copying a layer of so many bytes and weights takes less time than computing them on the CPU.

    The same number on every machine, so that a prompt has the same bits. More than `gpu_prefill.MAX_STEP_KERNEL_ROWS`: below that a
    processor is bound by memory too.
    """
    return max(
        gpu_prefill.MAX_STEP_KERNEL_ROWS + 1,
        -(-nbytes * round(CPU_MACS_PER_S) // (2 * weights * round(LINK_BYTES_PER_S))) if weights else 0,
    )


def streamed_layers(count: int) -> range:
    """Which of so many layers of the host are lent while tokens are decoded: an even number, as there are two buffers.

    The same on every machine, so that a token has the same bits.
    """
    return range(STREAM_EVERY_LAYERS - 1, STREAM_EVERY_LAYERS * 2 * (count // TWO_STREAMED_OF_LAYERS), STREAM_EVERY_LAYERS)


def with_streamed(spans: Sequence[LayerRange], streaming: Streaming) -> list[LayerRange]:
    """Spans of which the first, where it is on the CPU and others follow, lends layers to where prompts are computed."""
    host = spans[0]
    if host.device != "cpu" or len(spans) == 1:
        return [*spans]
    found, first = list[LayerRange](), host.first
    for layer in streamed_layers(host.last - host.first) if streaming.lent is None else streaming.lent:
        at = host.first + layer
        found += [LayerRange("cpu", first, at), LayerRange(streaming.device, at, at + 1, lent=True)]
        first = at + 1
    return [*(span for span in found if span.first < span.last), LayerRange("cpu", first, host.last), *spans[1:]]


# ---- a layer's memory


def pack_layer(layer: Layer | RoutedMLP) -> Any:
    """The same layer with all tensors side by side in memory of its own on the host, which one copy takes to a GPU."""
    known = {tensor.data_ptr(): tensor for tensor in field_tensors(layer)}
    size = sum(_align_size(tensor.nbytes) for tensor in known.values())
    memory = large_pages(size)
    memory = torch.empty(size, dtype=torch.uint8) if memory is None else memory
    places, at = dict[int, Tensor](), 0
    for address, tensor in known.items():
        places[address] = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        places[address].copy_(tensor)
        at += _align_size(tensor.nbytes)
    return _replace_tensors(layer, lambda tensor: places[tensor.data_ptr()])


def _replace_tensors(layer: Any, place: Callable[[Tensor], Tensor]) -> Any:
    """A layer with other tensors."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return place(value)
        if isinstance(value, tuple):
            return tuple(of(one) for one in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: of(getattr(value, field.name)) for field in fields(value)})
        return value

    return of(layer)


def _align_size(size: int) -> int:
    return -(-size // LAYER_ALIGN_BYTES) * LAYER_ALIGN_BYTES


class PinnedLayer:
    """The memory of a layer on the host, locked there so that copies need no processor."""

    def __init__(self, layer: Layer | RoutedMLP, device: torch.device) -> None:
        tensors = [*field_tensors(layer)]
        first = min(tensor.data_ptr() for tensor in tensors)
        self.begin, self.size = first, max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - first
        start = next(tensor for tensor in tensors if tensor.data_ptr() == first)
        whole = torch.empty(0, dtype=torch.uint8).set_(start.untyped_storage())
        offset = first - whole.data_ptr()
        assert offset + self.size <= len(whole), "a layer's tensors are side by side"
        self.memory = whole[offset : offset + self.size]
        if device.type == "cuda":
            with ops.on_device(str(device)):
                error = _cuda_runtime().cudaHostRegister(first, self.size, 0)
            if int(error):
                with contextlib.suppress(RuntimeError):  # takes the error, which the next launch would raise
                    torch.zeros(1, device=device)
                logger.warning("%d bytes of a layer cannot be locked in memory (CUDA error %d): copies take longer", self.size, int(error))
            else:
                weakref.finalize(self, _unpin_memory, first)

    def place(self, tensor: Tensor, buffer: Tensor) -> Tensor | None:
        """A tensor of the layer in a copy of it; None: it is none of its."""
        at = tensor.data_ptr() - self.begin
        if not 0 <= at < self.size:
            return None
        return buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _unpin_memory(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # the driver is gone at the end of a process
        _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


# ---- the order of copies and computations


class Lanes:
    """Copies in one order, computations in another, and marks by which they wait for each other.

    On a GPU two streams: the current one computes. On the CPU everything happens at once, when it is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, work: Callable[[], None], after: Any) -> Any:
        """Do `work` in the lane of copies, not before `after` is reached; a mark behind it."""
        if self._copies is None:
            work()
            return None
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            work()
            return self._copies.record_event()

    def wait(self, mark: Any) -> None:
        """Compute nothing more before a mark is reached."""
        if self._copies is not None:
            torch.cuda.current_stream(self._copies.device).wait_event(mark)

    def mark(self) -> Any:
        """Behind all that is to be computed so far."""
        return None if self._copies is None else torch.cuda.current_stream(self._copies.device).record_event()

    def copied(self) -> Any:
        """Behind all that is to be copied so far."""
        return None if self._copies is None else self._copies.record_event()

    def sync(self, mark: Any) -> None:
        """Wait here for a mark."""
        if mark is not None:
            mark.synchronize()


class Streaming(NamedTuple):
    """How layers of the host are computed on a GPU.

    Attributes:
        device: where prompts through these layers are computed.
        rows: from so many tokens of a step on. None: by `min_streamed_rows`.
        lent: layers of the host that are computed on the device while tokens are decoded, counted from the first. None: by
        `streamed_layers`.
        lanes: makes the order of copies and computations of a device.
    """

    device: str
    rows: int | None = None
    lent: Sequence[int] | None = None
    lanes: Callable[[torch.device], Lanes] = Lanes


class Buffers:
    """Copies of images on a device, one ahead of what is used; image n in buffer n % 2.

    Args:
        images: of consecutive layers.
        device: where the copies are.
        lanes: the order of copies and computations there.
    """

    def __init__(self, images: Sequence[PinnedLayer], device: torch.device, lanes: Lanes) -> None:
        self.images, self.lanes = [*images], lanes
        size = max(image.size for image in images)
        with torch.inference_mode(False):  # written to in steps of requests and of callers alike
            self.memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(LAYER_BUFFERS)]
        self._held: list[int | None] = [None] * LAYER_BUFFERS
        self._ready: list[Any] = [None] * LAYER_BUFFERS
        self._free: list[Any] = [None] * LAYER_BUFFERS

    def begin(self) -> None:
        """A step begins whose copies read and write more than weights: none of them before all that was launched until now."""
        self._free = [self.lanes.mark()] * LAYER_BUFFERS

    def load(self, number: int, extra: Callable[[int], None] | None = None) -> None:
        """Begin to copy an image into its buffer, if it is not there, when what was in it has been used. extra: what else is copied."""
        here, image = number % LAYER_BUFFERS, self.images[number]
        known = self._held[here] == number
        if known and extra is None:
            return

        def work() -> None:
            if not known:
                self.memory[here][: image.size].copy_(image.memory, non_blocking=True)
            if extra is not None:
                extra(number)

        self._held[here] = None  # where copying fails
        self._ready[here] = self.lanes.copy(work, self._free[here])
        self._held[here] = number

    def use(self, number: int) -> int:
        """Have computations wait for an image that is being copied; the number of its buffer."""
        here = number % LAYER_BUFFERS
        assert self._held[here] == number
        self.lanes.wait(self._ready[here])
        return here

    def done(self, number: int) -> None:
        """Everything that reads an image has been launched."""
        self._free[number % LAYER_BUFFERS] = self.lanes.mark()


# ---- pages


class Pages:
    """The pages of a step's sequences, numbered anew, on the device: those with earlier tokens go there, those written come back.

    Args:
        batch: on the host. pools: of the layers, on the host or, of lent ones, on the device.
    """

    def __init__(self, batch: Batch, pools: CachePart, device: torch.device, lanes: Lanes) -> None:
        page = kv_codes.page_size(pools.k[0])
        bounds, lens, table = batch.cu_seqlens.tolist(), batch.context_lens.tolist(), batch.block_table
        self._pools, self._device, self._lanes = pools, device, lanes
        held, known, written, tables = list[int](), list[int](), list[int](), list[list[int]]()
        slots = torch.empty_like(batch.slot_mapping)
        for row, length in enumerate(lens):
            first, last = bounds[row], bounds[row + 1]
            start, count = length - (last - first), -(-length // page)
            numbers = range(len(held), len(held) + count)
            held += table[row, :count].tolist()
            known += numbers[: -(-start // page)]
            written += numbers[start // page :]
            tables.append([*numbers])
            place = torch.arange(start, length)
            slots[first:last] = (numbers[0] * page + place).int()
        width = max(len(numbers) for numbers in tables)
        self.slots = slots
        self.block_table = torch.tensor([[*numbers, *[0] * (width - len(numbers))] for numbers in tables], dtype=torch.int32)
        of = torch.tensor(held)
        self._count, self._known, self._written = len(held), torch.tensor(known, dtype=torch.int64), torch.tensor(written)
        self._from, self._to = of[self._known], of[self._written]
        self._known_there, self._written_there = self._known.to(device), self._written.to(device)
        self._from_there, self._to_there = self._from.to(device), self._to.to(device)
        pinned = device.type == "cuda"
        self.k, self.v = ([self._new(pool, self._count) for _ in range(LAYER_BUFFERS)] for pool in (pools.k[0], pools.v[0]))
        up, down = len(known), len(written)
        self._up, self._down = (
            [[torch.empty(count, _as_bytes(pool).shape[1], dtype=torch.uint8, pin_memory=pinned) for pool in (pools.k[0], pools.v[0])]
             for _ in range(LAYER_BUFFERS)] for count in (up, down)
        )  # fmt: skip
        self._sent: list[Any] = [None] * LAYER_BUFFERS
        self._back: dict[int, Any] = {}

    def _on_device(self, layer: int) -> bool:
        return self._pools.k[layer].device.type != "cpu"

    def _new(self, pool: Tensor, count: int) -> Tensor:
        row = _as_bytes(pool).shape[1]
        return torch.zeros(count, row, dtype=torch.uint8, device=self._device).view(pool.dtype).view(count, *pool.shape[1:])

    def send(self, layer: int) -> None:
        """Copy what is known of a layer, in the lane of copies."""
        if not len(self._from):
            return
        here = layer % LAYER_BUFFERS
        if self._on_device(layer):
            for pool, there in zip((self._pools.k[layer], self._pools.v[layer]), (self.k[here], self.v[here])):
                _as_bytes(there)[self._known_there] = _as_bytes(pool)[self._from_there]
            return
        self._lanes.sync(self._sent[here])  # the copy before the last one has left this memory
        for host, pool, there in zip(self._up[here], (self._pools.k[layer], self._pools.v[layer]), (self.k[here], self.v[here])):
            torch.index_select(_as_bytes(pool), 0, self._from, out=host)
            _as_bytes(there)[self._known_there] = host.to(self._device, non_blocking=True)
        self._sent[here] = self._lanes.copied()

    def fetch(self, layer: int) -> None:
        """Begin to copy back what a layer has written."""
        here = layer % LAYER_BUFFERS
        if self._on_device(layer):
            for pool, there in zip((self._pools.k[layer], self._pools.v[layer]), (self.k[here], self.v[here])):
                _as_bytes(pool)[self._to_there] = _as_bytes(there)[self._written_there]
            return
        for host, there in zip(self._down[here], (self.k[here], self.v[here])):
            host.copy_(_as_bytes(there)[self._written_there], non_blocking=True)
        self._back[layer] = self._lanes.mark()

    def store(self, layer: int) -> None:
        """Put it into the pools."""
        if self._on_device(layer):
            return
        self._lanes.sync(self._back.pop(layer))
        for host, pool in zip(self._down[layer % LAYER_BUFFERS], (self._pools.k[layer], self._pools.v[layer])):
            _as_bytes(pool)[self._to] = host


def _as_bytes(pool: Tensor) -> Tensor:
    """A pool as bytes, pages first."""
    return pool.flatten(1).view(torch.uint8)


# ---- layers


class LayerStream:
    """Runs consecutive layers of the host for prompts, and has the weights of lent ones at hand while tokens are decoded.

    Args:
        layers: each by `pack_layer`.
        lent: which of them are lent, by their numbers here.
        streaming: where and how they are computed.

    Attributes:
        rows: tokens of a step from which on this is worth it for prompts.
        images: the layers' memory on the host.
        buffers: where their copies are.
    """

    def __init__(self, layers: Sequence[Layer], lent: Sequence[int], streaming: Streaming) -> None:
        self.device = torch.device(streaming.device)
        self._layers, self.images = [*layers], [PinnedLayer(layer, self.device) for layer in layers]
        self.buffers = Buffers(self.images, self.device, streaming.lanes(self.device))
        self._lent = {
            number: lent[(place + LAYER_BUFFERS) % len(lent)] for place, number in enumerate(lent)
        }  # and what its buffer holds next
        self._programs: list[Program] = []
        self._steps: list[tuple[Program, list[Op]]] = []
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.inference_mode(False):
            self._room = _allocate_scratch(layers, self.device)
        largest = max(range(len(layers)), key=lambda number: self.images[number].size)
        weights = sum(_count_blob_weights(tensor) for tensor in field_tensors(layers[largest]))
        self.rows = min_streamed_rows(self.images[largest].size, weights) if streaming.rows is None else streaming.rows

    # ---- lent layers

    def lent(self, number: int) -> Layer:
        """A lent layer with its tensors in the buffer where they are while it is computed; they are there now."""
        image, buffer = self.images[number], self.buffers.memory[number % LAYER_BUFFERS]
        self.bring(number)
        return _replace_tensors(self._layers[number], partial(_tensor_in_buffer, image, buffer))

    def bring(self, number: int) -> None:
        """Have computations wait until the weights of a lent layer are in its buffer; `release` follows."""
        self.buffers.load(number)
        self.buffers.use(number)

    def release(self, number: int) -> None:
        """Everything that reads a lent layer has been launched: copy the next one that goes into its buffer."""
        self.buffers.done(number)
        self.buffers.load(self._lent[number])

    # ---- prompts

    def run(self, programs: Sequence[Program], x: Tensor, batch: Batch, pools: CachePart) -> Tensor:
        """The residual stream f32 `(T, H)` on the device behind the layers.

        Args:
            programs: of the layers, in running order. x: f32 `(T, H)`, before them. batch: on the host, positions as rows of the RoPE
                tables. pools: of the layers.
        """
        if len(self._programs) != len(programs) or any(a is not b for a, b in zip(programs, self._programs)):
            self._programs, self._tables = [*programs], {}
            each = [(program, steps) for program in programs for steps in program.layers]
            self._steps = [(program, self._moved(number, steps)) for number, (program, steps) in enumerate(each)]
        lanes, buffers = self.buffers.lanes, self.buffers
        with ops.on_device(str(self.device)):
            pages = Pages(batch, pools, self.device, lanes)
            x = x.to(self.device, copy=True)
            sequences = gpu_prefill.Sequences(batch.cu_seqlens.tolist(), batch.context_lens.tolist())
            nothing = torch.empty(0, dtype=torch.int32)
            parts = (nothing, batch.positions, pages.slots, pages.block_table, batch.cu_seqlens, batch.context_lens, nothing)
            inputs = Inputs(*(part.to(self.device) for part in parts))
            buffers.begin()
            buffers.load(0, pages.send)
            for number, (program, steps) in enumerate(self._steps):
                if number + 1 < len(self._steps):
                    buffers.load(number + 1, pages.send)
                here, layer = buffers.use(number), next(op.layer for op in steps if isinstance(op, QkvOp))
                backend = LayerBackend(program, self._room, inputs, sequences, {layer: pages.k[here]}, {layer: pages.v[here]})
                x = interpret(steps, backend, x)
                pages.fetch(number)
                buffers.done(number)
                if number:
                    pages.store(number - 1)
            pages.store(len(self._steps) - 1)
            for number in [*self._lent][:LAYER_BUFFERS]:
                buffers.load(number)
        return x

    def _moved(self, number: int, steps: list[Op]) -> list[Op]:
        image, buffer = self.images[number], self.buffers.memory[number % LAYER_BUFFERS]
        if number in self._lent:  # recorded for the buffer
            if self.device.type != "cpu":
                return steps
            self.bring(number)  # headers of blobs are read

        def move(tensor: Tensor) -> Tensor:
            place = image.place(tensor, buffer)
            if place is not None:
                return place
            if _is_inside(tensor, buffer):
                return tensor
            key = tensor.data_ptr()  # a table of RoPE, the same for many layers
            if key not in self._tables:
                self._tables[key] = tensor, tensor.to(self.device)
            return self._tables[key][1]

        return [move_steps(op, move) for op in steps]


def _is_inside(tensor: Tensor, buffer: Tensor) -> bool:
    return 0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.nbytes


def fits_experts(largest: int) -> bool:
    """Whether a GPU keeps room for the experts of layers, of which the largest have so many bytes."""
    return LAYER_BUFFERS * largest <= MOST_EXPERTS


class ExpertStream:
    """Computes experts that are on the CPU apart from their layers for prompts, on the device of the rest of their layers.

    Args:
        experts: of each sparse layer there, by its number, each by `pack_layer`. The others as in `LayerStream`.

    Attributes:
        rows: tokens of a step from which on this is worth it.
    """

    def __init__(self, experts: Mapping[int, RoutedMLP], streaming: Streaming) -> None:
        self.device = torch.device(streaming.device)
        images = [PinnedLayer(mlp, self.device) for mlp in experts.values()]
        self.buffers = Buffers(images, self.device, streaming.lanes(self.device))
        self._steps: dict[int, list[Op]] = {}
        for number, (layer, mlp) in enumerate(experts.items()):
            image, buffer = images[number], self.buffers.memory[number % LAYER_BUFFERS]
            self._steps[layer] = [move_steps(mlp.op, partial(_tensor_in_buffer, image, buffer))]
        first = next(iter(experts.values()))
        with torch.inference_mode(False):
            self._room = _allocate_scratch(experts.values(), self.device)
        visited = sum(_count_blob_weights(tensor) for tensor in (*first.up, *first.down)) * first.top_k // len(first.up)
        self.rows = min_streamed_rows(images[0].size, visited) if streaming.rows is None else streaming.rows

    def run(self, layer: int, program: Program, x: Tensor) -> Tensor:
        """Add a layer's experts to x f32 `(T, H)` on the device, in place; all layers of a step in turn. program: of the part before."""
        number, buffers = [*self._steps].index(layer), self.buffers
        with ops.on_device(str(self.device)):
            if number == 0:
                buffers.load(0)
            if number + 1 < len(self._steps):
                buffers.load(number + 1)
            buffers.use(number)
            x = interpret(self._steps[layer], LayerBackend(program, self._room, Inputs.nothing(self.device)), x)
            buffers.done(number)
        return x


def _tensor_in_buffer(image: PinnedLayer, buffer: Tensor, tensor: Tensor) -> Tensor:
    place = image.place(tensor, buffer)
    assert place is not None, "all of it is in the image"
    return place


def _allocate_scratch(layers: Iterable[Layer | RoutedMLP], device: torch.device) -> Tensor:
    """For the largest of all matrices, f16."""
    return torch.empty(
        max(_count_blob_weights(tensor) for layer in layers for tensor in field_tensors(layer)), dtype=torch.float16, device=device
    )


def _count_blob_weights(tensor: Tensor) -> int:
    """Of a blob."""
    return math.prod(ops.shape(tensor)) if tensor.dtype == torch.uint8 else 0


def prompts_of(batch: Batch) -> tuple[list[int], int]:
    """The sequences of a step with more tokens than decoding gives, and how many these are together."""
    bounds = batch.cu_seqlens.tolist()
    counts = [b - a for a, b in pairwise(bounds)]
    long = [row for row, count in enumerate(counts) if count > MAX_DECODE_TOKENS]
    return long, sum(counts[row] for row in long)


def split_prompts(batch: Batch, rows: Sequence[int]) -> Iterator[tuple[bool, Batch, Tensor]]:
    """A step as its prompts and the rest: whether it is the prompts, the batch, and which tokens these are."""
    others = [row for row in range(len(batch.context_lens)) if row not in set(rows)]
    for prompts, some in ((True, rows), (False, others)):
        if some:
            piece, tokens, _ = batch.select(some)
            yield prompts, piece, tokens
