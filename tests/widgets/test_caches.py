"""CacheExplorer's Python half on the demo model: runs, needle, frames, what a page may send, twin and export."""

import json
import threading
from contextlib import suppress

import pytest

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, EngineClosed, Exl2Error, GenerationError, OptionError
from exl2nb.eval.cache_loss import NeedleResult
from exl2nb.widgets import CacheExplorer, caches
from tests.widgets.page import join_thread, state, tell


@pytest.fixture(scope="module")
def finished(llm):
    return CacheExplorer(llm, modes=["Q4", "k8v4"], max_tokens=12, free=10**9, needle={"sentences": 6, "depths": [0.5]}).start().wait()


def test_run_frames_and_sizes(finished, llm):
    frame = finished.to_dataframe()
    assert list(frame.index) == ["fp16", "q4", "q6"], "names as the cache has them, the reference first"
    assert frame.kl_mean["fp16"] == 0 < frame.kl_mean["q6"] < frame.kl_mean["q4"]
    assert frame.same_choice["fp16"] == 1
    assert frame.token_bytes["fp16"] == llm.model.cache_spec(1, mode="fp16").token_bytes
    spec = llm.model.cache_spec(1, mode="q4")
    assert frame.fits["q4"] == 10**9 // spec.page_bytes * 256
    assert frame.text["fp16"] == llm.generate(finished.prompt, max_tokens=12, temperature=0).text
    tokens = finished.to_token_frame()
    assert list(tokens.columns)[:2] == ["mode", "position"] and len(tokens) == 36
    assert tokens[tokens["mode"] == "q4"].kl.mean() == pytest.approx(frame.kl_mean["q4"])


def test_needle(finished):
    finished.hide_needle().wait()
    frame = finished.to_needle_frame()
    assert list(frame.columns) == ["fp16", "q4", "q6"]
    assert frame["fp16"].loc[0.5] > 20 * frame["fp16"].iloc[0]
    assert "FP16 gives “Margaret”" in state(finished, "_verdict") and "Q4" in state(finished, "_verdict")
    assert state(finished, "_needle_text")["tokens"] > 50
    assert finished.status == "done" and finished.tokens["q4"], "the texts stay"


def test_the_verdict_does_not_claim_what_was_not_seen():
    def hits(without, there):
        return [NeedleResult("fp16", None, 90, without, 9), NeedleResult("fp16", 0.5, 99, there, 3), NeedleResult("q4", 0.5, 99, 0.4, 1)]

    needle = CacheExplorer().needle
    assert "says nothing about the other caches" in caches.needle_verdict(hits(0.001, 0.004), needle)
    assert "says nothing about the other caches" in caches.needle_verdict(hits(0.3, 0.4), needle)
    assert "Q4 40%" in caches.needle_verdict(hits(0.001, 0.4), needle)
    assert caches.needle_verdict([], needle) == ""


def test_messages_of_the_page(llm, sent):
    explorer = CacheExplorer(llm)
    run = {"type": "run", "prompt": "A dark", "modes": ["q8"], "max_tokens": 3}
    tell(explorer, run)
    explorer.wait()
    assert (explorer.modes, explorer.max_tokens, explorer.prompt, explorer.status) == (["fp16", "q8"], 3, "A dark", "done")
    assert [m["type"] for m in sent][-1] == "done"
    for bad in ({"prompt": 3}, {"prompt": " "}, {"modes": "q8"}, {"modes": ["q7"]}, {"max_tokens": 10**6}, {"max_tokens": None}):
        tell(explorer, {**run, **bad})
        assert explorer.status == "error" and explorer.error
    tell(explorer, {"type": "needle", "modes": ["q8", "q4", "nonsense"]})
    assert "unknown cache mode 'nonsense'" in explorer.error
    explorer.start("It was").wait()
    assert explorer.status == "done" and explorer.error == "", "an error is gone with the next run"


def test_stop_ends_the_run_and_keeps_what_is_there(llm, monkeypatch):
    gate = threading.Event()
    original = caches.take_turn

    def slow(steps):
        gate.wait(5)
        return original(steps)

    monkeypatch.setattr(caches, "take_turn", slow)
    monkeypatch.setattr(caches, "TURN_S", 0.0)
    explorer = CacheExplorer(llm, max_tokens=200)
    explorer.start()
    with pytest.raises(GenerationError, match="a run is in progress"):
        explorer.start()
    tell(explorer, {"type": "run", "prompt": "again", "modes": [], "max_tokens": 3})
    assert explorer.status == "running", "a second click is ignored"
    tell(explorer, {"type": "stop"})
    gate.set()
    explorer.wait(10)
    assert explorer.status == "stopped"
    assert len(state(explorer, "_tokens")) < 200
    assert llm.generate("It was", max_tokens=2).text


def test_others_get_the_model_between_turns(llm):
    explorer = CacheExplorer(llm, max_tokens=400).start()
    text = llm.generate("It was", max_tokens=4, temperature=0).text
    assert explorer.status == "running", "the answer came while the explorer went on"
    explorer.stop()
    explorer.wait()
    assert text == llm.generate("It was", max_tokens=4, temperature=0).text


def test_failures_are_shown_and_raised():
    llm = ex.demo(progress=None)
    explorer = CacheExplorer(llm, max_tokens=200).start("word " * 1000)
    with pytest.raises(ContextOverflow, match="shorten the prompt"):
        explorer.wait()
    assert explorer.status == "error" and "shorten the prompt" in explorer.error
    llm.close()
    with pytest.raises(EngineClosed):
        explorer.start("It was").wait()
    assert "closed" in explorer.error
    with pytest.raises(EngineClosed):
        explorer.hide_needle().wait()


@pytest.mark.parametrize(
    "bad",
    [{"max_tokens": 0}, {"modes": ["q5"]}, {"modes": ["fp8", "q8", "q6", "q4", "k16v8", "k16v4", "k4v8", "k4v16"]}, {"free": 0},
     {"needle": {"facts": "x"}}, {"needle": 3}, {"mode": ["q4"]}, {"result": 3}, {"result": {"token": []}}, {"result": {"tokens": [[1]]}},
     {"result": {"modes": ["q4"], "tokens": [[7, "a", 1, None, None, None, None, None]]}}],
)  # fmt: skip
def test_bad_options(bad):
    with pytest.raises((OptionError, TypeError)):
        CacheExplorer(**bad)


def test_without_a_model_only_looking(llm):
    with pytest.raises(OptionError, match=r"CacheExplorer\(llm\)"):
        CacheExplorer().start()
    with pytest.raises(OptionError, match="expected a loaded model"):
        CacheExplorer("path")


def test_recorded_twin_and_export(finished, tmp_path):
    data = json.loads(json.dumps(finished.to_dict()))
    again = CacheExplorer(result=data)
    assert again.to_frame().equals(finished.to_frame())
    assert again.to_dict() == finished.to_dict()
    bundle, _ = again._repr_mimebundle_()
    assert bundle["text/plain"].startswith("CacheExplorer(done: fp16 KL 0, q4 KL")
    assert "bytes per token" in bundle["text/html"]
    assert len(again.to_html()) < 200_000
    hostile = CacheExplorer(result={**data, "prompt": "<script>alert(1)</script>", "model": "<img src=x>"})
    assert "<script" not in hostile._repr_mimebundle_()[0]["text/html"]


def test_closing_ends_the_run(llm):
    explorer = CacheExplorer(llm, max_tokens=400).start()
    explorer.close()
    join_thread("cacheexplorer")
    with suppress(Exl2Error):
        explorer.wait()
    assert llm.engine.wait_idle(5)
