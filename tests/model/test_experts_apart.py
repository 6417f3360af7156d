"""Experts on the CPU while the rest of their layers is elsewhere: the same bits, the same text, what goes where, refusals by name.

The CPU stands for both devices here. Each sparse layer is cut behind its attention, as it is where a GPU holds that.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import OptionError
from exl2nb.llm.llm import LLM
from exl2nb.llm.load import Tokenizer, load
from exl2nb.llm.plan import experts_on_cpu, kind_formula
from exl2nb.model.batch import Batch
from exl2nb.model.gpu_memory import kept_by_layer
from exl2nb.model.inspection import inspect
from exl2nb.model.loader import load_model
from exl2nb.model.split import LayerRange, ModelPiece, SplitModel
from exl2nb.ops import RoutedOp

from .zoo import build, build_wide, config_of, write, write_exl2, write_tokenizer


def dense_and_sparse(directory):
    """Three layers, the one in the middle dense."""
    return write("qwen3_moe", build("qwen3_moe"), directory)


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe", "mixed", "exl2"])
def directory(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    if request.param == "mixed":
        return dense_and_sparse(folder)
    if request.param == "exl2":
        return write_exl2(write("mixtral", build_wide("mixtral"), folder / "dense"), folder / "exl2")
    return write(request.param, build(request.param), folder)


def spans_of(config, *cuts):
    ends = [0, *cuts, config.num_layers]
    return [LayerRange("cpu", a, b) for a, b in pairwise(ends)]


def logits(model, mode="fp16"):
    """Of a prompt longer than a part's table at first, of single tokens, and of two sequences in one batch."""
    cache = KVCache(model.cache_spec(512, mode=mode), device=model.capabilities.placement)
    ids = [5 + i % 80 for i in range(100)]
    found = [model.forward(Batch.single(ids, start=0, pages=[0], logit_rows="all"), cache)]
    found += [model.forward(Batch.single([7 + i], start=100 + i, pages=[0], logit_rows="last"), cache) for i in range(3)]
    return torch.cat([*found, model.forward_by_ops(Batch.single([3, 4, 5], start=103, pages=[0], logit_rows="all"), cache)])


def test_the_bits_do_not_change(directory):
    whole, config = load_model(directory), config_of(directory)
    for cuts in ((), (1,)):
        model = load_model(directory, spans=spans_of(config, *cuts), experts=True)
        assert isinstance(model, SplitModel)
        assert "experts on cpu" in model.where
        for mode in ("fp16", "fp32"):
            assert torch.equal(logits(model, mode), logits(whole, mode)), (cuts, mode)
        model.close()


def test_coded_caches_too(tmp_path):
    directory = write("mixtral", build("mixtral", head_dim=32), tmp_path)
    model = load_model(directory, spans=spans_of(config_of(directory)), experts=True)
    assert torch.equal(logits(model, "q4"), logits(load_model(directory), "q4"))


def test_every_sparse_layer_is_cut_behind_its_attention(tmp_path):
    directory = dense_and_sparse(tmp_path)
    model = load_model(directory, spans=spans_of(config_of(directory)), experts=True)
    span = LayerRange("cpu", 0, 3)
    assert model.pieces == [ModelPiece(span, 0, 1, cut=True), ModelPiece(span, 1, 3, cut=True), ModelPiece(span, 3, 3)]
    logits(model)
    assert [[op for op in part.program.steps if isinstance(op, RoutedOp)] for part in model.parts] == [[]] * 3
    ends_dense = write("qwen3_moe", build("qwen3_moe", num_hidden_layers=2), tmp_path / "dense")
    model = load_model(ends_dense, spans=spans_of(config_of(ends_dense)), experts=True)
    assert model.pieces == [ModelPiece(LayerRange("cpu", 0, 2), 0, 1, cut=True), ModelPiece(LayerRange("cpu", 0, 2), 1, 2)]


def test_observers_see_every_point(directory):
    batch = Batch.single([5, 6, 7], start=0, pages=[0])
    seen = []
    for model in (load_model(directory), load_model(directory, spans=spans_of(config_of(directory), 1), experts=True)):
        found = {}
        cache = KVCache(model.cache_spec(256), device=model.capabilities.placement)
        model.forward_by_ops(batch, cache, lambda name, x, found=found: found.update({name: x.clone()}))
        seen.append(found)
    assert [*seen[0]] == [*seen[1]]
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_the_generator_writes_the_same(tmp_path):
    directory = write("mixtral", build("mixtral"), tmp_path)
    write_tokenizer(directory)
    models = [load_model(directory), load_model(directory, spans=spans_of(config_of(directory)), experts=True)]
    found = []
    for model in models:
        with LLM(model, Tokenizer.load(directory), path=directory, cache="fp16", context=128, cache_tokens=1024, max_sequences=4) as llm:
            texts = {
                event.id: event.completion.text for event in llm.batch(["w1 w2 w3", "w5", "w7 w8"], max_tokens=12, seed=3) if event.over
            }
            beams = llm.generate("w4 w5", beams=2, max_tokens=5).text
            found.append((texts, beams, llm.score("w1 w2 w3 w4").total))
    assert found[0] == found[1]
    assert all(found[0][0].values())


