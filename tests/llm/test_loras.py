"""Adapters per request: the same answer alone and beside others, blends, what the cache shares, loading and unloading meanwhile."""

import gc
import threading

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import EngineClosed, OptionError

from .lora_maker import write_lora

PROMPT = "The old man went to the river and"
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, demo_config):
    base = tmp_path_factory.mktemp("loras")
    return [write_lora(base / f"l{i}", demo_config, seed=i, rank=1 + i % 5, size=0.4) for i in range(6)]


@pytest.fixture(scope="module")
def demo_config():
    with ex.demo(progress=None) as llm:
        return llm.config


@pytest.fixture
def llm(folders):
    with ex.demo(progress=None, max_sequences=40, cache_tokens=16384) as llm:
        for folder in folders[:3]:
            llm.loras.load(folder)
        yield llm


def logprobs(completion):
    return [token.logprob for token in completion.tokens]


def test_an_adapter_changes_the_answer_and_a_batch_does_not(llm):
    choices = [None, "l0", "l1", {"l0": 0.5, "l2": 0.25}, "l2", None, {"l1": 0.0}, {"l0": 1.0}]
    alone = [llm.generate(PROMPT, lora=lora, **GREEDY) for lora in choices]
    assert alone[0].text == alone[5].text == alone[6].text, "no adapter, twice, and one of weight 0"
    assert alone[1].text == alone[7].text and logprobs(alone[1]) == logprobs(alone[7])
    assert len({completion.text for completion in alone}) == 5
    for reuse in (True, False):
        llm.cache.clear()
        llm.cache.reuse = reuse
        job = llm.batch([{"prompt": PROMPT, "lora": lora} for lora in choices], **GREEDY)
        together = {event.id: event.completion for event in job if event.over}
        for i, completion in enumerate(alone):
            assert together[i].text == completion.text and logprobs(together[i]) == logprobs(completion), (i, choices[i])


def test_pages_of_different_adapters_are_not_shared(llm):
    prompt = [(31 * i) % 4000 + 5 for i in range(600)]
    first = llm.generate(prompt, lora="l0", **GREEDY)
    again = llm.generate(prompt, lora="l0", **GREEDY)
    assert again.timings.reused_tokens >= 512 and again.text == first.text
    for lora in (None, "l1", {"l0": 0.5}):
        assert llm.generate(prompt, lora=lora, **GREEDY).timings.reused_tokens == 0, lora
    llm.loras.unload("l0")
    llm.loras.load(again_path(llm), name="renamed")
    found = llm.generate(prompt, lora="renamed", **GREEDY)
    assert found.timings.reused_tokens >= 512 and found.text == first.text, "equal numbers are the same adapter, whatever its name"


def again_path(llm):
    return llm.loras["l1"].path.parent / "l0"


def test_every_way_to_generate(llm):
    expected = llm.generate(PROMPT, lora="l1", **GREEDY).text
    assert "".join(chunk.text for chunk in llm.stream(PROMPT, lora="l1", **GREEDY)) == expected
    assert llm.generate(PROMPT, lora="l1", speculation={"kind": "ngram", "adaptive": False}, **GREEDY).text == expected
    assert llm.generate(PROMPT, lora="l1", banned_strings="never said", **GREEDY).text == expected
    assert llm.generate(PROMPT, lora="l1", n=2, **GREEDY)[1].text == expected
    guided = llm.generate(PROMPT, lora="l1", negative_prompt="He", cfg_scale=1.5, **GREEDY)
    assert guided.text and guided.text != llm.generate(PROMPT, negative_prompt="He", cfg_scale=1.5, **GREEDY).text
    beams = llm.generate(PROMPT, lora="l1", beams=3, max_tokens=12)
    assert beams.score > llm.generate(PROMPT, beams=3, max_tokens=12).score - 1e9 and beams.beams
    assert llm.chat("Hello", lora="l1", template="chatml", **GREEDY).text != llm.chat("Hello", template="chatml", **GREEDY).text
    sampled = [llm.generate(PROMPT, lora="l1", seed=3, max_tokens=8).text for _ in range(2)]
    assert sampled[0] == sampled[1]


