"""Prompts through layers of the host that are copied to a device: near the CPU's logits, the same bits every time, in the right order.

The CPU stands for the GPU here, with the numbers of a GPU's prompts (fp16 inputs of products).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import exl2nb as ex
from exl2nb import ops
from exl2nb.cache.pool import CachePart
from exl2nb.cache.spec import PAGE_SIZE
from exl2nb.cli.models import add_load_options, load_options
from exl2nb.core.errors import OptionError
from exl2nb.llm.load import _streaming
from exl2nb.model import split, streaming
from exl2nb.model.batch import Batch
from exl2nb.model.batch import SequenceSlice as Tokens
from exl2nb.model.layers import field_tensors
from exl2nb.model.loader import load_model
from exl2nb.model.model import LayerRange, Model
from exl2nb.model.runner import GPU_CHUNKS, HOST_CHUNKS
from exl2nb.model.split import SplitModel
from exl2nb.model.streaming import (
    Buffers,
    Lanes,
    LayerStream,
    PinnedLayer,
    Streaming,
    min_streamed_rows,
    pack_layer,
    streamed_layers,
    with_streamed,
)

from .zoo import build, build_wide, config_of, write, write_exl2

DEMO = Path(ex.__file__).parent / "demo_model"
ROWS = 65


def halves(directory: Path, rows: int = ROWS, *, device: str = "cpu", lanes: Lanes | None = None) -> SplitModel:
    """The first half of the layers on the host. device: of the second, and of long prompts."""
    layers = config_of(directory).num_layers
    spans = [LayerRange("cpu", 0, (layers + 1) // 2), LayerRange(device, (layers + 1) // 2, layers)]
    how = Streaming(device, rows, lanes=Lanes if lanes is None else lambda device: lanes)
    model = load_model(directory, spans=spans, streaming=how)
    assert isinstance(model, SplitModel)
    return model


def steps(vocab: int) -> list[Batch]:
    """A prompt; its continuation beside a sequence that decodes and a second prompt; one token."""
    ids = [5 + 7 * i % (vocab - 5) for i in range(400)]
    three = [
        Tokens(ids=ids[300:], start=300, pages=[3, 1], logit_rows="all"),
        Tokens(ids=[7], start=2, pages=[5]),
        Tokens(ids=ids[:100], start=0, pages=[6], logit_rows="all"),
    ]
    return [
        Batch.single(ids[8:10], start=0, pages=[5]),
        Batch.single(ids[:300], start=0, pages=[3, 1], logit_rows="all"),
        Batch.build(three),
        Batch.single([9], start=400, pages=[3, 1]),
        Batch.single([9], start=100, pages=[6]),
    ]


def logits(model: Model, mode: str = "fp16") -> torch.Tensor:
    cache = model.new_cache(model.cache_spec(2048, mode=mode))
    return torch.cat([model.forward(batch, cache) for batch in steps(model.config.vocab_size)])


def near(found: torch.Tensor, expected: torch.Tensor, part: float = 0.03) -> bool:
    return bool((found - expected).abs().max() < part * expected.std())


@pytest.mark.parametrize("mode", ["fp16", "fp32", "q8", "fp8"])
def test_near_the_cpu_and_repeatable(mode: str) -> None:
    whole, model = load_model(DEMO), halves(DEMO)
    expected, found = logits(whole, mode), logits(model, mode)
    assert not torch.equal(found, expected), "prompts had the numbers of a GPU"
    coded = mode in ("q8", "fp8")  # a number at the border of two codes takes another one
    assert near(found, expected, 0.25 if coded else 0.03)
    assert (found - expected).abs().mean() < (0.01 if coded else 0.003) * expected.std()
    assert torch.equal(logits(model, mode), found)
    assert [host.stream.rows for host in model.hosts.values()] == [ROWS]
    model.close()
    assert not model.hosts


def test_few_tokens_stay_on_the_cpu() -> None:
    """The step's bits are then those of the CPU; and a sequence that decodes has them beside a prompt, too."""
    assert torch.equal(logits(halves(DEMO, rows=1000)), logits(load_model(DEMO)))
    model = halves(DEMO)
    cache = model.new_cache(model.cache_spec(1024))
    one = Batch.single([7, 8, 9], start=0, pages=[0])
    alone = model.forward(one, cache)
    ids = [5 + i for i in range(100)]
    both = Batch.build([Tokens(ids=ids, start=0, pages=[1]), Tokens(ids=[7, 8, 9], start=0, pages=[2])])
    assert torch.equal(model.forward(both, cache)[1:], alone)


