"""Models in parts on several devices: the same text as on one, and which layers go where."""

from __future__ import annotations

import ast
import gc
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.cache.pool import KVCache
from exl2nb.cli.__main__ import main
from exl2nb.core.errors import DeviceError, EngineClosed, OptionError
from exl2nb.llm import plan
from exl2nb.llm.memory import Formula
from exl2nb.llm.plan import Budget, SplitPlan, place_layers, read_devices
from exl2nb.llm.split_plan import KindFormula
from exl2nb.model.batch import Batch
from exl2nb.model.loader import load_model
from exl2nb.model.split import LayerRange, SplitModel
from exl2nb.ops.placement import Placement

DEMO = Path(ex.__file__).parent / "demo_model"
LAYERS = 12
PARTS = (50, *[10] * LAYERS, 70)
FORMULA = Formula(weights=0, page_tokens=1, page_bytes={"fp16": LAYERS}, chunk=1)
EQUAL = KindFormula(parts=PARTS, read=PARTS, stream=5, lent=0, formula=FORMULA).at(context=1, batch=1, mode="fp16")
SIZES = {"cpu": EQUAL, "cuda": EQUAL}


@pytest.fixture(scope="module")
def whole() -> ex.LLM:
    with ex.load(DEMO, device="cpu", progress=None) as llm:
        yield llm


@pytest.fixture(scope="module", params=[["cpu", "cpu"], ["cpu"] * 5])
def split(request: pytest.FixtureRequest) -> ex.LLM:
    with ex.load(DEMO, devices=request.param, progress=None) as llm:
        yield llm


def _logits(model: object) -> torch.Tensor:
    cache = KVCache(model.cache_spec(512), device=model.capabilities.placement)
    steps = [([*range(5, 105)], 0, "all"), *(([7 + i], 100 + i, "last") for i in range(3))]
    found = [model.forward(Batch.single(ids, start=start, pages=[0, 1], logit_rows=rows), cache) for ids, start, rows in steps]
    batch = Batch.single([3, 4, 5], start=103, pages=[0, 1], logit_rows="all", device=model.device)
    return torch.cat([*found, model.forward_by_ops(batch, cache)])


def _texts(llm: ex.LLM, prompts: list[str], **options: object) -> list[str]:
    found = {event.id: event.completion.text for event in llm.batch(prompts, max_tokens=24, **options) if event.over}
    return [found[index] for index in range(len(prompts))]


def test_bits_do_not_depend_on_the_cuts(whole: ex.LLM) -> None:
    expected = _logits(whole.model)
    for cuts in ((0, 1, LAYERS), (0, 11, LAYERS), range(LAYERS + 1)):
        model = load_model(DEMO, spans=[LayerRange("cpu", a, b) for a, b in pairwise(cuts)])
        assert isinstance(model, SplitModel)
        assert torch.equal(_logits(model), expected)
        model.close()


def test_observers_see_every_point_of_the_whole_model(whole: ex.LLM, split: ex.LLM) -> None:
    batch = Batch.single([5, 6, 7], start=0, pages=[0])
    seen = []
    for model in (whole.model, split.model):
        found = {}
        model.forward_by_ops(
            batch,
            KVCache(model.cache_spec(256), device=model.capabilities.placement),
            lambda name, x, found=found: found.update({name: x.clone()}),
        )
        seen.append(found)
    assert [*seen[0]] == [*seen[1]]
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_the_same_text(whole: ex.LLM, split: ex.LLM) -> None:
    prompts = ["The secret of life is", "It was a dark", "Once"]
    for options in ({"temperature": 0}, {"seed": 3, "top_k": 40}, {"seed": 5, "regex": "[a-z ]{4,20}"}):
        expected = _texts(whole, prompts, **options)
        assert _texts(split, prompts, **options) == expected
    copied = "The fox jumps over the dog near the river. " * 4
    guess = {"kind": "ngram", "adaptive": False}
    assert (
        split.generate(copied, speculation=guess, temperature=0, max_tokens=30).text
        == whole.generate(copied, temperature=0, max_tokens=30).text
    )


def test_everything_else_of_a_model(whole: ex.LLM, split: ex.LLM) -> None:
    text = "The old man went to the sea, and the sea was calm."
    split.generate(text, max_tokens=2)  # the engine's steps and the caller's write to the same tables
    assert split.score(text).total == whole.score(text).total
    assert torch.equal(split.model.matrix(7, "down"), whole.model.matrix(7, "down"))
    x = torch.randn(2, whole.config.hidden_size)
    assert torch.equal(split.model.unembed(x), whole.model.unembed(x))
    assert "cpu" in repr(split.model) and "cpu" in split._repr_html_()
    beams = [llm.generate("It was", beams=3, max_tokens=6).text for llm in (whole, split)]
    assert beams[0] == beams[1]