def test_thirty_two_adapters_in_one_batch(folders, tmp_path, demo_config):
    with ex.demo(progress=None, max_sequences=32) as llm:
        for i in range(32):
            llm.loras.load(write_lora(tmp_path / f"a{i}", demo_config, seed=100 + i, rank=1 + i % 7), name=f"a{i}")
        alone = [llm.generate(PROMPT, lora=f"a{i}", temperature=0, max_tokens=6) for i in range(32)]
        job = llm.batch({i: {"prompt": PROMPT, "lora": f"a{i}"} for i in range(32)}, temperature=0, max_tokens=6)
        for event in job:
            if event.over:
                assert logprobs(event.completion) == logprobs(alone[event.id]), event.id
        assert len({completion.text for completion in alone}) > 25


def test_unloading_and_loading_while_requests_run(llm, folders):
    expected = llm.generate(PROMPT, lora="l2", temperature=0, max_tokens=300).text
    stream = llm.stream(PROMPT, lora="l2", temperature=0, max_tokens=300)
    text = next(stream).text
    failures = []

    def churn():
        try:
            for i in range(12):
                llm.loras.load(folders[3 + i % 3], name=f"n{i}")
                llm.generate("He", lora={f"n{i}": 0.1 * (i + 1)}, max_tokens=2)
                llm.loras.unload(f"n{i}")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    llm.loras.unload("l2")
    thread.start()
    text += "".join(chunk.text for chunk in stream)
    thread.join()
    assert not failures and text == expected
    with pytest.raises(OptionError, match="l2.*not loaded"):
        llm.generate(PROMPT, lora="l2")
    del stream
    llm.generate("He", max_tokens=2)  # the last step's sequences are remembered until the next
    gc.collect()
    llm.loras.unload("l0")
    llm.loras.unload("l1")
    assert llm.loras.list() == [] and all(adapter is None for adapter in llm.model.adapters.adapters), "their memory is given back"


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("l9", "l0, l1, l2"),
        ({"l0": "much"}, "lora"),
        ({"l0": float("nan")}, "lora"),
        ({"l0": 1e9}, "lora"),
        ({}, "expected a name"),
        (7, "expected a name"),
        (["l0"], "expected a name"),
        ({3: 1.0}, "not loaded"),
    ],
)
def test_wrong_options_are_named(llm, lora, words):
    with pytest.raises(OptionError, match=words):
        llm.generate(PROMPT, lora=lora)


def test_scores_with_an_adapter(llm, near):
    """The log probabilities that the generated tokens had, up to what an fp16 cache takes."""
    made = llm.generate(PROMPT, lora="l1", **GREEDY)
    ids = [*llm.tokenizer.encode(PROMPT), *(token.id for token in made.tokens)]
    scored = llm.score(ids, lora="l1").logprobs[-len(made.tokens) :]
    assert max(abs(a - b) for a, b in zip(scored, logprobs(made))) < 0.02 + near
    assert llm.score(ids).total < llm.score(ids, lora="l1").total
    with pytest.raises(OptionError, match="not loaded"):
        llm.score(ids, lora="l9")


def test_activations_with_an_adapter(llm):
    """The logits that scores are made of; of a blend too; and other activations than the model's own."""
    ids = llm.tokenizer.encode(PROMPT)
    for lora in ("l1", {"l0": 0.5, "l2": 0.3}):
        found = llm.hidden(ids, ["embedding", "layers.*.*", "logits"], lora=lora)
        picked = found["logits"].log_softmax(1)[range(len(ids) - 1), ids[1:]]
        assert float((picked - torch.tensor(llm.score(ids, lora=lora).logprobs)).abs().max()) < 0.02
        alone = llm.hidden(ids, ["embedding", "layers.*.*"])
        assert torch.equal(alone["embedding"], found["embedding"]) and len(alone) == len(found) - 1
        assert float((alone["layers.0.output"] - found["layers.0.output"]).norm()) > 0.01 * float(alone["layers.0.output"].norm())
    assert torch.equal(llm.hidden(ids, lora={"l1": 0.0})["layers.3.output"], alone["layers.3.output"])
    with pytest.raises(OptionError, match="not loaded"):
        llm.hidden(ids, lora="l9")


