"""The executor of a GPU: decode steps as captured graphs that draw their own tokens, launched one step ahead of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.core import env
from exl2nb.core.errors import GenerationError
from exl2nb.core.log import logger
from exl2nb.core.progress import Meter, Sink
from exl2nb.generator.executor import DrawRequest, PendingStep, StepInput
from exl2nb.model.gpu_forward import MAX_STEP_TOKENS_PER_SEQUENCE, mixes_adapters
from exl2nb.model.model import DecodeInputs
from exl2nb.ops import kernel_code, memory_ops
from exl2nb.ops.cuda_sample import MAX_ALTERNATIVES, ROW_BYTES, pack_report, pack_row, sample_rows
from exl2nb.ops.gpu import LoraBuffers, capturing, current_stream, launch_lock
from exl2nb.sampling.draw import Sampled
from exl2nb.sampling.sampler_state import SamplerState

if TYPE_CHECKING:
    from exl2nb.model.model import Model
    from exl2nb.sampling.params import SamplingParams

PENALTY_PARAMS = frozenset(("repetition_penalty", "presence_penalty", "frequency_penalty"))
BIAS_PARAMS = frozenset(("logit_bias", "banned_tokens", "allowed_tokens"))
IN_PROMPT = -(1 << 15)  # added to the count of a token that stands in the prompt


def has_penalties(params: SamplingParams) -> bool:
    """Whether a request's draws depend on what was drawn before."""
    return not PENALTY_PARAMS.isdisjoint(params.changed)


def has_bias(params: SamplingParams) -> bool:
    """Whether a request adds to logits, or takes tokens out, whatever was drawn before."""
    return bool(params.logit_bias or params.banned_tokens or params.allowed_tokens)


def can_write_bias(params: SamplingParams, vocab_size: int, columns: int | None = None) -> bool:
    """Whether `write_bias` can write a request: its ids are the model's, and they do not rule out every token.

    columns: as in `SamplerState`.
    """
    count = vocab_size if columns is None else min(columns, vocab_size)
    left = min(params.allowed_tokens, default=0) < count and sum(i < count for i in params.banned_tokens) < count
    ids = (*params.banned_tokens, *params.allowed_tokens, *(i for i, _ in params.logit_bias))
    return left and max(ids, default=0) < vocab_size


def write_bias(bias: Tensor, draws: Sequence[DrawRequest]) -> None:
    """Write what is added to the logits of requests.

    Args:
        bias: f32 `(R, V)` on the GPU; 0 for rows without, -inf for tokens that are out.
        draws: of the first rows.
    """
    bias.zero_()
    rows, ids, values = [], [], []
    for row, (state, _, _) in enumerate(draws):
        params = state.params
        added = dict(params.logit_bias)
        if params.allowed_tokens:
            bias[row].fill_(-torch.inf)
            added = {i: added.get(i, 0.0) for i in params.allowed_tokens}
        added.update(dict.fromkeys(params.banned_tokens, -torch.inf))
        rows += [row] * len(added)
        ids += added.keys()
        values += added.values()
    if rows:
        places, amounts = torch.tensor([rows, ids]), torch.tensor(values, dtype=torch.float32)
        if bias.is_cuda:
            places, amounts = places.pin_memory(), amounts.pin_memory()
        at = places.to(bias.device, non_blocking=True)
        bias[at[0], at[1]] = amounts.to(bias.device, non_blocking=True)


def write_counts(counts: Tensor, draws: Sequence[DrawRequest], fresh: tuple[Sequence[int], Tensor] | None) -> None:
    """Count the tokens of requests again.

    Args:
        counts: int16 `(R, V)` on the GPU; rows without penalties become 0.
        draws: of the first rows.
        fresh: rows whose last token only the GPU knows, and those tokens, int32 on the GPU.
    """
    counts.zero_()
    rows: list[np.ndarray] = []
    for row, (state, _, _) in enumerate(draws):
        if not has_penalties(state.params):
            continue
        ids, times = np.unique(state.history.new_ids, return_counts=True)
        before = np.unique(state.history.ids[: state.history.prompt_length])
        every = np.union1d(ids, before)
        values = np.where(np.isin(every, before), IN_PROMPT, 0)
        values[every.searchsorted(ids)] += np.minimum(times, 0x7FFF)
        rows.append(np.stack([np.full_like(every, row), every, values]))
    if rows:
        places = torch.from_numpy(np.concatenate(rows, axis=1))
        places = (places.pin_memory() if counts.is_cuda else places).to(counts.device, non_blocking=True)
        counts[places[0], places[1]] = places[2].to(torch.int16)
    if fresh is not None and len(fresh[0]):
        at, tokens = torch.tensor(fresh[0], device=counts.device), fresh[1].long()
        counts[at, tokens] += 1