# ---- layers that are lent while tokens are decoded


def lending(lent: Sequence[int], *, rows: int = ROWS, lanes: Lanes | None = None) -> SplitModel:
    """The demo model with ten layers on the host, of which these are lent."""
    how = Streaming("cpu", rows, lent=lent, lanes=Lanes if lanes is None else lambda device: lanes)
    model = load_model(DEMO, spans=[LayerRange("cpu", 0, 10), LayerRange("cpu", 10, 12)], streaming=how)
    assert isinstance(model, SplitModel)
    return model


def test_which_layers_are_lent() -> None:
    """An even number, one behind the other in the two buffers, and none where the host has few."""
    assert [[*streamed_layers(count)] for count in (0, 7, 8, 16, 24)] == [[], [], [2, 5], [2, 5, 8, 11], [2, 5, 8, 11, 14, 17]]
    for count in range(200):
        lent = streamed_layers(count)
        assert len(lent) % 2 == 0 and all(b - a == 3 for a, b in pairwise(lent)) and count / 4 - 2 < len(lent) <= count / 4
        assert not lent or lent[-1] < count - 1
    gpu = LayerRange("cuda:0", 8, 9)
    assert with_streamed([LayerRange("cpu", 0, 8), gpu], Streaming("cuda:0")) == [
        LayerRange("cpu", 0, 2),
        LayerRange("cuda:0", 2, 3, lent=True),
        LayerRange("cpu", 3, 5),
        LayerRange("cuda:0", 5, 6, lent=True),
        LayerRange("cpu", 6, 8),
        gpu,
    ]
    for spans in ([gpu, LayerRange("cpu", 9, 30)], [LayerRange("cpu", 0, 30)], [LayerRange("cpu", 0, 7), gpu]):
        assert with_streamed(spans, Streaming("cuda:0")) == spans


@pytest.mark.parametrize("lent", [[2, 5], [1, 4, 5, 8], [1, 2, 3, 4, 5, 6]], ids=str)
def test_lent_layers_have_their_bits(lent: list[int]) -> None:
    """Whenever copies happen, and whatever was in the buffers before."""
    expected = logits(load_model(DEMO))
    late = Late()
    for lanes in (None, late):
        model = lending(lent, rows=1000, lanes=lanes)
        assert torch.equal(logits(model), expected) and torch.equal(logits(model), expected)
        assert [span.first for span in model.spans if span.lent] == lent
    copied = sum(1 for kind, _ in late.log if kind == "copy")
    assert copied == 2 if len(lent) == 2 else copied > 20 * len(lent) / 2, "two layers stay where they are"


@pytest.mark.parametrize("mode", ["fp16", "q8"])
def test_prompts_through_lent_layers(mode: str) -> None:
    """As without lending, whose layers compute the same here; they decode what the prompts left."""
    plain = logits(lending([]), mode)
    late = Late()
    for lanes in (None, late):
        model = lending([1, 4, 5, 8], lanes=lanes)
        assert torch.equal(logits(model, mode), plain) and torch.equal(logits(model, mode), plain)
    assert len(late.waiting) <= 2, "what will be decoded with next"
    model = lending([1, 4, 5, 8])
    names: list[str] = []
    cache = model.new_cache(model.cache_spec(512))
    seen = model.forward_by_ops(Batch.single([7, 8, 9], start=0, pages=[0]), cache, lambda name, _: names.append(name))
    assert torch.equal(seen, load_model(DEMO).forward(Batch.single([7, 8, 9], start=0, pages=[0]), cache))
    assert [name for name in names if name.endswith(".output")] == [f"layers.{layer}.output" for layer in range(12)]