def test_a_model_is_compared_with_its_adapter(llm):
    text = [(37 * i) % 4000 + 5 for i in range(40)]
    same, other = ex.compare(llm, llm, text, progress=None), ex.compare(llm, llm, text, lora="l1", progress=None)
    assert same.kl_mean == 0 and other.kl_mean > 0.01 and "with l1" in str(other)
    with pytest.raises(OptionError, match="compare: lora 'l9' is not loaded"):
        ex.compare(llm, llm, text, lora="l9", progress=None)


def test_what_is_loaded_is_shown(llm, folders):
    assert [lora.name for lora in llm.loras.list()] == [*llm.loras] == ["l0", "l1", "l2"] and "l1" in llm.loras and len(llm.loras) == 3
    assert "rank 2" in repr(llm.loras["l1"]) and "q" in llm.loras["l1"]._repr_html_() and "l2" in llm.loras._repr_html_()
    assert llm.loras.nbytes == sum(lora.nbytes for lora in llm.loras.list()) > 100_000
    with pytest.raises(OptionError, match="already"):
        llm.loras.load(folders[0])
    with pytest.raises(OptionError, match="name is"):
        llm.loras.load(folders[0], name="a b")
    with pytest.raises(OptionError, match="scale"):
        llm.loras.load(folders[0], name="x", scale=1e9)


def test_scale_is_the_weight_of_a_bare_name(llm, folders):
    llm.loras.load(folders[0], name="half", scale=0.5)
    assert llm.generate(PROMPT, lora="half", **GREEDY).text == llm.generate(PROMPT, lora={"l0": 0.5}, **GREEDY).text


def test_a_closed_model_says_so(folders):
    llm = ex.demo(progress=None)
    llm.loras.load(folders[0])
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate(PROMPT, lora="l0")
    with pytest.raises(EngineClosed):
        llm.loras.load(folders[1])


@pytest.mark.gpu
def test_captured_steps_outlive_loading(folders):
    """On the GPU: an adapter that is loaded later runs in the steps that were captured for the first; and it is the CPU's answer."""
    with ex.demo(progress=None, device="cuda", deterministic=True) as llm, ex.demo(progress=None, device="cpu") as other:
        executor = llm.engine.loop.executor
        for i, folder in enumerate(folders[:3]):
            for one in (llm, other):
                one.loras.load(folder)
            found, want = (one.generate(PROMPT, lora=f"l{i}", **GREEDY) for one in (llm, other))
            first = want.tokens[0]
            assert found.tokens[0].id == first.id and abs(found.tokens[0].logprob - first.logprob) < 0.05
            adapted = [graph for kind, graph in executor.captured.graphs.items() if kind.lora is not None]
            assert len(adapted) == 1 and adapted[0] is not None, "one captured step for all adapters"
        with llm.batch([{"prompt": PROMPT, "lora": lora} for lora in ("l0", None, "l2")], **GREEDY) as job:
            together = job.run()
        for i, lora in enumerate(("l0", None, "l2")):
            assert together[i].text == llm.generate(PROMPT, lora=lora, **GREEDY).text


@pytest.mark.gpu
def test_adapters_inside_the_products_say_the_same(folders, monkeypatch):
    """On the GPU, in captured steps of one to many texts: the answers' first tokens are those of launches behind the products."""
    found = []
    for inside in ("0", "1"):
        monkeypatch.setenv("EXL2NB_LORA_INSIDE", inside)
        with ex.demo(progress=None, device="cuda") as llm:
            for folder in folders[:3]:
                llm.loras.load(folder, progress=None)
            for count in (1, 3, 6, 16):
                with llm.batch([{"prompt": PROMPT, "lora": (None, "l0", "l1", "l2")[(i + 1) % 4]} for i in range(count)], **GREEDY) as job:
                    answers = job.run()
                    found.append((inside, [answers[i].tokens[0] for i in range(count)]))
    half = len(found) // 2
    for (_, outside), (_, inside_) in zip(found[:half], found[half:]):
        for one, other in zip(outside, inside_):
            assert one.id == other.id
            assert abs(one.logprob - other.logprob) < 0.05