def test_stop_and_close_leave_nothing() -> None:
    llm = ex.load(DEMO, devices=["cpu", "cpu"], progress=None)
    for number, _ in enumerate(llm.stream("Once upon a time", max_tokens=200)):
        if number == 3:
            break
    assert llm.generate("It was", max_tokens=2, temperature=0).finish_reason == "length"
    llm.close()
    assert "closed" in repr(llm.model)
    with pytest.raises(EngineClosed):
        llm.generate("It was")


def test_what_a_split_model_does_not_do_has_a_name(split: ex.LLM) -> None:
    with pytest.raises(OptionError, match="trace and patch: the model is split"):
        split.trace("It was", capture=["*"])
    with pytest.raises(OptionError, match="adapters: the model is split"):
        split.model.set_adapters([])


def test_cache_pools_lie_by_layer() -> None:
    cache = KVCache(ex.load(DEMO, device="cpu", progress=None).model.cache_spec(512), device=Placement(("cpu",) * LAYERS))
    assert len(cache.k) == len(cache.v) == LAYERS
    assert cache.part(3, 5).k[0].data_ptr() == cache.k[3].data_ptr()


# ---- placement


def test_budgets_are_filled_from_both_ends() -> None:
    budgets = [Budget("cuda:0", 50 + 5 + 3 * 11), Budget("cpu"), Budget("cuda:1", 70 + 5 + 4 * 11 + 10)]
    assert place_layers(budgets, SIZES, LAYERS) == [LayerRange("cuda:0", 0, 3), LayerRange("cpu", 3, 8), LayerRange("cuda:1", 8, LAYERS)]
    assert place_layers([Budget("cpu"), Budget("cuda", layers=5)], SIZES, LAYERS) == [
        LayerRange("cpu", 0, 7),
        LayerRange("cuda", 7, LAYERS),
    ]
    assert place_layers([Budget("cpu"), Budget("cuda", 10)], SIZES, LAYERS) == [LayerRange("cpu", 0, LAYERS)]
    with pytest.raises(OptionError, match=r"layers 3 to 11 find no room in devices: 174 bytes are missing"):
        place_layers([Budget("cuda:0", 50 + 5 + 3 * 11)], SIZES, LAYERS)


def test_any_budgets_leave_no_gap() -> None:
    rng = random.Random(1)
    for _ in range(300):
        count = rng.randint(1, 5)
        budgets = [Budget(f"cuda:{i}", rng.randint(0, 200)) for i in range(count)]
        budgets[rng.randrange(count)] = Budget("cpu")
        spans = place_layers(budgets, SIZES, LAYERS)
        assert [span.first for span in spans] == [0, *(span.last for span in spans[:-1])] and spans[-1].last == LAYERS
        for span in spans:
            budget = next(budget for budget in budgets if budget.device == span.device)
            assert budget.bytes is None or EQUAL.total(span.first, span.last) <= budget.bytes
        shares = [rng.random() for _ in range(count)]
        spans = place_layers([Budget(f"cuda:{i}", share=x / sum(shares)) for i, x in enumerate(shares)], SIZES, LAYERS)
        assert len(spans) == count and spans[0].first == 0 and spans[-1].last == LAYERS
        assert all(a.last == b.first for a, b in pairwise(spans))


def test_shares_follow_free_memory() -> None:
    spans = place_layers([Budget("cuda:0", share=0.75), Budget("cuda:1", share=0.25)], SIZES, LAYERS)
    assert spans == [LayerRange("cuda:0", 0, 9), LayerRange("cuda:1", 9, LAYERS)]