@pytest.mark.gpu
@pytest.mark.parametrize("lent", [[2, 5], [1, 4, 5, 8]], ids=str)
def test_lent_layers_on_a_gpu(lent: list[int]) -> None:
    """Close to the model on the GPU alone, the same bits however often; captured steps give those of launched ones, in any order."""
    whole = load_model(DEMO, device="cuda")
    model = load_model(DEMO, spans=[LayerRange("cpu", 0, 10), LayerRange("cuda", 10, 12)], streaming=Streaming("cuda", ROWS, lent=lent))
    assert isinstance(model, SplitModel) and "lent to cuda" in model.where
    for mode in ("fp16", "q4"):
        expected, found = logits(whole, mode).cpu(), logits(model, mode)
        assert (found - expected).abs().mean() < (0.02 if mode == "q4" else 0.005) * expected.std()
        assert torch.equal(logits(model, mode), found)
    lent_parts = [part for part in model.parts if part.span.lent]
    assert len(lent_parts) == len(lent) and all(part.captured and None not in part.captured.values() for part in lent_parts)
    cache, plain = (model.new_cache(model.cache_spec(512)) for _ in range(2))
    prompt = Batch.single([*range(5, 95)], start=0, pages=[0])
    for each in (cache, plain):
        model.forward(prompt, each)
    for step in range(6):
        batch, found = Batch.single([9 + step], start=90 + step, pages=[0]), []
        for each, model.graphed in ((cache, True), (plain, False)):
            found.append(model.forward(batch, each).clone())
        assert torch.equal(*found), step
    model.close()


def test_a_lent_layer_is_there_while_its_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run once before a capture; what they took for a matrix would else be another layer's, of another layout."""
    model = lending([1, 4, 5, 8], rows=1000)
    logits(model)
    seen = []

    def held(part: split.PieceProgram, *_: object) -> None:
        stream, number = model.streamed[part.piece]
        image, buffer = stream.images[number], stream.buffers.memory[number % 2]
        seen.append(torch.equal(buffer[: image.size], image.memory))

    monkeypatch.setattr(split, "capture_piece", held)
    cache = model.new_cache(model.cache_spec(512))
    for part in model.parts:
        if part.span.lent:
            model.captured_step(part, Batch.single([9], start=2, pages=[1]), cache.part(part.span.first, part.span.last))
    assert seen == [True] * 4


def test_where_lent_layers_are() -> None:
    model = lending([2, 5])
    assert model.where == "layers 0 to 9 on cpu, of these 2, 5 lent to cpu, layers 10 to 11 on cpu"
    assert len(model.capabilities.placement.layers) == 12 and [(host.first, host.last) for host in model.hosts.values()] == [(0, 5)]
    model.close()
    assert not model.streamed


def test_a_step_that_fails_leaves_lent_layers_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lending([1, 4, 5, 8], rows=1000)
    expected = logits(model)
    for part in (1, 2, 5):
        with monkeypatch.context() as patch:
            patch.setattr(type(model.parts[part].program), "run", _refuse)
            with pytest.raises(RuntimeError, match="no memory"):
                logits(model)
        assert torch.equal(logits(model), expected)


def _refuse(*_: object) -> torch.Tensor:
    raise RuntimeError("no memory")