# ---- what goes where


def test_a_plan_puts_experts_aside(directory):
    found, config = inspect(directory), config_of(directory)
    [gpu, cpu] = ex.plan(directory, devices={"cuda:0": "rest", "cpu": "experts"}, context=64).shares
    assert (gpu.device, gpu.first, gpu.last, gpu.experts) == ("cuda:0", 0, config.num_layers, False)
    assert (cpu.device, cpu.cache, cpu.experts) == ("cpu", 0, True)
    kept = sum(kept_by_layer(config, found, experts=False))
    assert gpu.weights == kept < sum(kept_by_layer(config, found))
    experts = [m for m in found.matrices if ".experts." in m.key or "shared_expert" in m.key]
    assert cpu.weights == sum(m.nbytes for m in experts)
    routed = sum(m.nbytes for m in experts if ".experts." in m.key)
    assert cpu.read == cpu.weights - round(routed * (1 - config.moe.top_k / config.moe.num_experts))
    both = kind_formula(config, found, "cpu"), kind_formula(config, found, "cpu", experts=False)
    assert sum(both[0].parts) - sum(both[1].parts) == cpu.weights
    assert sum(both[0].read) - sum(both[1].read) == pytest.approx(cpu.read, abs=2 * config.num_layers)


def test_a_plan_counts_a_captured_step_for_each_sparse_layer(directory):
    found, config = inspect(directory), config_of(directory)
    sparse = sum(config.experts(layer) is not None for layer in range(config.num_layers))
    whole, apart = (kind_formula(config, found, "cuda", experts=experts).formula for experts in (True, False))
    logits = 8 * config.vocab_size
    assert apart.graph_row - logits == (sparse + 1) * (whole.graph_row - logits)
    assert apart.graph_fixed - whole.graph_fixed == sparse << 20
    [gpu, _] = ex.plan(directory, devices={"cuda:0": "rest", "cpu": "experts"}, context=64).shares
    [one] = ex.plan(directory, devices={"cuda:0": "rest"}, context=64).shares
    assert gpu.work > one.work


def test_parts_of_a_device_share_a_table(directory):
    """Also after one of them has grown; the text is the same."""
    model = load_model(directory, spans=spans_of(config_of(directory)), experts=True)
    logits(model)  # 100 rows
    tables = {part.stream.data_ptr() for part in model.parts if part.stream is not None and not part.headed}
    assert len(tables) <= 1 and len(model.stream_tables["cpu"]) == 128
    model.close()
    assert not model.stream_tables


def test_a_plan_says_so_in_words(tmp_path):
    directory = write("mixtral", build("mixtral"), tmp_path)
    planned = ex.plan(directory, devices={"cuda:0": "1 layer", "cuda:1": "rest", "cpu": "experts"}, context=64)
    assert "all experts" in str(planned) and "all experts" in planned._repr_html_()
    assert "devices={'cuda:0': 'rest', 'cuda:1': '1 layer', 'cpu': 'experts'}" in planned.load_line
    assert planned.to_dict()["devices"][2]["experts"] is True
    with pytest.raises(OptionError, match="experts on the CPU: no borders"):
        ex.widgets.MemoryPlan(planned)
    with pytest.raises(OptionError, match="find no room"):
        ex.plan(directory, devices={"cuda:0": "1MiB", "cpu": "experts"}, context=64)


@pytest.mark.parametrize("devices", [{"cpu": "experts"}, {"cuda:0": "experts", "cpu": "rest"}, {"cuda:0": "experts", "cpu": "experts"}])
def test_experts_are_for_the_cpu_beside_gpus(devices):
    with pytest.raises(OptionError, match="'experts' is for the CPU, with GPUs for the rest"):
        experts_on_cpu(devices)


def test_dense_models_are_refused_by_name():
    demo = Path(ex.__file__).parent / "demo_model"
    for refuse in (load, ex.plan):
        with pytest.raises(OptionError, match="puts experts on the CPU, and demo_model has none: it is dense"):
            refuse(demo, devices={"cuda:0": "rest", "cpu": "experts"})
    with pytest.raises(OptionError, match="experts apart from their layers, and this model has none"):
        load_model(demo, spans=[LayerRange("cpu", 0, 12)], experts=True)