def test_devices_are_read() -> None:
    assert read_devices({"cuda:0": "6GiB", "cpu": "rest"}) == [Budget("cpu"), Budget("cuda:0", 6 << 30)]
    assert read_devices({"cuda": "20 layers", "cpu": "rest"}) == [Budget("cpu"), Budget("cuda", layers=20)]
    assert [budget.share for budget in read_devices(["cpu", "cpu"])] == pytest.approx([0.5, 0.5], rel=0.1)
    assert read_devices("auto")[0].device == "cpu"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({"cuda:0": "much"}, "cuda:0"),
        ({"cpu": "rest", "cuda": "rest"}, "2 that take the rest"),
        ({}, "a device at least"),
        ({"tpu": "rest"}, "'tpu'"),
        ({"cpu": -1}, "to hold -1"),
        ({"cpu": True}, "to hold True"),
        ({"cpu": "1e99GiB"}, "cpu"),
        (["cpu", 3], "a device is 3"),
        (7, "devices is 7"),
        ([], "a device at least"),
    ],
)
def test_bad_devices_are_named(devices: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ex.load(DEMO, devices=devices, progress=None)


def test_options_that_say_the_same_are_refused() -> None:
    for options in ({"device": "cpu", "devices": "auto"}, {"gpu_layers": 3, "devices": "auto"}, {"parallel": "both"}, {"gpu_layers": -1}):
        with pytest.raises(OptionError, match="load: "):
            ex.load(DEMO, progress=None, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="cuda"):
        ex.load(DEMO, gpu_layers=3, progress=None)


# ---- the plan


def test_the_plan_says_what_loading_does(split: ex.LLM) -> None:
    count = len(split.model.spans)
    planned = ex.plan(DEMO, devices=["cpu"] * count)
    assert isinstance(planned, SplitPlan)
    assert [(share.device, share.first, share.last) for share in planned.shares] == [span[:3] for span in split.model.spans]
    one = ex.plan(DEMO)
    assert sum(share.weights for share in planned.shares) == pytest.approx(one.weights, rel=0.01)
    assert sum(share.cache for share in planned.shares) == one.cache
    assert planned.fits and planned.tokens_per_second > 0
    assert "layers   0 to" in str(planned) and "tokens/s" in planned.verdict() and "<table>" in planned._repr_html_()


def test_the_plan_knows_a_card_that_is_not_there() -> None:
    planned = ex.plan(DEMO, devices={"cuda:0": "250MiB", "cpu": "rest"})
    assert [share.device for share in planned.shares] == ["cpu", "cuda:0"]
    assert all(share.total <= 250 << 20 for share in planned.shares if share.device != "cpu")


def test_the_plan_of_ranks() -> None:
    one, two = ex.plan(DEMO), ex.plan(DEMO, devices=["cpu", "cpu"], parallel="tensor")
    assert isinstance(two, SplitPlan) and two.parallel == "tensor"
    first, second = two.shares
    assert replace(first, free=None) == replace(second, free=None), "each asks for what is free by itself"
    assert first.first == 0 and first.last == LAYERS
    assert 0.5 * one.weights < first.weights < 0.75 * one.weights  # the embedding and attention's output matrix are whole
    assert first.cache * 2 == one.cache
    with ex.load(DEMO, devices=["cpu", "cpu"], parallel="tensor", progress=None) as llm:
        assert first.weights == pytest.approx(llm.model.weight_bytes, rel=0.02)
    assert "1/2 of each layer" in str(two) and "1/2 of each layer" in two._repr_html_() and two.to_dict()["parallel"] == "tensor"
    gpus = ex.plan(DEMO, devices=["cuda:0", "cuda:1"], parallel="tensor")
    assert gpus.shares[0].work > first.work, "the buffers of exchanges"
    for devices, message in ((["cpu"] * 5, "do not divide by 5"), ("auto", "at least two GPUs"), (["cpu", "cuda"], "at least two GPUs")):
        with pytest.raises(OptionError, match=message):
            ex.plan(DEMO, devices=devices, parallel="tensor")
    for options in ({"devices": ["cpu"], "parallel": "both"}, {"parallel": "tensor"}):
        with pytest.raises(OptionError, match="plan: parallel"):
            ex.plan(DEMO, **options)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--devices", "cuda:0=5 layers,cpu=rest", "--json"]) == 0
    assert '"first": 7' in capsys.readouterr().out.replace("\n", " ")
    assert main(["plan", "demo", "--devices", "cpu,cpu", "--parallel", "tensor"]) == 0
    assert "1/2 of each layer" in capsys.readouterr().out
    assert main(["generate", "demo", "--prompt", "It was", "--devices", "cpu,cpu", "--max-tokens", "3", "--quiet"]) == 0
    assert main(["generate", "demo", "--prompt", "It was", "--devices", "cpu=lots", "--quiet"]) != 0


# ---- with a GPU: run by hand where there is one


ON_GPU = {
    "layers on the host": [LayerRange("cpu", 0, 5), LayerRange("cuda", 5, LAYERS)],
    "two parts of one GPU": [LayerRange("cuda:0", 0, 4), LayerRange("cuda:0", 4, LAYERS)],
    "the head on the host": [LayerRange("cuda", 0, 9), LayerRange("cpu", 9, LAYERS)],
    "host, GPU, host": [LayerRange("cpu", 0, 2), LayerRange("cuda", 2, 10), LayerRange("cpu", 10, LAYERS)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_parts_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close to the model on the GPU alone, the same bits however often, and captured steps give those of launched ones."""
    whole, split = load_model(DEMO, device="cuda"), load_model(DEMO, spans=ON_GPU[name])
    expected, found = _logits(whole).cpu(), _logits(split)
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.std()))
    assert torch.equal(_logits(split), found)
    whole_on_gpu = split.capabilities.captures  # then the executor captures, see below
    assert whole_on_gpu or any(part.captured and None not in part.captured.values() for part in split.parts), "no step was captured"
    split.graphed = False
    assert torch.equal(_logits(split), found)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"gpu_layers": 7}, {"gpu_layers": 3}, {"devices": ["cuda:0", "cuda:0"]}, {"devices": "auto"}])
def test_requests_on_a_gpu_in_parts(options: dict[str, object]) -> None:
    prompts = ["The secret of life is", "It was a dark", "Once"]
    with ex.load(DEMO, progress=None, **options) as llm:
        first = _texts(llm, prompts, temperature=0)
        assert _texts(llm, prompts, temperature=0) == first
        drawn = [_texts(llm, prompts * 3, seed=3, top_k=40, presence_penalty=0.5) for _ in range(2)]
        assert drawn[0] == drawn[1]
        if llm.model.capabilities.captures:
            assert None not in llm.engine.executor.captured.graphs.values(), "a step could not be captured"
        assert llm.score("The old man went to the sea.").total < 0
    with ex.load(DEMO, device="cuda", progress=None) as llm:
        alike = [a[:20] == b[:20] for a, b in zip(first, _texts(llm, prompts, temperature=0))]
        assert sum(alike) >= 2, "near ties may fall the other way"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"gpu_layers": 7}, {"gpu_layers": 3}, {"devices": ["cuda:0", "cuda:0"]}, {"device": "cuda"}])
def test_close_returns_the_memory_at_once(options: dict[str, object]) -> None:
    """Weights, cache and captured steps; without Python's search for cycles."""
    with ex.load(DEMO, device="cuda", progress=None) as llm:
        llm.generate("It was", max_tokens=4)  # what torch keeps from now on
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        llm = ex.load(DEMO, progress=None, **options)
        _texts(llm, ["It was", "Once"], temperature=0)
        held = torch.cuda.memory_allocated() - before
        llm.close()
        assert torch.cuda.memory_allocated() - before < held / 10
    finally:
        gc.enable()


# ---- borders


def test_a_plan_says_how_to_load_it() -> None:
    """Every line loads exactly the split that was planned."""
    planned = ex.plan(DEMO, devices={"cuda:0": "1GiB", "cuda:1": "1GiB", "cpu": "rest"}, context=512, cache="q4", batch=2)
    for borders in ((3, 5), (0, 4), (4, 4), (4, 12), (11, 12)):
        moved = planned.at(borders=borders)
        assert moved.borders == borders
        call = ast.parse(moved.load_line).body[0].value
        asked = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert ast.literal_eval(call.args[0]) == str(DEMO) and asked["cache_tokens"] == 1024
        again = ex.plan(DEMO, devices=asked["devices"], context=512, cache="q4", batch=2)
        assert [(share.device, share.first, share.last) for share in again.shares] == [
            (share.device, share.first, share.last) for share in moved.shares
        ]
    assert "device='cpu'" in planned.at(borders=(12, 12)).load_line
    assert "gpu_layers=7" in ex.plan(DEMO, devices={"cuda": "7 layers", "cpu": "rest"}).load_line
    assert "parallel='tensor'" in ex.plan(DEMO, devices=["cpu", "cpu"], parallel="tensor").load_line


def test_a_gpu_that_is_not_here_has_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [plan.is_present(gpu) for gpu in ("cuda", "cuda:0", "cuda:1", "cuda:12")] == [True, True, False, False]
    assert plan.free_bytes_on("cuda:1") is None and plan.gpu_read_speed("cuda:1") is None


def test_moving_a_border_moves_whole_layers() -> None:
    planned = ex.plan(DEMO, devices={"cuda": "7 layers", "cpu": "rest"})
    sizes = [share.weights for share in planned.shares]
    moved = planned.at(borders=[planned.borders[0] + 1], cache="q4", context=256)
    assert moved.shares[0].weights > sizes[0] and moved.shares[1].weights < sizes[1]
    assert moved == ex.plan(DEMO, devices={"cuda": "6 layers", "cpu": "rest"}, cache="q4", context=256).at(
        limits={share.device: share.free for share in moved.shares}
    )
    for bad in ({"borders": [1, 2]}, {"borders": 3}, {"context": 0}, {"cache": "q5"}, {"limits": {"tpu": 1}}, {"speeds": {"cpu": -1.0}}):
        with pytest.raises(OptionError):
            planned.at(**bad)
