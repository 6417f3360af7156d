"""A loaded model: one forward step over a paged cache. Knows nothing of files, requests or sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import CachePart, KVCache
from exl2nb.cache.spec import PAGE_SIZE, CacheSpec
from exl2nb.core.errors import ContextOverflow, EngineClosed, OptionError
from exl2nb.model.batch import Batch, batch_tensors
from exl2nb.model.config import ModelConfig
from exl2nb.model.gpu_forward import GpuForward, cache_formats
from exl2nb.model.layers import MLP, Embedding, Head, Layer, RoutedMLP, field_tensors
from exl2nb.model.rope import both_tables, rope_switch, rope_tables
from exl2nb.model.runner import GPU_CHUNKS, HOST_CHUNKS, Capabilities
from exl2nb.ops import gpu_prefill
from exl2nb.ops.cpu_sample import draw_ahead, join_ahead, step_draw
from exl2nb.ops.gpu import LoraBuffers, unpack_half
from exl2nb.ops.interpreter import CpuBackend, Inputs, interpret, observing
from exl2nb.ops.kernel_code import KernelId
from exl2nb.ops.placement import Placement
from exl2nb.ops.step_plan import PlannedProgram

if TYPE_CHECKING:
    from exl2nb.model.parallel import ParallelModel
    from exl2nb.model.points import Edits, Point
    from exl2nb.model.traced_forward import Borrowed, Seen
    from exl2nb.ops.lora_table import Adapter, LoraTable

ROPE_SCRATCH_ROWS = (
    4096  # rows behind the RoPE tables of a model with three positions per token: written anew for the pictures of each step
)
SMALL_MODEL_BYTES = 64 << 20  # of weights: what may still stay in a processor's cache


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was begun. drawn, logits: what `ops.draw_rows` draws, and from which rows; both are there after `join`."""

    drawn: Tensor
    logits: Tensor
    _kept: tuple[object, ...]  # what owns the tensors that are read until then

    def join(self) -> None:
        """Take part in the step until it is complete."""
        join_ahead(self.drawn)


class LayerRange(NamedTuple):
    """Layers [first, last) on a device. The embedding is with the first span of a model, the head with the last.

    lent: computed there, with their cache, while their weights stay on the host, from where they are copied for every step.
    """

    device: str
    first: int
    last: int
    lent: bool = False