# ---- The executor: a captured graph per number of sequences.

RESULT_RING_STEPS = 8  # results of as many steps are kept: more than may be unread, the steps of a draft model included
MAX_GRAPH_SEQUENCES = 64  # sequences of the largest graph
MAX_VERIFY_GRAPHS = 16  # graphs with draft tokens, of all numbers of rows, sequences and pages; llm.memory counts those of one sequence
GRAPH_IDLE_STEPS = 256  # such steps without it, after which a graph makes room for another
PROMPT_KERNELS = [
    kernel_code.KernelId(source, name)
    for source, name in (
        ("attention/generic.cu", "rope_append_rows"),
        ("blob/unpack.cu", "unpack_kernel"),
        ("gemm/prefill.cu", "rotate_rows"),
        ("gemm/prefill.cu", "norm_rows<4>"),
        ("gemm/prefill.cu", "gate_rows<8>"),
        ("gemm/prefill.cu", "merge_parts"),
    )
]
GPU_SAMPLING_PARAMS = (
    frozenset(("temperature", "top_k", "top_p", "min_p", "seed")) | PENALTY_PARAMS | BIAS_PARAMS
)  # what the sampling kernel does


class StepKind(NamedTuple):
    """What distinguishes captured steps.

    Attributes:
        rows: tokens at most.
        sequences: 0: every sequence has one token. Else at most so many sequences, of at most `MAX_STEP_TOKENS_PER_SEQUENCE` tokens each.
        width: pages of a sequence at most.
        counted: rows have penalties.
        biased: rows have biases.
        lora_inside: `LoraBuffers.inside` of the adapters.
        lora: where adapters are read; None: none is.
    """

    rows: int
    sequences: int
    width: int
    counted: bool = False
    biased: bool = False
    lora_inside: bool = False
    lora: LoraBuffers | None = None


class CapturedSteps:
    """The captured steps of an executor, by kind.

    Those with draft tokens are kept up to a number; one that was not used for long makes room for another.

    Args:
        most_verifying: captured steps with draft tokens at most.
        idle_steps: steps with draft tokens, without one kind, after which that kind makes room.

    Attributes:
        prepared: captures so far, failed ones included.
    """

    def __init__(self, *, most_verifying: int = MAX_VERIFY_GRAPHS, idle_steps: int = GRAPH_IDLE_STEPS) -> None:
        self._most_verifying, self._idle_steps = most_verifying, idle_steps
        self._graphs: dict[StepKind, StepGraph | None] = {}
        self._verified, self._used = 0, dict[StepKind, int]()  # steps with draft tokens; which of them ran a kind last
        self.prepared = 0

    @property
    def graphs(self) -> dict[StepKind, StepGraph | None]:
        """What was captured; None for a step that could not be."""
        return dict(self._graphs)

    def get(self, kind: StepKind, capture: Callable[[StepKind], StepGraph | None]) -> StepGraph | None:
        """The captured step of a kind.

        Args:
            kind: of the step.
            capture: captures it, or returns None where that is not possible.

        Returns:
            None: the step is launched kernel by kernel instead, which gives the same tokens.
        """
        if kind.sequences:
            self._verified += 1
            if kind not in self._graphs and not self._has_room():
                return None
            self._used[kind] = self._verified
        if kind not in self._graphs:
            self.prepared += 1
            if kind.lora is not None:  # drop those that know buffers which are no longer used
                current = (None, kind.lora)
                self._graphs = {known: graph for known, graph in self._graphs.items() if known.lora in current}
                self._used = {known: last for known, last in self._used.items() if known.lora in current}
            self._graphs[kind] = capture(kind)
        return self._graphs[kind]

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def _has_room(self) -> bool:
        """Whether one more graph with draft tokens may be captured; the one that was used longest ago goes for it, if that is long ago."""
        verifying = [kind for kind, graph in self._graphs.items() if kind.sequences and graph is not None]
        if len(verifying) < self._most_verifying:
            return True
        oldest = min(verifying, key=self._used.__getitem__)
        if self._verified - self._used[oldest] < self._idle_steps:
            return False
        del self._graphs[oldest], self._used[oldest]  # the GPU waits for it: a capture begins with that
        return True