def test_a_plan_counts_lent_layers() -> None:
    """Their cache and what reads them are the GPU's, their weights the CPU's; a budget has room for that."""
    from exl2nb.llm.plan import plan_split

    for held in (4, 2):
        with_, without = (
            plan_split(DEMO, devices={"cuda": f"{held} layers", "cpu": "rest"}, context=4096, streaming=streams).shares
            for streams in (True, False)
        )
        assert "cuda computes layers 2, 5 of the CPU's" in str(plan_split(DEMO, devices={"cuda": f"{held} layers", "cpu": "rest"}))
        host, count = with_[0].last, len(streamed_layers(with_[0].last))
        assert count == 2
        cache = without[0].cache // host
        assert [share.cache for share in with_] == [without[0].cache - 2 * cache, without[1].cache + 2 * cache]
        assert [share.weights for share in with_] == [share.weights for share in without]
        assert with_[0].read < without[0].read and with_[1].read > without[1].read
        for budget in (with_[1].total, with_[1].total - 1):
            shares = plan_split(DEMO, devices={"cuda": budget, "cpu": "rest"}, context=4096).shares
            assert shares[-1].device == "cpu" or shares[-1].total <= budget
            assert (len(shares) == 2 and shares[-1].last - shares[-1].first >= held) or budget < with_[1].total


# ---- kinds of layers


@pytest.mark.parametrize("name", ["gemma2", "cohere", "gpt2", "qwen2_moe", "exl2"])
def test_layers_of_every_kind(name: str, tmp_path: Path) -> None:
    if name == "exl2":
        dense = write("llama", build_wide("llama"), tmp_path / "dense")
        directory = write_exl2(dense, tmp_path / "exl2")
    else:
        directory = write(name, build(name), tmp_path)
    config = config_of(directory)
    ids = [5 + i % 60 for i in range(min(90, config.max_position_embeddings))]
    batch = Batch.single(ids, start=0, pages=[0], logit_rows="all")
    found = []
    for model in (load_model(directory), halves(directory, rows=20)):
        found.append(model.forward(batch, model.new_cache(model.cache_spec(256))))
    apart = (found[1] - found[0]).abs().amax(1) / found[0].std()
    assert apart.max() > 0
    # where two experts are chosen with nearly the same weight, rounding decides, and a tiny random model has such tokens
    assert (apart < 0.03).float().mean() > (0.9 if "moe" in name else 0.999)


def test_a_layer_lies_together() -> None:
    model = load_model(DEMO)
    layer = model.network_and_program[0].layers[3]
    moved = pack_layer(layer)
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(field_tensors(layer), field_tensors(moved)))
    image = PinnedLayer(moved, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in field_tensors(moved)) <= image.size
    buffer = image.memory.clone()
    for tensor in field_tensors(moved):
        place = image.place(tensor, buffer)
        assert place is not None and torch.equal(place, tensor)
    assert image.place(torch.zeros(1), buffer) is None


@pytest.mark.parametrize("name", ["qwen2_moe", "exl2"])
def test_experts_apart(name: str, tmp_path: Path) -> None:
    """Near the CPU's for a prompt, the CPU's bits for few tokens; the same every time."""
    if name == "exl2":
        directory = write_exl2(write("mixtral", build_wide("mixtral"), tmp_path / "dense"), tmp_path / "exl2")
    else:
        directory = write(name, build(name), tmp_path)
    spans = [LayerRange("cpu", 0, config_of(directory).num_layers)]
    model = load_model(directory, spans=spans, experts=True, streaming=Streaming("cpu", 20))
    whole, lanes = load_model(directory), Late()
    ids = [5 + i % 60 for i in range(90)]
    batches = [Batch.single(ids[a:b], start=a, pages=[0], logit_rows="all") for a, b in ((0, 80), (80, 85))]

    def of(some: Model) -> list[torch.Tensor]:
        cache = some.new_cache(some.cache_spec(256))
        return [some.forward(batch, cache) for batch in batches]

    expected, found, again = of(whole), of(model), of(model)
    apart = (found[0] - expected[0]).abs().amax(1) / expected[0].std()
    assert apart.max() > 0 and (apart < 0.03).float().mean() > 0.9
    assert all(torch.equal(a, b) for a, b in zip(found, again))
    late = load_model(directory, spans=spans, experts=True, streaming=Streaming("cpu", 20, lanes=lambda device: lanes))
    assert all(torch.equal(a, b) for a, b in zip(of(late), found))
    assert lanes.log and not lanes.waiting