@dataclass(frozen=True)
class Network:
    """The layers of a model in running order."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head

    def steps(self, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> list[ops.Op]:
        """The ops of a step, with these RoPE tables."""
        return [self.embedding.op, *(op for layer in self.layers for op in layer.ops(ropes)), self.head.op]

    def tensors(self) -> Iterator[Tensor]:
        """Every weight once."""
        seen: set[int] = set()
        for part in (self.embedding, *self.layers, self.head):
            for tensor in field_tensors(part):
                if tensor.data_ptr() not in seen:
                    seen.add(tensor.data_ptr())
                    yield tensor


class DecodeInputs(NamedTuple):
    """What a captured step reads, int32 on the GPU: ids, positions `(T,)`, lens `(B,)`, table `(B, pages)`.

    bounds: `(B + 1,)`, the first token of each sequence and the last one's end, at most eight tokens each; None: one token each. A
    sequence of length 0 is a row that nothing is computed for. logit_rows: `(R,)`, tokens that want logits; None: all.
    """

    ids: Tensor
    positions: Tensor
    lens: Tensor
    table: Tensor
    bounds: Tensor | None = None
    logit_rows: Tensor | None = None


class Model:
    """A network ready to run. Made by `loader.load_model`.

    config: what it is. context: longest sequence it runs, in tokens. device: where it runs. weight_bytes: memory of all weights.
    spans: the layers of each device, in running order.
    rope_switch: sequences longer than this rotate with other factors (longrope), see `LayerRange.long`; None: all rotate alike.
    capabilities: what it can do, as a `StepRunner` declares it. rope_rows: positions in the RoPE tables, which grow with use.
    adapters: what the rows of `Batch.adapters` mean, see `set_adapters`.
    Not thread-safe: one thread runs it (the engine's).
    """

    def __init__(self, config: ModelConfig, network: Network, *, context: int, device: str = "cpu", deterministic: bool = False) -> None:
        self.config, self.context, self.device, self.deterministic = config, context, device, deterministic
        self.cache_shape = config.num_layers, config.num_kv_heads, config.head_dim
        self._gpu: GpuForward | None = None
        self.weight_bytes = sum(tensor.nbytes for tensor in network.tensors())
        self._network: Network | None = network
        self._program: ops.Program | None = None
        self._code = torch.empty(0, dtype=torch.int64)  # the program's
        self.rope_switch = rope_switch(config, context)
        self._ropes: dict[str, tuple[Tensor, Tensor]] = {}
        self.rope_rows = 0
        self.adapters: LoraTable | None = None
        self.spans: tuple[LayerRange, ...] = (LayerRange(device, 0, config.num_layers),)
        on_cpu = device == "cpu"
        routed = any(isinstance(layer.mlp, RoutedMLP) for layer in network.layers)
        fused = on_cpu and not config.logit_softcap  # tokens are drawn from raw logits
        self.capabilities = Capabilities(
            placement=Placement.on(device, config.num_layers),
            draw_device=device,
            fused_draw=fused,
            # in a small model the host's share of a step counts
            draws_ahead=fused and not routed and self.rope_switch is None and self.weight_bytes <= SMALL_MODEL_BYTES,
            captures_drafts=not on_cpu,
            rope_switch=self.rope_switch,
            chunks=HOST_CHUNKS if on_cpu else GPU_CHUNKS,
        )

    @property
    def network(self) -> Network:
        """The layers.

        Raises:
            EngineClosed: the model was closed.
        """
        if self._network is None:
            raise EngineClosed("the model was closed; load it again")
        return self._network

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that decoding one token reads: of the experts those that it uses, of the embedding one row.

        Raises:
            EngineClosed: the model was closed.
        """
        network = self.network
        tables = [table for table in (network.embedding.table, network.embedding.position_table) if table is not None]
        rows = sum(table.nbytes - table.nbytes // table.shape[0] for table in tables)
        return self.weight_bytes - rows - sum(layer.mlp.unused_expert_bytes for layer in network.layers if isinstance(layer.mlp, RoutedMLP))

    @property
    def ranks(self) -> ParallelModel | None:
        """Of a model whose ranks are on GPUs: what captured steps tell them. None: it runs in this process alone."""
        return None

    @property
    def where(self) -> str:
        """The devices in words."""
        return self.device

    def cache_spec(self, num_tokens: int, *, mode: str = "fp16") -> CacheSpec:
        """The spec of a cache for this model that holds at least `num_tokens` tokens."""
        return CacheSpec(*self.cache_shape, max(1, -(-num_tokens // PAGE_SIZE)), mode)

    def new_cache(self, spec: CacheSpec) -> KVCache:
        """A cache where the model's layers are."""
        return KVCache(spec, self.capabilities.placement)

    def forward(self, batch: Batch, cache: KVCache, *, ids: Tensor | None = None, fetch: bool = True) -> Tensor:
        """Run one step as a single call into the compiled engine.

        Args:
            batch: T tokens of B sequences, on the host. Tokens before them must be in the cache already.
            cache: of this model's layers, heads and head_dim; the step's K and V are written to `batch.slot_mapping`.
            ids: int32 `(T,)` on the GPU, in place of the batch's; for models whose layers are all on GPUs.
            fetch: a model on several devices returns logits on the host. False: they stay where the last layer is.

        Returns:
            Logits f32 `(R, V)`, one row for each of `batch.logit_rows`. On a GPU they may not be there yet. On the CPU the same sequence
            gives the same bits however it is cut into steps and whatever else is in the batch.

        Raises:
            ContextOverflow: a sequence is longer than `context`.
            OptionError: the cache belongs to another shape of model.
            EngineClosed: the model was closed.
        """
        self._prepare(batch, cache)
        if batch.pictures is not None:
            return self._forward_with_pictures(batch, cache, ids)
        batch = self._with_rope_rows(batch)
        table, lora = self._lora(batch)
        if self.device != "cpu":
            return self.capped(self.gpu.run(batch, cache, ids=ids, lora=table))
        assert self._program is not None
        return self.capped(self._program.run(*batch_tensors(batch), cache.k, cache.v, *lora))

    @property
    def network_and_program(self) -> tuple[Network, ops.Program]:
        """The layers, and the program that they are recorded in; its ops stay the same ones.

        Raises:
            EngineClosed: the model was closed. OptionError: it has several programs.
        """
        self.capabilities.require("adapters")
        network = self.network
        if self.device != "cpu":
            return network, self.gpu.program
        if self._program is None:
            self._extend_ropes(network, PAGE_SIZE)
        assert self._program is not None
        return network, self._program

    def set_adapters(self, adapters: Sequence[Adapter | None]) -> None:
        """What row 0, 1, ... of `Batch.adapters` mean from the next step on; steps that run keep what they began with."""
        from exl2nb.ops.lora_table import LoraTable

        self.adapters = LoraTable(self.network_and_program[1], tuple(adapters))

    def _lora(self, batch: Batch) -> tuple[LoraTable | None, tuple[Tensor | None, Tensor | None]]:
        """What owns the adapters, to be held while the step runs, and the step's arguments."""
        if batch.adapters is None:
            return None, (None, None)
        if (table := self.adapters) is None:
            raise OptionError("the batch names adapters, and the model has none: set_adapters comes first")
        return table, (table.words, batch.adapters)

    def step_draw(self, batch: Batch, cache: KVCache, settings: Tensor, top: int, columns: int | None = None) -> tuple[Tensor, Tensor]:
        """`forward`, and the draw of each logit row, in one call: what `ops.draw_rows` returns for these arguments, and the logits."""
        self._prepare(batch, cache)
        if self.rope_switch is not None:
            batch = self._with_rope_rows(batch)
        _kept, lora = self._lora(batch)
        return step_draw(self._code, *batch_tensors(batch), cache.k, cache.v, settings, top, *lora, columns)

    def draw_ahead(
        self, batch: Batch, cache: KVCache, draw: tuple[Tensor, int, int | None], sources: tuple[Tensor, Tensor] | None = None
    ) -> Ahead:
        """Begin a step that draws its tokens, and return before it has run; errors as in `forward`.

        Args:
            batch: at most `ops.cpu_sample.MOST_ROWS` tokens; it may be overwritten afterwards.
            cache: as in `forward`.
            draw: settings, number of alternatives and columns, as `ops.draw_rows` takes them.
            sources: feed and previous, as `ops.draw_ahead` takes them; None = all tokens are in the batch.
        """
        self._prepare(batch, cache)
        program = self._program
        assert program is not None
        (settings, top, columns), (feed, previous) = draw, sources or (None, None)
        kept, lora = self._lora(batch)
        drawn, logits = draw_ahead(self._code, *batch_tensors(batch), cache.k, cache.v, settings, top, feed, previous, *lora, columns)
        return Ahead(drawn, logits, (program, kept))

    def adapter_buffers(self) -> LoraBuffers:
        """Where captured steps of a model on the GPU find its adapters, as they are now."""
        assert self.adapters is not None, "a batch names adapters"
        return self.gpu.lora_buffers(self.adapters)

    def _forward_with_pictures(self, batch: Batch, cache: KVCache, ids: Tensor | None) -> Tensor:
        """Run a step in which some sequences have pictures. These run op by op, the others as a step of their own."""
        pictures = batch.pictures
        assert pictures is not None, "there are pictures"
        bounds = batch.cu_seqlens[1:].long()
        with_pictures = torch.searchsorted(bounds, pictures.rows, right=True).unique().tolist()
        without = [row for row in range(len(bounds)) if row not in with_pictures]
        if without:
            out = torch.empty(len(batch.logit_rows), self.config.vocab_size, device=self.device)
            for chosen in (with_pictures, without):
                piece, tokens, rows = batch.select(chosen)
                logits = self.forward(piece, cache, ids=None if ids is None else ids[tokens.to(ids.device)])
                if len(rows):
                    out[rows.to(out.device)] = logits
            return out
        if batch.adapters is not None and bool((batch.adapters >= 0).any()):
            raise OptionError("a request with pictures runs without adapters: leave lora or the pictures out")
        self._prepare(batch, cache)
        batch, rows = self._with_rope_rows(batch), pictures.rows.to(self.device)

        def show(name: str, x: Tensor) -> None:
            part, _, rest = name.partition(".")
            if part == "embedding":
                x[rows] = pictures.values.to(x.device)
            elif rest.endswith(".output") and int(rest.partition(".")[0]) < len(pictures.deep):
                x[rows] += pictures.deep[int(rest.partition(".")[0])].to(x.device)

        if self.device == "cpu":
            return self._by_ops(batch, cache, show)
        inputs = self.gpu.inputs(batch, ids)
        sequences = gpu_prefill.Sequences(batch.cu_seqlens.tolist(), batch.context_lens.tolist())
        at = observing(show)
        return self.capped(gpu_prefill.prefill(self.gpu.program, inputs, sequences, cache.k, cache.v, at=at, blocks=batch.blocks()))

    @property
    def gpu(self) -> GpuForward:
        """What runs a model on the GPU; its tables cover the whole context, so it never changes."""
        network = self.network
        if self._gpu is None:
            self._extend_ropes(network, self.context)
            assert self._program is not None
            self._gpu = GpuForward(self._program, torch.device(self.device), deterministic=self.deterministic)
        return self._gpu

    @property
    def outputs(self) -> int:
        """Numbers in a row of logits on the GPU."""
        return self.gpu.vocab

    def kernels(self, cache: KVCache) -> list[KernelId]:
        """The kernels of the first steps of one sequence on the GPU."""
        return self.gpu.kernels(cache)

    def make_decode_launcher(
        self, cache: KVCache, inputs: DecodeInputs, logits: Tensor, adapters: tuple[LoraBuffers, Tensor] | None
    ) -> Callable[[], None]:
        """Make the function that launches a decode step on the GPU, as often as it is called. A graph may capture it.

        Args:
            cache: as in `forward`.
            inputs: read by each call.
            logits: f32 `(R, V)` to fill.
            adapters: as `ops.gpu.StepKernels.run` takes them.
        """
        rows, bounds = len(inputs.ids), inputs.bounds
        kernels = self.gpu.step_kernels(rows)
        if bounds is None:
            bounds = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        formats, heads = cache_formats(cache), (cache.spec.num_kv_heads, cache.spec.head_dim)

        def step() -> None:
            kernels.run(
                inputs.ids, inputs.positions, inputs.table, bounds, inputs.lens, inputs.logit_rows, cache.k, cache.v, formats, heads,
                logits, lora=adapters,
            )  # fmt: skip

        return step

    def in_order(self) -> AbstractContextManager[object]:
        """Around work in torch's current streams: after captured steps that were launched, and before the next ones."""
        return nullcontext()

    def forward_by_ops(self, batch: Batch, cache: KVCache, observe: Callable[[str, Tensor], None] | None = None) -> Tensor:
        """`forward` op by op, with the same bits; on the GPU as prompts run, with the batch there too.

        A batch with an adapter has the same one for all tokens; on the CPU it is merged into each matrix, so the bits are not the step's.

        observe: called with "embedding", then for each layer "layers.i.attention", "layers.i.middle" and "layers.i.output". The
        tensors are the model's buffers and change afterwards: copy them to keep them.
        """
        self.capabilities.require("hidden states")
        self._prepare(batch, cache)
        batch = self._with_rope_rows(batch)
        table, (lora, adapters) = self._lora(batch)
        if self.device != "cpu":
            return self.capped(forward_gpu_observed(self.gpu.program, batch, cache, observe, table))
        return self._by_ops(batch, cache, observe, lora, adapters)

    def _by_ops(
        self,
        batch: Batch,
        cache: KVCache,
        observe: Callable[[str, Tensor], None] | None,
        lora: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        assert self._program is not None
        backend = CpuBackend(Inputs(*batch_tensors(batch)), cache.k, cache.v, blocks=batch.blocks(), lora=lora, adapters=adapters)
        return self.capped(interpret(self._program.steps, backend, at=observing(observe)))

    @cached_property
    def points(self) -> dict[str, Point]:
        """Every point of `trace`, in running order."""
        from exl2nb.model.points import model_points

        return model_points(self.config)

    def trace(
        self,
        batch: Batch,
        cache: KVCache,
        *,
        wanted: frozenset[str] = frozenset(),
        seen: Seen = lambda point, value, start: None,
        edits: Edits | None = None,
        borrowed: Mapping[int, Borrowed] | None = None,
    ) -> Tensor:
        """`forward` of one sequence, op by op, seen and edited at the model's `points`; without edits with the same bits.

        Args:
            batch: tokens of one sequence; on the model's device. cache: as in `forward`.
            wanted: names of the points that `seen` is called for; its tensors are the model's buffers: copy them to keep them.
            edits: what is replaced. borrowed: layers that run with another model's weights, from `layer` of that model.

        Returns:
            Logits f32 `(R, V)`.
        """
        self.capabilities.require("trace and patch")
        network, batch = self._prepare(batch, cache), self._with_rope_rows(batch)
        program = self._program if self.device == "cpu" else self.gpu.program
        assert program is not None
        parallel = any(layer.parallel for layer in network.layers)
        from exl2nb.model.points import Edits
        from exl2nb.model.traced_forward import Traced

        traced = Traced(
            program, batch, cache, known=self.points, wanted=wanted, seen=seen, edits=edits or Edits(self.points, {}, 0), borrowed=borrowed,
            parallel=parallel, logit_scale=self.config.logit_scale,
        )  # fmt: skip
        return self.capped(traced.run())

    def layer(self, index: int, tokens: int) -> Borrowed:
        """A layer's steps for sequences of up to `tokens` tokens, for `trace` of another model of this shape."""
        self.capabilities.require("trace and patch")
        network = self.network
        if self.device != "cpu":
            program = self.gpu.program
        else:
            if tokens > self.rope_rows:
                self._extend_ropes(network, tokens)
            program = self._program
        assert program is not None
        from exl2nb.model.traced_forward import Borrowed

        return Borrowed(program.layers[index], program)

    def matrix(self, layer: int, part: str) -> Tensor | None:
        """A layer's matrix f32 `(K, N)` on the CPU, as the engine multiplies by it; None = experts.

        part: "qkv", "o", "up" ([gate; up]) or "down"; of layer -1 "head", or "embed", the table `(V, H)` times its factor.
        """
        self.capabilities.require("matrices")
        network = self.network
        if layer < 0 and part == "embed":
            return network.embedding.table.float().cpu() * network.embedding.scale
        attention, mlp = network.layers[layer].attention, network.layers[layer].mlp
        if part == "head":
            blob = network.head.matrix
        elif part in ("qkv", "o"):
            blob = attention.qkv if part == "qkv" else attention.o
        elif isinstance(mlp, MLP):
            blob = mlp.up if part == "up" else mlp.down
        else:
            return None
        with ops.on_device(str(blob.device)):
            return ops.unpack(blob) if blob.device.type == "cpu" else unpack_half(blob).float().cpu()

    def unembed(self, x: Tensor) -> Tensor:
        """Logits f32 `(R, V)` of rows of the residual stream f32 `(R, H)`, after the last norm: the logit lens."""
        self.capabilities.require("the logit lens")
        network, x = self.network, x.to(self.device)
        if self.device == "cpu":
            return self.capped(network.head(x))
        return self.capped(gpu_prefill.unembed_rows(self.gpu.program, x))

    def final_norm(self, x: Tensor) -> Tensor:
        """What the head multiplies: the last layer's output f32 `(T, H)` after the model's last norm, without its factor on the logits."""
        norm = self.network.head.norm
        if norm.layer:
            x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=norm.eps)
        else:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        x = x if norm.weight is None else x * (norm.weight / self.config.logit_scale)
        return x if norm.bias is None else x + norm.bias / self.config.logit_scale

    def close(self) -> None:
        """Drop every tensor; the memory returns at once. Harmless when repeated."""
        self._network = self._program = self._gpu = self.adapters = None
        self._ropes = {}

    def __repr__(self) -> str:
        state = "closed" if self._network is None else f"{self.weight_bytes / 2**20:.1f} MiB on {self.where}"
        return f"{type(self).__name__}({self.config.architecture}, {self.config.num_layers} layers, context {self.context}, {state})"

    def _prepare(self, batch: Batch, cache: KVCache) -> Network:
        network = self._network or self.network  # a step makes few calls; the property raises where there is none
        spec, mine = cache.spec, self.cache_shape
        if (spec.num_layers, spec.num_kv_heads, spec.head_dim) != mine:
            theirs = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
            raise OptionError(f"cache: (layers, KV heads, head_dim) is {theirs}; expected {mine}: make it with Model.cache_spec")
        longest = max(batch.context_lens.tolist())  # a tenth of the time of `max()` of so small a tensor
        if longest > self.context:
            raise ContextOverflow(
                f"sequence of {longest} tokens; the model was loaded for {self.context}: shorten it, or load with context="
            )
        if self.config.mrope is not None and len(batch.positions):
            longest = max(longest, int(batch.positions.max()) + 1)  # time in a video may run ahead of its tokens
            if batch.pictures is not None and batch.pictures.axes is not None:
                longest = max(longest, int(batch.pictures.axes.max()) + 1)
            if longest > self.context:
                raise ContextOverflow(
                    f"a video reaches position {longest - 1}; the model was loaded for {self.context}: load with context="
                )
        if longest > self.rope_rows and self.device == "cpu":
            self._extend_ropes(network, longest)
        return network

    def _extend_ropes(self, network: Network, longest: int) -> None:
        """Extend the RoPE tables to a power of two of pages, so a model loaded for a huge context pays only for what it uses."""
        rows = PAGE_SIZE << (max(longest, 4 * PAGE_SIZE) - 1).bit_length() - (PAGE_SIZE - 1).bit_length()
        kinds = {self.config.rope_kind(layer) for layer in range(self.config.num_layers)}
        self._ropes = {kind: self._tables(rows, kind) for kind in sorted(kinds)}
        if self.device != "cpu":
            self._ropes = {kind: (cos.to(self.device), sin.to(self.device)) for kind, (cos, sin) in self._ropes.items()}
        self.rope_rows = rows
        self._record(network)

    def _record(self, network: Network) -> None:
        """Write the program with the RoPE tables as they are."""
        program = ops.Program(self.device)
        program.add(*network.steps(self._ropes))
        self._program, self._code = program, program.code

    def planned_program(self, program: PlannedProgram | None = None) -> PlannedProgram:
        """The program of a model on the CPU as a GPU would run it, for `ops.step_plan.step_plan`. No weight is changed.

        Args:
            program: an empty one, to be filled.
        """
        if self._network is None:
            raise EngineClosed("the model was closed; load it again")
        if self.device != "cpu":
            raise OptionError(f"planned_program: the model is on {self.device}; load it with device='cpu'")
        kinds = {self.config.rope_kind(layer) for layer in range(self.config.num_layers)}
        ropes = {kind: self._tables(PAGE_SIZE, kind) for kind in sorted(kinds)}
        program = PlannedProgram() if program is None else program
        program.add(*self._network.steps(ropes))
        return program

    def _tables(self, rows: int, kind: str) -> tuple[Tensor, Tensor]:
        if self.rope_switch is not None:
            return both_tables(self.config, rows, self.rope_switch, kind=kind)
        cos, sin = rope_tables(self.config, rows, context=self.context, kind=kind)
        if self.config.mrope is None:
            return cos, sin
        behind = torch.zeros(ROPE_SCRATCH_ROWS, cos.shape[1])
        return torch.cat((cos, behind)), torch.cat((sin, behind))

    def _with_rope_rows(self, batch: Batch) -> Batch:
        """The batch with rows of the RoPE tables for positions, where short and long sequences have rows of their own, or patches do."""
        if batch.pictures is not None and batch.pictures.axes is not None and self.config.mrope is not None:
            batch = replace(batch, positions=self._patch_rows(batch.positions, batch.pictures.rows, batch.pictures.axes))
        if self.rope_switch is None:
            return batch
        if batch.long is None:
            return replace(batch, positions=2 * batch.positions + 1)
        tokens = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).long()
        return replace(batch, positions=2 * batch.positions + batch.long.repeat_interleave(tokens))

    def _patch_rows(self, positions: Tensor, rows: Tensor, axes: Tensor) -> Tensor:
        """Positions int32 `(T,)` where those of patches are rows behind the tables, which are written here."""
        assert self.config.mrope is not None, "the model has three positions per token"
        if len(rows) > ROPE_SCRATCH_ROWS:
            raise OptionError(f"a step has {len(rows)} tokens of pictures; expected at most {ROPE_SCRATCH_ROWS}: run the prompt in pieces")
        which = torch.tensor(self.config.mrope.axes())
        for cos, sin in self._ropes.values():
            behind = len(cos) - ROPE_SCRATCH_ROWS
            for table in (cos, sin):
                # of each frequency the row of the axis that turns it
                turned = table[axes[:, which].to(table.device), torch.arange(len(which), device=table.device)]
                table[behind : behind + len(rows)] = turned
        moved = positions.clone()
        moved[rows.to(moved.device)] = torch.arange(self.rope_rows, self.rope_rows + len(rows), dtype=torch.int32, device=moved.device)
        return moved

    def capped(self, logits: Tensor) -> Tensor:
        """The logits after the model's softcap, where it has one."""
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits


def forward_gpu_observed(
    program: ops.Program,
    batch: Batch,
    cache: KVCache | CachePart,
    observe: Callable[[str, Tensor], None] | None,
    table: LoraTable | None = None,
) -> Tensor:
    """Logits f32 `(R, V)` of a batch on the GPU, before the softcap. observe: see `Model.forward_by_ops`."""
    lora = None
    if table is not None and batch.adapters is not None:
        lora = gpu_prefill.Adapters.of(torch.device(program.device), table.adapters, batch.adapters.cpu(), batch.logit_rows.cpu())
    inputs = Inputs(*batch_tensors(batch))
    sequences = gpu_prefill.Sequences(batch.cu_seqlens.tolist(), batch.context_lens.tolist())
    return gpu_prefill.prefill(program, inputs, sequences, cache.k, cache.v, at=observing(observe), lora=lora)