class GpuExecutor:
    """The executor of a model on the GPU; see `generator.executor.Executor`.

    Args:
        model: on a CUDA device.
        cache: there too.

    Attributes:
        captured: the captured steps.
    """

    lookahead = 1

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._device = torch.device(model.capabilities.draw_device)
        self._graphed = env.get("EXL2NB_CUDA_GRAPHS", "1") == "1"
        self.captured = CapturedSteps()
        self.drawn: Tensor | None = None  # ids drawn by the last launch, by logit row
        self._last: StepGraph | None = None

    @property
    def prepared(self) -> int:
        """Kinds of steps that were captured so far, as in `Executor`."""
        return self.captured.prepared

    def prepare(self, progress: Sink | None) -> None:
        """Compile the kernels of prompts and of decode steps of one request, as many at a time as there are cores; others are compiled when
        they are first needed.

        Raises:
            NoCompiler: one of them cannot be compiled.
        """
        with torch.cuda.device(self._device):
            step = StepGraph(self._model, self._cache, StepKind(rows=1, sequences=0, width=1)).step
            kernels = [*kernel_code.kernels_of_run(step), *self._model.kernels(self._cache), *PROMPT_KERNELS]
            del step
            torch.cuda.empty_cache()  # the memory of those steps
            units = kernel_code.missing_kernels(kernels, *torch.cuda.get_device_capability(self._device))
            if not units:
                return
            with Meter("compile kernels", total=len(units), unit="kernels", sink=progress) as meter:
                kernel_code.compile_kernels(units, *torch.cuda.get_device_capability(self._device), progress=meter.step)

    def can_draw(self, state: SamplerState, *, drafts: bool = False) -> bool:
        """Whether the sampling kernel knows every filter of the request; it counts tokens that were drawn, and no draft tokens."""
        drawn = GPU_SAMPLING_PARAMS.issuperset(state.params.changed) and self._model.capabilities.rope_switch is None
        return drawn and can_write_bias(state.params, self._model.outputs, state.columns) and not (drafts and has_penalties(state.params))

    def launch(self, step: StepInput) -> PendingStep:
        """Enqueue a step; returns before it has run.

        Raises:
            OutOfMemory: the GPU has no room for what the step computes.
        """
        try:
            return self._launch(step)
        except RuntimeError as error:
            if not memory_ops.is_out_of_memory(error):
                raise
            what = f"a step of {len(step.batch.input_ids)} tokens in {len(step.batch.context_lens)} requests does not fit"
            advice = "the request ended, the engine goes on; ask for fewer requests at once, or load with a smaller context= or cache='q4'"
            raise memory_ops.out_of_memory_error(error, what, advice) from error

    def _launch(self, step: StepInput) -> PendingStep:
        draws = step.draws
        if step.batch.pictures is None and len(step.batch.input_ids) == len(draws) <= MAX_GRAPH_SEQUENCES and None not in draws:
            drawn = [draw for draw in draws if draw is not None]
            decoding = len(step.batch.context_lens) == len(draws)
            graph = self._graph(step, drawn) if decoding or self._verifies(step) else None
            if graph is not None:
                self._last, self.drawn = graph if decoding else None, graph.drawn
                return graph.replay([draw.top for draw in drawn])
        self._last = None
        ids, source = None, self.drawn if step.drafts is None else step.drafts
        if step.sources is not None and source is not None:
            ids = _ids_with_sources(step.batch.input_ids, step.sources, source, self._device)
        logits = self._model.forward(step.batch, self._cache, ids=ids, fetch=False)
        return self._draw(logits, draws, None if ids is None else _gpu_token_rows(step, ids))

    def copy(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        with self._model.in_order():
            self._cache.copy_page(source, target)

    def close(self) -> None:
        """Wait for the GPU, drop the graphs."""
        torch.cuda.synchronize(self._device)
        self.captured.clear()
        self.drawn = self._last = None

    def _verifies(self, step: StepInput) -> bool:
        """Whether a step in which every token's row is drawn, and sequences have several, can be a captured one."""
        bounds = step.batch.cu_seqlens.numpy()
        known = step.sources is None or step.drafts is not None
        return self._model.capabilities.captures_drafts and known and int((bounds[1:] - bounds[:-1]).max()) <= MAX_STEP_TOKENS_PER_SEQUENCE

    def _graph(self, step: StepInput, draws: list[DrawRequest]) -> StepGraph | None:
        """The captured step, its inputs written; None where it is launched kernel by kernel instead, which gives the same tokens."""
        if step.same and self._last is not None:
            return self._last
        width = step.batch.block_table.shape[1]
        params = {id(draw.state): draw.state.params for draw in draws}.values()
        lora = None
        if step.batch.adapters is not None:
            if self._model.deterministic and mixes_adapters(step.batch):
                return None  # two steps
            lora = self._model.adapter_buffers()
        rows, sequences = captured_sizes(len(draws), len(step.batch.context_lens))
        kind = StepKind(
            rows=rows,
            sequences=sequences,
            width=1 << (width - 1).bit_length(),
            counted=any(map(has_penalties, params)),
            biased=any(map(has_bias, params)),
            lora_inside=lora is not None and lora.inside,
            lora=lora,
        )
        graph = self.captured.get(kind, self._capture)
        if graph is not None:
            graph.set(step, draws, self.drawn if step.drafts is None else step.drafts)
        return graph

    def _capture(self, kind: StepKind) -> StepGraph | None:
        if not self._graphed:
            return None
        before = torch.cuda.current_stream(self._device)
        try:
            return StepGraph(self._model, self._cache, kind).capture()
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
            if self._model.ranks is not None:
                raise self._model.ranks.lost(error) from error  # they have run what this one has not
            reason = str(error).splitlines()[0]
            logger.warning("steps of %d tokens cannot be captured (%s): they are launched kernel by kernel, more slowly", kind.rows, reason)
            return None

    def _draw(self, logits: Tensor, draws: Sequence[DrawRequest | None], fresh: tuple[list[int], Tensor] | None) -> PendingStep:
        """Draw the rows that have a Draw, fetch the others. fresh: see `_gpu_token_rows`."""
        rows = [i for i, draw in enumerate(draws) if draw is not None]
        wanted = [draws[i] for i in rows]
        raw = None if len(rows) == len(draws) else logits.to("cpu", non_blocking=True)
        sampled = None
        if rows:
            mine = [draw for draw in wanted if draw is not None]
            params, counts, bias = _sampling_params(mine).to(self._device), None, None
            if any(has_bias(draw.state.params) for draw in mine):
                bias = torch.empty(len(rows), logits.shape[1], device=self._device)
                write_bias(bias, mine)
            if any(has_penalties(draw.state.params) for draw in mine):
                counts = torch.empty(len(rows), logits.shape[1], dtype=torch.int16, device=self._device)
                known = None
                if fresh is not None:
                    of = [(place, fresh[0][row]) for place, row in enumerate(rows) if fresh[0][row] >= 0]
                    known = [place for place, _ in of], fresh[1][torch.tensor([t for _, t in of], device=self._device, dtype=torch.int64)]
                write_counts(counts, mine, known)
            chosen = logits if raw is None else logits[torch.tensor(rows, device=self._device)]
            ids = torch.zeros(len(rows), dtype=torch.int32, device=self._device)
            results, top_ids, top_logprobs = sample_rows(chosen, params, counts, None, ids, None, None, None, None, 1, False, bias)
            sampled = results[0].cpu().numpy(), top_ids.cpu(), top_logprobs.cpu()
            if self._model.ranks is not None:
                self._model.ranks.check()
            drawn = torch.zeros(len(draws), dtype=torch.int32, device=self._device)
            drawn[torch.tensor(rows, device=self._device)] = ids
            self.drawn = drawn
        else:
            self.drawn = None
            torch.cuda.current_stream(self._device).synchronize()
            if self._model.ranks is not None:
                self._model.ranks.check()
        return _CompletedStep(rows, wanted, sampled, raw)


class PinnedState:
    """What a captured step reads, written on the host into pinned memory that is used again: to allocate it takes as long as to write it.

    Args:
        state: int32 1-D on the GPU. places: begin and end of the parts of it.
    """

    def __init__(self, state: Tensor, places: Sequence[tuple[int, int]]) -> None:
        self._state, self._host, self._sent = state, torch.zeros(len(state), dtype=torch.int32).pin_memory(), torch.cuda.Event()
        self._whole = self._host.numpy()
        self._parts = [self._whole[at:end] for at, end in places]

    def cleared(self) -> list[np.ndarray]:
        """The parts, all 0, as soon as the GPU has read what was written last."""
        self._sent.synchronize()
        self._whole.fill(0)
        return self._parts

    def send(self) -> None:
        """Copy it to the GPU, in the order of its stream."""
        self._state.copy_(self._host, non_blocking=True)
        self._sent.record(current_stream(self._state.device))


class StepGraph:
    """A decode step, captured once: model, draw, and the next step's inputs.

    Of a kind with several tokens per sequence, each token is drawn for as if those before it stayed; padding is tokens of a sequence of
    length 0, and the next step's inputs are left to the host.

    Attributes:
        drawn: int32, the tokens of the last replay.
    """

    def __init__(self, model: Model, cache: KVCache, kind: StepKind) -> None:
        rows, sequences, width = kind.rows, kind.sequences, kind.width
        self.rows, self.sequences, self.width = rows, sequences, width
        device = torch.device(model.capabilities.draw_device)
        self._model, self._cache = model, cache
        several, self._places = sequences > 0, _input_ranges(rows, sequences, width)
        state = torch.zeros(self._places[-1][1], dtype=torch.int32, device=device)
        ids, positions, lens, steps, adapters, table, bounds, self._sources, words = (state[at:end] for at, end in self._places)
        adapters.fill_(-1)
        adapted = None if kind.lora is None else (kind.lora, adapters)
        drawn = torch.zeros_like(ids) if several else ids
        params = words.view(torch.uint8).view(rows, ROW_BYTES)
        results = torch.zeros(RESULT_RING_STEPS, rows, 4, dtype=torch.int32).pin_memory()
        logits = torch.zeros(rows, model.outputs, device=device)
        counts = torch.zeros(rows, model.outputs, dtype=torch.int16, device=device) if kind.counted else None
        bias = torch.zeros(rows, model.outputs, device=device) if kind.biased else None
        inputs = DecodeInputs(ids, positions, lens, table.view(sequences or rows, width), bounds if several else None)
        forward = model.make_decode_launcher(cache, inputs, logits, adapted)
        places = (None, None) if several else (positions, lens)

        def step() -> tuple[Tensor, Tensor]:  # does not know this object: a cycle would keep a closed model's weights until it is collected
            forward()
            wanted = model.capped(logits), params, counts, steps, drawn, *places
            _, top_ids, top_logprobs = sample_rows(*wanted, None, None, RESULT_RING_STEPS, True, bias, results)
            if model.ranks is not None:
                model.ranks.share(state[: 3 * rows])  # tokens, positions, lengths of the next step
            return top_ids, top_logprobs

        self._state, self.ids, self.drawn, self._results = state, ids, drawn, results
        self._counts, self._bias, self._count = counts, bias, 0
        self._done = [torch.cuda.Event() for _ in range(RESULT_RING_STEPS)]
        self._kept = forward, logits, kind.lora  # the graph knows their addresses only
        self._hosts, self._numbers = [PinnedState(state, self._places) for _ in range(1 + GpuExecutor.lookahead)], results.numpy()
        self.step = step

    def capture(self) -> StepGraph:
        """Record the step."""
        device = self._state.device
        if self._model.ranks is not None:
            self._model.ranks.record(self._cache, self.rows, self.width)
        self.step()  # with no sequence at all: nothing is written to the cache; loads the kernels, which a capture forbids
        with capturing:
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            # another model's thread may allocate and wait meanwhile: so a stream of its own, and errors of this thread only
            with torch.cuda.graph(self._graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
                self._top = self.step()
        if self._model.ranks is None:
            self._graph.replay()  # the first one takes longer
        return self

    def set(self, step: StepInput, draws: list[DrawRequest], drawn: Tensor | None) -> None:
        """Write everything that the step reads; drawn: the tokens on the GPU that `step.sources` counts."""
        batch, n, b, rows = step.batch, len(draws), len(step.batch.context_lens), self.rows
        self._hosts.append(self._hosts.pop(0))
        ids, positions, lens, steps, adapters, table, bounds, sources, params = self._hosts[0].cleared()
        ids[:n], positions[:n], lens[:b] = batch.input_ids.numpy(), batch.positions.numpy(), batch.context_lens.numpy()
        steps[:] = self._count
        adapters[:] = -1
        if batch.adapters is not None:
            adapters[:n] = batch.adapters.numpy()
        table.reshape(-1, self.width)[:b, : batch.block_table.shape[1]] = batch.block_table.numpy()
        if self.sequences:  # those behind have no token, but for the last one, which has the padding
            bounds[: b + 1], bounds[b + 1 :], bounds[-1] = batch.cu_seqlens.numpy(), n, rows
        packed = packed_params(draws)
        params[: len(packed)] = packed
        new_ids, all_drafts = None, step.drafts is not None and step.sources is not None and int(step.sources.min()) >= 0
        if all_drafts:
            sources[:n] = step.sources
        elif step.sources is not None and drawn is not None:
            new_ids = _ids_with_sources(batch.input_ids, step.sources, drawn, self.ids.device)
        self._hosts[0].send()
        if all_drafts and step.drafts is not None:
            torch.index_select(step.drafts, 0, self._sources[:n], out=self.ids[:n])
        elif new_ids is not None:
            self.ids[:n] = new_ids
        if self._model.ranks is not None:
            self._model.ranks.set_rows(self._cache, rows, self.width, torch.from_numpy(table.copy()))
            self._model.ranks.share(self._state[: 3 * rows])
        if self._counts is not None:
            fresh = [] if step.sources is None else [row for row, source in enumerate(step.sources.tolist()) if source >= 0]
            tokens = self.ids[torch.tensor(fresh, device=self.ids.device, dtype=torch.int64)]
            write_counts(self._counts, draws, (fresh, tokens))
        if self._bias is not None:
            write_bias(self._bias, draws)

    def replay(self, tops: list[int]) -> PendingStep:
        """Enqueue the step for the first rows; tops: number of alternatives of each."""
        if self._model.ranks is not None:
            self._model.ranks.replay(self._cache, self.rows, self.width)
        with launch_lock(self._state.device) as stream:
            self._graph.replay()
        alternatives = None
        if max(tops):
            alternatives = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in self._top)
        slot = self._count % RESULT_RING_STEPS
        done = self._done[slot]
        done.record(stream)
        self._count += 1
        return _PendingGraph(done, self._numbers[slot], tops, alternatives, self._model)


class _PendingGraph:
    """A replayed graph that may still run."""

    def __init__(
        self, done: torch.cuda.Event, results: np.ndarray, tops: list[int], alternatives: tuple[Tensor, ...] | None, model: Model
    ) -> None:
        self._done, self._results, self._tops, self._alternatives, self._model = done, results, tops, alternatives, model

    def result(self) -> list[Sampled | np.ndarray]:
        """Wait for the graph; then one entry per row."""
        self._done.synchronize()
        if self._model.ranks is not None:
            self._model.ranks.check()
        ids, logprobs = self._alternatives if self._alternatives is not None else (None, None)
        return [*_read_sampled(self._results[: len(self._tops)], ids, logprobs, self._tops)]


class _CompletedStep:
    """A step whose results are on the host already."""

    def __init__(
        self, rows: list[int], draws: Sequence[DrawRequest | None], sampled: tuple[np.ndarray, Tensor, Tensor] | None, raw: Tensor | None
    ) -> None:
        self._rows, self._draws, self._sampled, self._raw = rows, draws, sampled, raw

    def result(self) -> list[Sampled | np.ndarray]:
        """One entry per logit row."""
        out: list[Sampled | np.ndarray] = [] if self._raw is None else list(self._raw.numpy())
        if self._sampled is not None:
            chosen = _read_sampled(*self._sampled, [draw.top if draw is not None else 0 for draw in self._draws])
            if self._raw is None:
                return [*chosen]
            for row, token in zip(self._rows, chosen):
                out[row] = token
        return out


def _read_sampled(results: np.ndarray, top_ids: Tensor | None, top_logprobs: Tensor | None, tops: list[int]) -> list[Sampled]:
    """The kernel's results `(R, 4)` as the host's."""
    values = results.tolist()
    logprobs = results[:, 2].copy().view(np.float32).tolist()
    chosen = []
    for r, ((token, rank, _, _), logprob, top) in enumerate(zip(values, logprobs, tops)):
        if token < 0:
            raise GenerationError("the model's largest logit is not finite; expected finite numbers: check the weights")
        best: tuple[tuple[int, float], ...] = ()
        if top and top_ids is not None and top_logprobs is not None:
            best = tuple((i, p) for i, p in zip(top_ids[r, :top].tolist(), top_logprobs[r, :top].tolist()) if i >= 0)
        chosen.append(Sampled(token, logprob, rank, best))
    return chosen


def packed_params(draws: Sequence[DrawRequest]) -> np.ndarray:
    """Settings of draws as the sampling kernel reads them, int32 `(R * 12,)`."""
    rows: list[bytes] = []
    before, most, row = None, -1, b""
    for state, number, top in draws:
        if state is before and top == most:  # draft tokens of one request
            rows.append(row[:-8] + number.to_bytes(8, "little"))
            continue
        p, before, most = state.params, state, top
        penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        reported = pack_report(min(top, MAX_ALTERNATIVES), state.columns or 0)
        row = pack_row(p.temperature, p.top_p, p.min_p, *penalties, p.top_k, reported, state.seed, number)
        rows.append(row)
    return np.frombuffer(b"".join(rows), np.int32)


def _sampling_params(draws: Sequence[DrawRequest]) -> Tensor:
    return torch.from_numpy(packed_params(draws).copy()).view(torch.uint8).view(len(draws), -1)


def _gpu_token_rows(step: StepInput, ids: Tensor) -> tuple[list[int], Tensor]:
    """For each logit row the token of the step that only the GPU knows, or -1; and all tokens."""
    assert step.sources is not None, "tokens that are on the GPU"
    rows = step.batch.logit_rows.numpy()
    return np.where(step.sources[rows] >= 0, rows, -1).tolist(), ids


def _ids_with_sources(ids: Tensor, sources: np.ndarray, drawn: Tensor, device: torch.device) -> Tensor:
    """The ids of a step on the GPU; those that only the GPU knows are taken from the tokens drawn there."""
    known, rows = torch.stack([ids, torch.from_numpy(sources)]).pin_memory().to(device, non_blocking=True)
    return torch.where(rows >= 0, drawn[rows.clamp(min=0).long()], known)


def _input_ranges(rows: int, sequences: int, width: int) -> list[tuple[int, int]]:
    """Where ids, positions, lens, steps, adapters, block table, bounds, feed and settings of a captured step are in its state."""
    lines, places, at = sequences or rows, list[tuple[int, int]](), 0
    for size in (rows, rows, lines, rows, rows, lines * width, sequences + 1 if sequences else 0, rows if sequences else 0):
        places.append((at, at + size))
        at += size
    at += at % 2  # the settings have numbers of eight bytes
    return [*places, (at, at + rows * ROW_BYTES // 4)]


def captured_sizes(tokens: int, sequences: int) -> tuple[int, int]:
    """Rows and sequences of the captured step that takes so many; no sequences: each has one token."""
    if tokens == sequences:
        return graph_rows(tokens), 0
    return (tokens, 1) if sequences == 1 else (graph_rows(tokens), graph_rows(sequences) + 1)


def graph_rows(rows: int) -> int:
    """Rows of the captured step that takes so many."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