def test_experts_that_are_too_large_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write("mixtral", build("mixtral"), tmp_path)
    monkeypatch.setattr(streaming, "MOST_EXPERTS", 1000)
    spans = [LayerRange("cpu", 0, config_of(directory).num_layers)]
    model, whole = load_model(directory, spans=spans, experts=True, streaming=Streaming("cpu", 20)), load_model(directory)
    batch = Batch.single([5 + i % 60 for i in range(90)], start=0, pages=[0], logit_rows="all")
    assert torch.equal(*(one.forward(batch, one.new_cache(one.cache_spec(256))) for one in (model, whole)))


# ---- the order of copies and computations


class Late(Lanes):
    """Copies happen when something waits for them, no sooner; a mark is a place in the log."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waiting: list[Callable[[], None]] = []
        self.log: list[tuple[str, Any]] = []

    def copy(self, work: Callable[[], None], after: Any) -> int:
        self.log.append(("copy", after))
        self.waiting.append(work)
        return len(self.log)

    def wait(self, mark: Any) -> None:
        count = [position for position, (kind, _) in enumerate(self.log, 1) if kind == "copy"].index(mark) + 1
        done = sum(1 for kind, _ in self.log if kind == "copy") - len(self.waiting)
        for _ in range(count - done):
            self.waiting.pop(0)()
        self.log.append(("wait", mark))

    def sync(self, mark: Any) -> None:
        assert mark is None or mark <= len(self.log)

    def mark(self) -> int:
        self.log.append(("mark", None))
        return len(self.log)


def test_bits_do_not_depend_on_when_copies_happen() -> None:
    late = Late()
    assert torch.equal(logits(halves(DEMO, lanes=late)), logits(halves(DEMO)))
    assert not late.waiting, "what was begun was used"


def test_a_buffer_is_copied_into_when_its_last_layer_has_been_computed() -> None:
    """Image i + 1 is copied while image i is computed, after everything that read image i - 1."""
    layers = [pack_layer(layer) for layer in load_model(DEMO).network_and_program[0].layers[:5]]
    images, lanes, free, copies = [PinnedLayer(layer, torch.device("cpu")) for layer in layers], Late(), {}, []
    buffers = Buffers(images, torch.device("cpu"), lanes)
    buffers.begin()
    buffers.load(0)
    for number, image in enumerate(images):
        if number + 1 < len(images):
            buffers.load(number + 1)
        here = buffers.use(number)
        assert here == number % 2
        assert torch.equal(buffers.memory[here][: image.size], image.memory)
        buffers.done(number)
        free[number] = len(lanes.log)
    copies = [after for kind, after in lanes.log if kind == "copy"]
    begun = copies[0]
    assert copies == [begun, begun, *(free[number] for number in range(3))]
    order = [kind for kind, _ in lanes.log]
    assert order[:4] == ["mark", "copy", "copy", "wait"], "the second copy begins before the first layer is computed"


# ---- what is worth it, and options


def test_worth_is_arithmetic() -> None:
    assert min_streamed_rows(110 << 20, 218 << 20) == 65  # 4 bits: 21 rows by arithmetic; the kernels of few rows end at 64
    assert min_streamed_rows(2 * 218 << 20, 218 << 20) == 84  # fp16
    assert min_streamed_rows(0, 0) == 65
    stream = LayerStream([pack_layer(load_model(DEMO).network_and_program[0].layers[0])], [], Streaming("cpu"))
    assert stream.rows == min_streamed_rows(stream.buffers.images[0].size, sum(a * b for a, b in map(streaming.ops.shape, _blobs(stream))))


def _blobs(stream: LayerStream) -> list[torch.Tensor]:
    layer = load_model(DEMO).network_and_program[0].layers[0]
    return [tensor for tensor in field_tensors(layer) if tensor.dtype == torch.uint8]


def test_who_streams() -> None:
    both, gpu, cpu = (
        [LayerRange("cpu", 0, 3), LayerRange("cuda:1", 3, 6), LayerRange("cuda:0", 6, 9)],
        [LayerRange("cuda", 0, 9)],
        [LayerRange("cpu", 0, 9)],
    )
    assert _streaming(both, None, apart=False, exact=False) == Streaming("cuda:1", None)
    assert _streaming(both, 200, apart=False, exact=False) == Streaming("cuda:1", 200)
    for spans, rows, exact in ((both, 0, False), (both, None, True), (gpu, None, False), (cpu, None, False), ([], 5, False)):
        assert _streaming(spans, rows, apart=False, exact=exact) is None
    assert _streaming(gpu, None, apart=True, exact=False) == Streaming("cuda", None), "experts are on the CPU"
    for wrong in (-1, 2049):  # a step has at most 2048 tokens of prompts
        with pytest.raises(OptionError, match="stream_from"):
            ex.load(DEMO, devices=["cpu", "cpu"], stream_from=wrong, progress=None)
    with ex.load(DEMO, devices=["cpu", "cpu"], stream_from=100, progress=None) as llm:
        assert llm.model.capabilities.chunks is HOST_CHUNKS and llm.model.streaming is None


def test_captured_steps_belong_to_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows the addresses of its cache's pools, so another cache has its own; the same one is captured once."""
    model = halves(DEMO)
    made: list[CachePart] = []
    monkeypatch.setattr(split, "capture_piece", lambda part, pools, *_: made.append(pools))
    one, other = (model.new_cache(model.cache_spec(512)) for _ in range(2))
    batch = Batch.single([9], start=2, pages=[1])
    model.forward(batch, one)
    part = model.parts[1]
    for cache in (one, one, other, other, one):
        model.captured_step(part, batch, cache.part(6, 12))
    assert [pools.k[0] is cache.k[6] for pools, cache in zip(made, (one, other, one), strict=True)] == [True] * 3


