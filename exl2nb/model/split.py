"""A model whose layers lie on several devices: parts of consecutive layers, run one after the other, the residual stream handed on.
Experts may lie on the CPU apart from the rest of their layers; each sparse layer's are then a part of their own. So is each layer of the
host that is lent to a GPU, see `streaming`.

Every part is a program of its own. All but the first begin with a table that holds the rows of the residual stream in place of embeddings;
all but the last end with the stream in place of logits. Where all parts are on GPUs, captured steps run through all of them and the last
GPU draws tokens; with a part on the CPU each part is captured for itself, and the last one draws where it is on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import CachePart, KVCache
from exl2nb.cache.spec import PAGE_SIZE
from exl2nb.core import env
from exl2nb.core.log import logger
from exl2nb.model.batch import Batch, batch_tensors
from exl2nb.model.config import ModelConfig
from exl2nb.model.gpu_forward import GpuForward, cache_formats
from exl2nb.model.layers import Embedding, RoutedMLP, field_tensors
from exl2nb.model.model import DecodeInputs, LayerRange, Model, Network, forward_gpu_observed
from exl2nb.model.runner import GPU_CHUNKS, HOST_CHUNKS
from exl2nb.model.streaming import ExpertStream, LayerStream, Streaming, fits_experts, prompts_of, split_prompts
from exl2nb.ops import gpu_prefill
from exl2nb.ops.cuda_sample import ROW_BYTES, pack_cuts, sample_rows
from exl2nb.ops.gpu import LoraBuffers, capturing, launch_lock
from exl2nb.ops.interpreter import CpuBackend, Inputs, interpret, observing
from exl2nb.ops.kernel_code import KernelId
from exl2nb.ops.placement import Placement

STREAM_ROWS = {"cpu": 64, "cuda": 2560}  # of a part's table at first: on a GPU a chunk of a prompt and the requests that decode beside it
MAX_CAPTURED_SEQUENCES = 64  # sequences of a captured step
_EMPTY_STREAM = torch.empty(0)  # in front of the first part

Observe = Callable[[str, Tensor], None]


class ModelPiece(NamedTuple):
    """What a part runs: layers [first, last) of a span, the last without its experts where `cut`; without layers the head alone."""

    span: LayerRange
    first: int
    last: int
    cut: bool = False


class HostLayers(NamedTuple):
    """Consecutive parts [first, last) of layers on the host, and where their long prompts and their lent layers are computed."""

    first: int
    last: int
    stream: LayerStream


class Borders(NamedTuple):
    """What is around a part on a GPU.

    from_host: the stream in front of it is on the host. to_host: the host reads what it leaves. capped: of the last part, makes of its
    logits what is drawn from.
    """

    from_host: bool
    to_host: bool
    capped: Callable[[Tensor], Tensor] | None = None


@dataclass
class PieceProgram:
    """A piece as a program. stream: f32 `(rows, H)`, what it reads in place of embeddings; None in the first part. gpu: runs it there.

    experts: of the last layer, to be run behind the program on the CPU, or None. captured: steps as graphs, which know the addresses of the
    pools of one cache; captured_pool: the first of these.
    """

    piece: ModelPiece
    program: ops.Program
    stream: Tensor | None
    gpu: GpuForward | None
    experts: RoutedMLP | None = None
    captured: dict[tuple[int, int], Captured | None] = field(default_factory=dict)  # None: could not be captured
    captured_pool: weakref.ref[Tensor] | None = None

    @property
    def span(self) -> LayerRange:
        """Where it is, and whose pools it reads."""
        return self.piece.span

    @property
    def headed(self) -> bool:
        """Whether it is the head alone."""
        return self.piece.first == self.piece.last


class SplitModel(Model):
    """A `Model` in parts; made by `loader.load_model`.

    Args:
        network: the tensors of each layer on its device, those of lent ones on the host, `attention.layer` counted within its span.
        spans: in running order, without gaps. experts: those of sparse layers are on the CPU, wherever the rest of their layer is.
        streaming: where prompts through layers on the CPU are computed, whose tensors are `together`; None: on the CPU.

    Attributes:
        device: "cpu", where batches are made and logits arrive.
        pieces: what each part runs, in running order.
        parts: the pieces as programs; recorded when the first step runs.
        hosts: runs of layers on the host that stream long prompts, by the first of their parts.
        streamed: layers of the host that a GPU computes: what holds their weights, and their number there.
        expert_streams: experts on the host that stream long prompts, by the device of the rest of their layers.
        stream_tables: where the parts of a device take over the residual stream.
        graphed: steps of parts on GPUs are captured.
    """

    def __init__(
        self,
        config: ModelConfig,
        network: Network,
        spans: Sequence[LayerRange],
        *,
        context: int,
        deterministic: bool = False,
        experts: bool = False,
        streaming: Streaming | None = None,
    ) -> None:
        super().__init__(config, network, context=context, deterministic=deterministic)
        self.streaming = streaming
        self.spans, self.experts_apart = tuple(spans), experts
        self.pieces = (
            [piece for span in spans for piece in self._cut(span)]
            if experts
            else [ModelPiece(span, span.first, span.last) for span in spans]
        )
        self.hosts, self.expert_streams = ({}, {}) if streaming is None else _stream_copies(self.pieces, network, streaming)
        self.streamed: dict[ModelPiece, tuple[LayerStream, int]] = {}
        for host in self.hosts.values():
            pieces = self.pieces[host.first : host.last]
            self.streamed |= {piece: (host.stream, piece.first - pieces[0].first) for piece in pieces if piece.span.lent}
        self.parts: list[PieceProgram] = []
        self.stream_tables: dict[str, Tensor] = {}  # one for all parts of a device: they run one after the other
        self._shown: tuple[Batch, list[Batch]] | None = None  # the last batch, and what each part sees of it
        self.graphed = env.get("EXL2NB_CUDA_GRAPHS", "1") == "1"
        on_host = experts or any(span.device == "cpu" for span in self.spans)
        # where all layers are on GPUs, captured steps run through all of them and the last one draws
        draw_device = "cpu" if on_host else numbered_device(self.spans[-1].device)
        prompt_device = draw_device
        if streaming is not None and (self.hosts or self.expert_streams):
            prompt_device = streaming.device  # a GPU computes the prompts of layers on the CPU
        self.capabilities = replace(
            self.capabilities,
            placement=Placement(tuple(span.device for span in self.spans for _ in range(span.first, span.last))),
            draw_device=draw_device,
            fused_draw=on_host,
            draws_ahead=False,
            captures_drafts=False,
            chunks=HOST_CHUNKS if prompt_device == "cpu" else GPU_CHUNKS,
            missing=frozenset(("adapters", "pictures", "trace and patch")),
            missing_why=f"the model is split ({self.where})",
        )

    def _cut(self, span: LayerRange) -> Iterator[ModelPiece]:
        """The pieces of a span whose experts are elsewhere."""
        first = span.first
        for layer in range(span.first, span.last):
            if self.config.experts(layer) is not None:
                yield ModelPiece(span, first, layer + 1, cut=True)
                first = layer + 1
        if first < span.last or span.last == self.config.num_layers:
            yield ModelPiece(span, first, span.last)

    @property
    def outputs(self) -> int:
        """As `Model.outputs`."""
        self._open()
        return self.parts[-1].program.outputs

    def kernels(self, cache: KVCache) -> list[KernelId]:
        """As `Model.kernels`."""
        self._open()
        found: list[KernelId] = []
        for part in self.parts:
            assert part.gpu is not None
            with torch.cuda.device(numbered_device(part.span.device)):
                found += part.gpu.kernels(cache.part(part.span.first, part.span.last))
        return found

    def step_draw(self, batch: Batch, cache: KVCache, settings: Tensor, top: int, columns: int | None = None) -> tuple[Tensor, Tensor]:
        """As `Model.step_draw`; the last part draws where it is captured on a GPU. The next step overwrites the logits.

        They are on the host only where a row has no distribution, or where the host draws.
        """
        logits, drawn = self._in_turn(batch, cache, draw=None if top else (settings, columns))
        if drawn is not None:
            return drawn, logits
        logits = _fetch_rows(logits)
        return ops.draw_rows(logits, settings, None, min(top, logits.shape[1]), columns), logits

    def forward(self, batch: Batch, cache: KVCache, *, ids: Tensor | None = None, fetch: bool = True) -> Tensor:
        """As `Model.forward`."""
        logits = self._in_turn(batch, cache, ids=ids)[0]
        if not fetch:
            return logits
        logits = _fetch_rows(logits)
        return logits.clone() if len(logits) <= MAX_CAPTURED_SEQUENCES else logits  # a captured step overwrites those of the last one

    def forward_by_ops(self, batch: Batch, cache: KVCache, observe: Observe | None = None) -> Tensor:
        """As `Model.forward_by_ops`, with the batch on the host; observe sees tensors of every device."""
        return self._in_turn(batch, cache, by_ops=lambda part, batch, pools: self._run_by_ops(part, batch, pools, observe))[0].to("cpu")

    def unembed(self, x: Tensor) -> Tensor:
        """As `Model.unembed`."""
        network = self._open()
        last = self.parts[-1]
        x = x.to(last.span.device)
        if last.gpu is None:
            assert network.head is not None
            return self.capped(network.head(x))
        with ops.on_device(last.span.device):
            return self.capped(gpu_prefill.unembed_rows(last.program, x)).cpu()

    @property
    def where(self) -> str:
        """The spans in words."""
        runs: list[list[LayerRange]] = []
        for span in self.spans:
            if runs and (span.lent or runs[-1][-1].lent):  # of the same layers of the host
                runs[-1].append(span)
            else:
                runs.append([span])
        held: list[str] = []
        for spans in runs:
            lent = [span for span in spans if span.lent]
            numbers = f", of these {', '.join(str(span.first) for span in lent)} lent to {lent[0].device}" if lent else ""
            held.append(f"layers {spans[0].first} to {spans[-1].last - 1} on {spans[0].device}{numbers}")
        return ", ".join([*held, "experts on cpu"] if self.experts_apart else held)

    def close(self) -> None:
        """Drop every tensor; the memory returns at once. Harmless when repeated."""
        super().close()
        self.parts, self.hosts, self.streamed, self.expert_streams, self.stream_tables, self._shown = [], {}, {}, {}, {}, None

    def _open(self) -> Network:
        """The network, its parts recorded."""
        network = self.network
        if not self.parts:
            self._extend_ropes(network, PAGE_SIZE)
        return network

    def _in_turn(
        self,
        batch: Batch,
        cache: KVCache,
        *,
        ids: Tensor | None = None,
        by_ops: Callable[[PieceProgram, Batch, CachePart], Tensor] | None = None,
        draw: tuple[Tensor, int | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the last part returns for a batch on the host, and what it draws by `draw`, if it can.

        Args:
            ids: on a GPU, in place of the batch's. by_ops: runs a part. draw: settings and columns, as `step_draw` takes them.
        """
        with self.in_order():
            self._prepare(batch, cache)
            if batch.adapters is not None:
                self.capabilities.require("adapters")
            if batch.pictures is not None:
                self.capabilities.require("pictures")
            batch = self._with_rope_rows(batch)
            tokens = 0 if by_ops or len(batch.input_ids) == len(batch.context_lens) else prompts_of(batch)[1]  # none where all decode
            prompts = {first: host for first, host in self.hosts.items() if tokens >= host.stream.rows}
            cuts = sorted({0, len(self.parts), *prompts, *(host.last for host in prompts.values())})
            x, drawn = _EMPTY_STREAM, None
            for first, last in pairwise(cuts):
                if first in prompts:
                    x = self._prompts(prompts[first], x, batch, cache)
                else:
                    x, drawn = self._walk(first, last, x, batch, cache, ids=ids, by_ops=by_ops, draw=draw)
            return x, drawn

    def _walk(
        self,
        first: int,
        last: int,
        x: Tensor,
        batch: Batch,
        cache: KVCache,
        *,
        ids: Tensor | None = None,
        by_ops: Callable[[PieceProgram, Batch, CachePart], Tensor] | None = None,
        draw: tuple[Tensor, int | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Parts [first, last), the stream x in front of them; what they return and draw."""
        tokens = len(batch.input_ids)
        parts = [self._with_stream_rows(index, tokens) for index in range(first, last)]
        pools = [cache.part(part.span.first, part.span.last) for part in parts]
        shown = self._views(batch)[first:last]
        captured = [None if by_ops else self._sent(*each) for each in zip(parts, shown, pools)]
        for index, (part, mine) in enumerate(zip(parts, shown)):
            graph = captured[index]
            if part.headed:
                return self.unembed(x[batch.logit_rows.to(x.device).long()]), None
            if graph is not None:
                with ops.on_device(part.span.device):
                    before = x if first + index else None
                    if draw is not None and graph.draws:
                        x, drawn = graph.draw(tokens, before, *draw)
                        return (self.capped(x), None) if drawn is None else (x, drawn)
                    if part.span.lent:
                        stream, number = self.streamed[part.piece]
                        stream.bring(number)
                        x = graph.run(tokens, before, partial(stream.release, number))
                    else:
                        x = self._with_experts(part, graph.run(tokens, before), mine)
                continue
            if first + index:
                assert part.stream is not None
                _copy_rows(x, part.stream[:tokens])
            with self._present(part.piece):
                if by_ops is not None:
                    x = by_ops(part, mine, pools[index])
                else:
                    x = self._run(part, mine, pools[index], ids.to(part.span.device) if ids is not None and not first + index else None)
        return (self.capped(x) if last == len(self.parts) else x), None

    def _prompts(self, host: HostLayers, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """A step with long prompts through layers of the host: these through the GPU, layer by layer, the rest as if alone."""
        rows, _ = prompts_of(batch)
        out = torch.empty(len(batch.input_ids), self.config.hidden_size, device=host.stream.device)
        pools = cache.part(self.pieces[host.first].span.first, self.pieces[host.last - 1].span.last)
        for prompts, some, places in sorted(split_prompts(batch, rows), key=lambda one: one[0]):
            before = x[places.to(x.device)] if host.first else _EMPTY_STREAM
            if not prompts:
                found, _ = self._walk(host.first, host.last, before, some, cache)
            else:
                if not host.first:
                    before = self._open().embedding(some.input_ids, some.positions)
                programs = [self._with_stream_rows(index, 1).program for index in range(host.first, host.last)]
                found = host.stream.run(programs, before, some, pools)
            out[places.to(out.device)] = found.to(out.device)
        return out

    @contextmanager
    def _present(self, piece: ModelPiece) -> Iterator[None]:
        """The weights of a piece are where its program reads them."""
        if piece not in self.streamed:
            yield
            return
        stream, number = self.streamed[piece]
        with ops.on_device(piece.span.device):
            stream.bring(number)
            try:
                yield
            finally:
                stream.release(number)

    def _views(self, batch: Batch) -> list[Batch]:
        """What each part sees of a batch: behind the first one rows of the stream in place of ids; all but the last return every row.

        Steps that decode come with the same batch again, its tensors written anew.
        """
        if self._shown is None or self._shown[0] is not batch:
            rows = torch.arange(len(batch.input_ids), dtype=torch.int32)
            first, last = self.pieces[0], self.pieces[-1]
            self._shown = (
                batch,
                [
                    replace(
                        batch,
                        input_ids=batch.input_ids if piece is first else rows,
                        logit_rows=batch.logit_rows if piece is last else rows,
                    )
                    for piece in self.pieces
                ],
            )
        return self._shown[1]

    def _sent(self, part: PieceProgram, batch: Batch, pools: CachePart) -> Captured | None:
        """The graph for a part of a step on a GPU, its inputs written, which takes less time than behind a part on the CPU.

        None: without. Where all parts are on GPUs the executor has the graph of the whole step.
        """
        if part.gpu is None or part.headed or self.capabilities.captures:
            return None
        with ops.on_device(part.span.device):
            captured = self.captured_step(part, batch, pools)
            if captured is not None:
                captured.send(batch)
            return captured

    def _run(self, part: PieceProgram, batch: Batch, pools: CachePart, ids: Tensor | None) -> Tensor:
        if part.gpu is None:
            return self._with_experts(part, part.program.run(*batch_tensors(batch), pools.k, pools.v), batch)
        with ops.on_device(part.span.device):
            return self._with_experts(part, part.gpu.run(batch, pools, ids=ids), batch)

    def _with_experts(self, part: PieceProgram, x: Tensor, batch: Batch) -> Tensor:
        """The stream behind the part's experts; those of long prompts go through the device of the part."""
        stream = None if part.experts is None else self.expert_streams.get(part.span.device)
        if stream is None or prompts_of(batch)[1] < stream.rows:
            return _run_experts(part, x)
        return stream.run(part.piece.last - 1, part.program, x)

    def make_decode_launcher(
        self, cache: KVCache, inputs: DecodeInputs, logits: Tensor, adapters: tuple[LoraBuffers, Tensor] | None
    ) -> Callable[[], None]:
        """As `Model.make_decode_launcher`: on all GPUs, in streams that begin and end in the current one of the last GPU."""
        if adapters is not None:
            self.capabilities.require("adapters")
        self._open()
        home, rows = torch.device(self.capabilities.draw_device), len(inputs.ids)
        streams: dict[torch.device, torch.cuda.Stream] = {}
        steps: list[Callable[[], None]] = []
        x = logits
        for index, part in enumerate(self.parts):
            assert part.gpu is not None
            place = torch.device(numbered_device(part.span.device))
            if place != home and place not in streams:
                streams[place] = torch.cuda.Stream(place)
            last = part is self.parts[-1]
            before, x = x, logits if last else torch.zeros(rows, part.program.outputs, device=place)
            with torch.cuda.device(place):
                steps.append(_part_step(part, cache.part(part.span.first, part.span.last), inputs, before if index else None, x))

        def step() -> None:
            main = torch.cuda.current_stream(home)
            with ExitStack() as current:
                for stream in streams.values():
                    stream.wait_stream(main)
                    current.enter_context(torch.cuda.stream(stream))
                for run in steps:
                    run()
            for stream in streams.values():
                main.wait_stream(stream)

        return step

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """As `Model.in_order`: captured steps are in the order of the last GPU's stream, other work in that of each GPU."""
        if not self.capabilities.captures:
            yield
            return
        home = torch.cuda.current_stream(torch.device(self.capabilities.draw_device))
        others = [torch.cuda.current_stream(torch.device(place)) for place in {numbered_device(span.device) for span in self.spans}]
        for stream in others:
            stream.wait_stream(home)
        yield
        for stream in others:
            home.wait_stream(stream)

    def captured_step(self, part: PieceProgram, batch: Batch, pools: CachePart) -> Captured | None:
        """The graph for a step of one token a sequence; None: launch its kernels one by one."""
        count, width = len(batch.input_ids), batch.block_table.shape[1]
        decoding = count == len(batch.context_lens) == len(batch.logit_rows) and count <= MAX_CAPTURED_SEQUENCES
        if not decoding or not self.graphed:
            return None
        key = 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8, 1 << (width - 1).bit_length()
        if part.captured_pool is None or part.captured_pool() is not pools.k[0]:
            part.captured, part.captured_pool = {}, weakref.ref(pools.k[0])
        if key not in part.captured:
            with self._present(part.piece):  # kernels run once before they are captured
                part.captured[key] = capture_piece(part, pools, *key, self._borders(part))
        return part.captured[key]

    def _borders(self, part: PieceProgram) -> Borders:
        """Of a part on a GPU."""
        index = self.pieces.index(part.piece)
        before, after = self.parts[max(index - 1, 0)], self.parts[index + 1 : index + 2]
        from_host = index > 0 and (before.gpu is None or before.experts is not None)
        if part.experts is None and not after:
            return Borders(from_host, True, self.capped)
        return Borders(from_host, part.experts is not None or after[0].gpu is None)

    def _run_by_ops(self, part: PieceProgram, batch: Batch, pools: CachePart, observe: Observe | None) -> Tensor:
        device, named = part.span.device, None if observe is None else _Shifted(observe, part.piece.first)
        if part.gpu is not None:
            with ops.on_device(device):
                moved = {f.name: value.to(device) for f in fields(batch) if (value := getattr(batch, f.name)) is not None}
                return _run_experts(part, forward_gpu_observed(part.program, Batch(**moved), pools, named), observe)
        backend = CpuBackend(Inputs(*batch_tensors(batch)), pools.k, pools.v, blocks=batch.blocks())
        return _run_experts(part, interpret(part.program.steps, backend, at=observing(named)), observe)

    def _record(self, network: Network) -> None:
        """Record the parts anew, those on GPUs only once: their tables cover the whole context."""
        known = {part.piece: part for part in self.parts if part.gpu is not None}
        self.parts = [known.get(piece) or self._part(network, piece, 0) for piece in self.pieces]

    def _with_stream_rows(self, index: int, tokens: int) -> PieceProgram:
        """A part whose table holds so many rows of the stream."""
        part = self.parts[index]
        if part.stream is not None and tokens > len(part.stream):
            part = self.parts[index] = self._part(self.network, part.piece, 1 << (tokens - 1).bit_length())
        return part

    def _table(self, device: str, rows: int) -> Tensor:
        """Where parts on a device take the stream over, f32 `(rows, H)` or longer; a part keeps the one that it was recorded with."""
        if device not in self.stream_tables or len(self.stream_tables[device]) < rows:
            with torch.inference_mode(False):  # it is written to in steps of requests and of callers alike
                self.stream_tables[device] = torch.zeros(rows, self.config.hidden_size, device=device)
        return self.stream_tables[device]

    def _part(self, network: Network, piece: ModelPiece, rows: int) -> PieceProgram:
        device, first, last, cut = piece.span.device, piece.first, piece.last, piece.cut
        kind = device.partition(":")[0]
        program, stream, ropes = ops.Program(device), None, self._ropes
        if kind != "cpu":
            tables = {name: self._tables(self.context, name) for name in ropes}
            ropes = {name: (cos.to(device), sin.to(device)) for name, (cos, sin) in tables.items()}
        if first == 0:
            program.add(network.embedding.op)
        else:
            stream = self._table(device, max(rows, STREAM_ROWS[kind]))
            program.add(Embedding(table=stream).op)
        whole, experts = network.layers[first : last - cut], None
        if piece.span.lent:
            owner, number = self.streamed[piece]
            with ops.on_device(device):
                whole = [owner.lent(number)]
        for layer in whole:
            program.add(*layer.ops(ropes))
        if cut:
            layer = network.layers[last - 1]
            assert isinstance(layer.mlp, RoutedMLP)
            program.add(*layer.ops(ropes, mlp=False))
            experts = layer.mlp
        if last == self.config.num_layers and not cut:
            program.add(network.head.op)
        else:
            program.add(ops.ResidualOutOp())
        gpu = None if kind == "cpu" else GpuForward(program, torch.device(device), deterministic=self.deterministic)
        return PieceProgram(piece, program, stream, gpu, experts)


def _stream_copies(
    pieces: Sequence[ModelPiece], network: Network, streaming: Streaming
) -> tuple[dict[int, HostLayers], dict[str, ExpertStream]]:
    """Of the pieces on the host without head, by the first of each run, and of the experts apart from layers on each device, where they are
    not too large.
    """
    hosts: dict[int, HostLayers] = {}
    last = len(network.layers)
    on_host = [(piece.span.device == "cpu" or piece.span.lent) and piece.first < piece.last < last and not piece.cut for piece in pieces]
    end = 0
    for first, piece in enumerate(pieces):
        if first < end or not on_host[first]:
            continue
        end = first + 1
        while end < len(pieces) and on_host[end] and (pieces[end].span.lent or pieces[end - 1].span.lent):
            end += 1
        lent = [one.first - piece.first for one in pieces[first:end] if one.span.lent]
        hosts[first] = HostLayers(first, end, LayerStream(network.layers[piece.first : pieces[end - 1].last], lent, streaming))
    apart: dict[str, dict[int, RoutedMLP]] = {}
    for piece in pieces:
        if piece.cut and isinstance(mlp := network.layers[piece.last - 1].mlp, RoutedMLP):
            apart.setdefault(piece.span.device, {})[piece.last - 1] = mlp
    experts = {
        device: ExpertStream(mlps, streaming._replace(device=device))
        for device, mlps in apart.items()
        if fits_experts(max(sum(tensor.nbytes for tensor in field_tensors(mlp)) for mlp in mlps.values()))
    }
    return hosts, experts


def _fetch_rows(x: Tensor) -> Tensor:
    """Rows on the host; a few through locked memory, which a GPU writes to by itself."""
    if x.device.type == "cpu":
        return x
    if x.device.type != "cuda" or len(x) > MAX_CAPTURED_SEQUENCES:
        return x.to("cpu")
    held = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return held


def _copy_rows(x: Tensor, to: Tensor) -> None:
    """Copy the rows of one part to the next; to a GPU in the order of its stream, so that the host goes on meanwhile."""
    if to.device.type == "cpu":
        to.copy_(_fetch_rows(x))
    elif x.device.type == "cpu" and len(x) <= MAX_CAPTURED_SEQUENCES:
        to.copy_(x.pin_memory(), non_blocking=True)
    else:
        to.copy_(x)


def _run_experts(part: PieceProgram, x: Tensor, observe: Observe | None = None) -> Tensor:
    """The stream behind the part's experts, where it has any: then on the CPU."""
    if part.experts is None:
        return x
    x = _fetch_rows(x)
    part.experts(x)
    if observe is not None:
        observe(f"layers.{part.piece.last - 1}.output", x)
    return x


def numbered_device(device: str) -> str:
    """A GPU's name with its number."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def _part_step(part: PieceProgram, pools: CachePart, inputs: DecodeInputs, before: Tensor | None, x: Tensor) -> Callable[[], None]:
    """A part of a captured step. before: what the part in front of it leaves, `(rows, H)`. x: `(rows, outputs)`, what this one leaves."""
    gpu, place, rows = part.gpu, torch.device(numbered_device(part.span.device)), len(inputs.ids)
    assert gpu is not None
    assert inputs.bounds is None, "sequences of one token each"
    there = inputs.ids, inputs.positions, inputs.lens, inputs.table
    away = [torch.empty_like(tensor, device=place) for tensor in there] if inputs.ids.device != place else None
    here = inputs if away is None else DecodeInputs(*away)
    ids, bounds = (torch.arange(count, dtype=torch.int32, device=place) for count in (rows, rows + 1))
    kernels, formats, heads = gpu.step_kernels(rows), cache_formats(pools), (pools.spec.num_kv_heads, pools.spec.head_dim)

    def step() -> None:
        with torch.cuda.device(place):
            if away is not None:
                for to, tensor in zip(away, there):
                    to.copy_(tensor, non_blocking=True)
            if before is not None:
                assert part.stream is not None
                part.stream[:rows].copy_(before, non_blocking=True)
            first = here.ids if before is None else ids
            kernels.run(first, here.positions, here.table, bounds, here.lens, None, pools.k, pools.v, formats, heads, x)

    return step


class _Shifted:
    """Gives the points of a part their names in the whole model."""

    def __init__(self, observe: Observe, first: int) -> None:
        self._observe, self._first = observe, first

    def __call__(self, name: str, value: Tensor) -> None:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            index, _, point = rest.partition(".")
            self._observe(f"layers.{int(index) + self._first}.{point}", value)
        elif self._first == 0:
            self._observe(name, value)


class Captured:
    """A part's step of up to `rows` sequences of up to `width` pages, one token each, as a CUDA graph.

    The graph begins with copying its inputs from locked memory that the host writes for every step, and ends with copying back what the
    host reads: a step is one launch and one wait. The host writes with NumPy, since after a part on the CPU its caches hold weights, and
    each further function of torch takes some 50 us to come back.

    Attributes:
        draws: whether `draw` can be called: it is the last part.
    """

    def __init__(self, part: PieceProgram, pools: CachePart, rows: int, width: int, borders: Borders) -> None:
        assert part.gpu is not None
        self._device = device = torch.device(part.span.device)
        with torch.inference_mode(False):  # written in steps of requests and of callers alike
            settings = rows * (3 + width) + rows * (3 + width) % 2  # eight bytes each
            self._state = torch.zeros(settings + rows * ROW_BYTES // 4, dtype=torch.int32, device=device)
            self._host = torch.zeros(len(self._state), dtype=torch.int32, pin_memory=True)
            self._stream = None if part.stream is None else part.stream[:rows]
            self._rows = torch.zeros(rows, part.stream.shape[1], pin_memory=True) if part.stream is not None and borders.from_host else None
            self._result = torch.zeros(rows, part.program.outputs, pin_memory=True) if borders.to_host else None
            self._drawn = torch.zeros(1, rows, 4, dtype=torch.int32, pin_memory=True)
        self.draws, capped = borders.capped is not None, borders.capped
        self._out = torch.zeros(rows, part.program.outputs, device=device)
        ids, positions, lens, table = self._state[: rows * (3 + width)].split([rows, rows, rows, rows * width])
        params = self._state[settings:].view(torch.uint8).view(rows, ROW_BYTES)
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)
        kernels, heads = part.gpu.step_kernels(rows), (pools.spec.num_kv_heads, pools.spec.head_dim)

        def step() -> None:
            self._state.copy_(self._host, non_blocking=True)
            if self._rows is not None and self._stream is not None:
                self._stream.copy_(self._rows, non_blocking=True)
            kernels.run(
                ids, positions, table.view(rows, width), bounds, lens, None, pools.k, pools.v, cache_formats(pools), heads, self._out
            )  # fmt: skip
            if capped is not None:
                sample_rows(capped(self._out), params, None, None, None, None, None, None, None, 1, True, None, self._drawn)
            elif self._result is not None:
                self._result.copy_(self._out, non_blocking=True)

        step()  # without any sequence: nothing is written to the cache; loads the kernels, which a capture forbids
        with capturing:
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
                step()
        self._kept = kernels, bounds  # the graph knows their addresses only
        self._done = torch.cuda.Event()
        self._words, self._numbers = self._host.numpy(), None if self._rows is None else self._rows.numpy()
        self._lines, self._table = self._words[: 3 * rows].reshape(3, rows), self._words[3 * rows : rows * (3 + width)].reshape(rows, width)
        self._settings, self._tokens = self._words[settings:].view(np.uint8), self._drawn[0].numpy()

    def send(self, batch: Batch) -> None:
        """Write what the next run reads of a batch."""
        n = len(batch.input_ids)
        if self._result is None:
            self._done.synchronize()
        self._words.fill(0)
        self._lines[:, :n] = batch.input_ids.numpy(), batch.positions.numpy(), batch.context_lens.numpy()
        self._table[:n, : batch.block_table.shape[1]] = batch.block_table.numpy()

    def draw(self, n: int, x: Tensor | None, settings: Tensor, columns: int | None) -> tuple[Tensor, Tensor | None]:
        """`run` with the draw of every row; settings, columns and result as `ops.draw_rows` has them. First the logits, on the GPU.

        None in place of the result: a row has no distribution.
        """
        vocab = self._out.shape[1]
        columns = vocab if columns is None else min(columns, vocab)
        packed = pack_cuts(settings.tolist(), columns)
        self._settings[: len(packed)] = np.frombuffer(packed, np.uint8)
        self._replay(n, x).synchronize()
        rows, drawn = self._tokens[:n], np.empty((n, 4))
        if rows[:, 0].min() < 0:
            return self._out[:n], None
        drawn[:, 0], drawn[:, 1], drawn[:, 2], drawn[:, 3] = rows[:, 0], rows[:, 2].view(np.float32), rows[:, 1], columns
        return self._out[:n], torch.from_numpy(drawn)

    def run(self, n: int, x: Tensor | None, launched: Callable[[], None] | None = None) -> Tensor:
        """Run the step for the first n rows. x: f32 `(n, H)`, what the part in front of this one leaves, on any device.

        launched: called while it runs. Returns rows f32 `(n, outputs)`, on the host where it reads them, overwritten by the next step.
        """
        stream = self._replay(n, x)
        if launched is not None:
            launched()
        if self._result is None:
            self._done.record(stream)
            return self._out[:n]
        if self.draws:
            self._result.copy_(self._out, non_blocking=True)
        stream.synchronize()
        return self._result[:n]

    def _replay(self, n: int, x: Tensor | None) -> torch.cuda.Stream:
        """Launch the step; the stream in which it runs."""
        if x is not None:
            if self._numbers is not None and x.device.type == "cpu":
                self._numbers[:n] = x.numpy()
            else:
                to = self._stream if self._rows is None else self._rows
                assert to is not None
                to[:n].copy_(x)
        with launch_lock(self._device) as stream:
            self._graph.replay()
        return stream


def capture_piece(part: PieceProgram, pools: CachePart, rows: int, width: int, borders: Borders) -> Captured | None:
    """The graph of a part's step, or None where it cannot be captured; says why in the log."""
    before = torch.cuda.current_stream(torch.device(part.span.device))
    try:
        return Captured(part, pools, rows, width, borders)
    except RuntimeError as error:
        torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
        reason = str(error).splitlines()[0]
        logger.warning("steps of %d requests on %s cannot be captured (%s): more slowly, kernel by kernel", rows, part.span.device, reason)
        return None