class _Kernels:
    """Stands for a part's kernels on a GPU, and for torch.cuda.graph: a graph does all again with the tensors of its capture."""

    def __init__(self, program: ops.Program) -> None:
        self._program, self._done, self.broken = program, list[Callable[[], object]](), False

    @contextmanager
    def captured(self, graph: SimpleNamespace, **_: Any) -> Iterator[None]:
        done: list[Callable[[], object]] = []

        def noted(run: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*arguments: Any, **options: Any) -> Any:
                done.append(partial(run, *arguments, **options))
                return done[-1]()

            return noting

        self._done = done
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", noted(torch.Tensor.copy_))
            patch.setattr(split, "sample_rows", noted(split.sample_rows))
            yield
        self._done = []
        graph.replay = lambda: [each() for each in done]

    def step_kernels(self, rows: int) -> _Kernels:
        assert rows in (1, 4)
        return self

    def run(self, *arguments: Any) -> None:
        self._done.append(partial(self.compute, *arguments))
        self.compute(*arguments)

    def compute(self, ids, positions, table, bounds, lens, _rows, k, v, _formats, _heads, out) -> None:
        n = self.sequences = int((lens > 0).sum())
        assert not lens[n:].any() and not positions[n:].any() and not table[n:].any(), "rows without a sequence"
        slots = table[torch.arange(n), (positions[:n] // PAGE_SIZE).long()] * PAGE_SIZE + positions[:n] % PAGE_SIZE
        if n:
            rows = torch.arange(n, dtype=torch.int32)
            out[:n] = self._program.run(ids[:n], positions[:n], slots, table[:n], bounds[: n + 1], lens[:n], rows, k, v)
        if self.broken:
            out[0] = torch.nan


def test_inputs_of_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of four sequences, three and one in turns, over more and more pages: the inputs of each reach the graph, and nothing else."""
    whole, model = load_model(DEMO), halves(DEMO, rows=1000)
    zeros = torch.zeros
    for name in ("synchronize", "current_stream", "set_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda _: None))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options))
    monkeypatch.setattr(split, "launch_lock", lambda _: nullcontext(SimpleNamespace(synchronize=lambda: None)))
    caches = [one.new_cache(one.cache_spec(2048)) for one in (whole, model)]
    prompts = [Tokens(ids=[5 + (7 * i + n) % 90 for i in range(n)], start=0, pages=[n % 4, n % 4 + 4]) for n in (255, 6, 20, 9)]
    both = [one.forward(Batch.build(prompts), cache) for one, cache in zip((whole, model), caches)]
    assert torch.equal(*both)
    part = model.parts[1]
    part.gpu = kernels = _Kernels(part.program)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(torch.cuda, "graph", kernels.captured)
    lengths = [255, 6, 20, 9]
    for step, which in enumerate([(0, 1, 2, 3), (1,), (2, 0, 1, 3), (0,), (0, 1, 2), (1, 3, 2)]):
        some = [Tokens(ids=[30 + step + n], start=lengths[n], pages=prompts[n].pages[: 1 + lengths[n] // PAGE_SIZE]) for n in which]
        batch = Batch.build(some)
        for _ in range(2):  # the second time with what is known of the same batch
            expected, found = (one.forward(batch, cache) for one, cache in zip((whole, model), caches))
            assert torch.equal(found, expected) and kernels.sequences == len(which), step
        settings = torch.tensor([[0.0, 0, 1, 0, 0], [1.2, 20, 0.9, 0.01, 0.75]] * 2, dtype=torch.float64)[: len(which)]
        (drawn, _), logits = model.step_draw(batch, caches[1], settings, 0), expected
        assert torch.allclose(drawn, ops.draw_rows(logits, settings, None), rtol=0, atol=1e-5), step
        drawn, found = model.step_draw(batch, caches[1], settings, 2)
        assert torch.equal(drawn, ops.draw_rows(logits, settings, None, 2)) and torch.equal(found, logits), step
        for n in which:
            lengths[n] += 1
    assert {key[0] for key in part.captured} == {1, 4} and None not in part.captured.values()
    kernels.broken = True
    drawn, logits = model.step_draw(batch, caches[1], settings, 0)
    assert (
        drawn[:, 0].tolist()[:1] == [ops.cpu_sample.NO_DISTRIBUTION] and bool((drawn[1:, 0] >= 0).all()) and bool(logits[0].isnan().all())
    )


def test_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_load_options(parser)
    options = load_options(parser.parse_args(["--gpu-layers", "3", "--stream-from", "0"]))
    assert options == {"gpu_layers": 3, "stream_from": 0}


def test_a_plan_counts_the_buffers() -> None:
    from exl2nb.llm.plan import plan_split

    for cache in ("fp16", "q4"):
        with_, without = (
            plan_split(DEMO, devices={"cuda": "6 layers", "cpu": "rest"}, context=512, cache=cache, streaming=streams)
            for streams in (True, False)
        )
        layers = load_model(DEMO).network_and_program[0].layers
        largest = max(PinnedLayer(pack_layer(layer), torch.device("cpu")).size for layer in layers)
        more = with_.shares[1].work - without.shares[1].work
        assert more >= 2 * largest and with_.shares[0].work == without.shares[0].work
    apart = [LayerRange("cpu", a, b) for a, b in pairwise((0, 6, 12))]
    assert load_model(DEMO, spans=apart).capabilities.chunks is HOST_CHUNKS


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp16", "q8"])
def test_prompts_on_a_gpu(mode: str) -> None:
    """Near the CPU, as near as the GPU alone is; the same bits every time, also while copies are under way."""
    whole, gpu, model = load_model(DEMO), load_model(DEMO, device="cuda"), halves(DEMO, device="cuda")
    expected, alone, found = (logits(one, mode).cpu() for one in (whole, gpu, model))
    bound = max(0.03, 2 * float((alone - expected).abs().max() / expected.std()))
    assert near(found, expected, bound)
    for _ in range(5):
        assert torch.equal(logits(model, mode), found)
    model.close()


@pytest.mark.gpu
def test_captured_steps_of_two_caches() -> None:
    """Steps that were captured for one cache do not write to it when they run on another."""
    model = halves(DEMO, device="cuda")
    spec = model.cache_spec(2048)
    caches = [model.new_cache(spec) for _ in range(2)]
    batches = steps(model.config.vocab_size)
    first, second = (torch.cat([model.forward(batch, cache) for batch in batches]) for cache in caches)
    assert torch.equal(first, second)
    model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2_moe", "exl2"])
def test_experts_apart_of_a_gpu(name: str, tmp_path: Path) -> None:
    """Prompts and single tokens near the CPU's, with experts on the CPU and copied to the GPU; the same bits every time."""
    if name == "exl2":
        directory = write_exl2(write("mixtral", build_wide("mixtral"), tmp_path / "dense"), tmp_path / "exl2")
    else:
        directory = write(name, build(name, num_attention_heads=4, head_dim=32, hidden_size=128), tmp_path)
    whole, spans = load_model(directory), [LayerRange("cuda", 0, config_of(directory).num_layers)]
    ids = [5 + i % 60 for i in range(90)]
    batches = [Batch.single(ids[a:b], start=a, pages=[0], logit_rows="all") for a, b in ((0, 80), (80, 81), (81, 82))]

    def of(some: Model) -> torch.Tensor:
        cache = some.new_cache(some.cache_spec(256))
        return torch.cat([some.forward(batch, cache).cpu() for batch in batches])

    expected = of(whole)
    for how in (Streaming("cuda", 20), None):
        model = load_model(directory, spans=spans, experts=True, streaming=how)
        found = of(model)
        apart = (found - expected).abs().amax(1) / expected.std()
        assert (apart < 0.05).float().mean() > 0.85, "near ties choose other experts"
        assert torch.equal(of(model), found)
        model.close()


@pytest.mark.gpu
def test_unpacking_on_a_gpu() -> None:
    model = load_model(DEMO, device="cpu")
    layer = pack_layer(model.network_and_program[0].layers[2])
    image = PinnedLayer(layer, torch.device("cuda"))
    buffer = image.memory.cuda()
    for blob in field_tensors(layer):
        if blob.dtype == torch.uint8:
            outs = []
            for place in (image.place(blob, buffer), image.place(blob, image.memory)):
                assert place is not None
                packed = streaming_packed(blob, place)
                out = torch.empty(packed.K, packed.N, dtype=torch.float16, device=place.device)
                packed.unpack_into(out)
                outs.append(out.cpu())
            assert torch.equal(*outs)


def streaming_packed(blob: torch.Tensor, place: torch.Tensor) -> Any:
    from exl2nb.ops.host_prefill import Packed

    return Packed.of(blob, place)


@pytest.mark.gpu
def test_text_with_half_the_layers_on_the_host() -> None:
    text = "The old man went to the sea, and the sea was calm. " * 12
    with ex.load(DEMO, device="cpu", progress=None) as whole, ex.load(DEMO, gpu_layers=6, progress=None) as llm:
        assert llm.model.capabilities.chunks is GPU_CHUNKS
        assert abs(llm.score(text).total - whole.score(text).total) < 0.02 * len(llm.score(text).tokens)
        answers = {llm.generate(text, max_tokens=8, temperature=0).text for _ in range(3)}
        assert len(answers) == 1
    with ex.load(DEMO, gpu_layers=6, stream_from=0, progress=None) as llm:
        assert llm.model.capabilities.chunks is HOST_CHUNKS
