"""Every widget's bundle against hostile text, a silent kernel, a second view and lost messages. The kernel is played by the test."""

import base64
from functools import lru_cache
from pathlib import Path

import hostile
import numpy as np
import pytest
from mock_host import MockHost
from mock_host import state_of as plain

import exl2nb
from exl2nb.widgets import (
    AttentionView,
    BitMap,
    BitrateExplorer,
    CacheExplorer,
    Compare,
    ErrorFlow,
    LayerLens,
    MemoryPlan,
    OutlierMap,
    PageTable,
    Playground,
    ProgressView,
    SamplerMicroscope,
    WeightBrowser,
    WeightHistogram,
)
from exl2nb.widgets.protocol import PROTOCOL_VERSION, BitCell

NOTHING = {"n": 0, "tps": 0.0, "ttft_s": None}


def playground(text: str) -> dict:
    tokens = [[text, 1, 0.5, 2, [[text, 0.5]]], ["end", 2, 0.1, 1, []]]
    return {**plain(Playground()), "prompt": text, "_run_prompt": text, "_tokens": tokens, "_model_label": text, "n_tokens": 2}


@lru_cache
def solved() -> dict:
    return plain(BitrateExplorer())


def explorer(text: str) -> dict:
    return {**solved(), "prompt": text, "original": text, "made": f"{text}end", "_marks": [[4.0, 0.1, text]], "stage": text}


def caches(text: str) -> dict:
    tokens = [[0, text, 1, 0.5, 0.5, 0.0, True, None], [1, text, 1, 0.5, 0.4, 0.2, False, text], [1, "end", 2, 0.1, 0.1, 0.0, True, None]]
    needle = {"fact": text, "question": text, "answer": text, "tokens": 9}
    state = {"prompt": text, "_run_prompt": text, "_tokens": tokens, "_run_modes": ["fp16", "q4"], "_needle_text": needle}
    more = {
        "_model_label": text,
        "_verdict": text,
        "_needle": [["fp16", None, 0.1, 3]],
        "_needle_modes": ["fp16"],
        "_needle_depths": [None],
    }
    return {**plain(CacheExplorer()), **state, **more}


def compare(text: str) -> dict:
    tokens = [[0, text, 1, 0.5, None, None, None, None], [1, "end", 2, 0.5, None, None, None, None]]
    columns = [[text[:2000], text[:2000], 1, 1.0], ["b", "", None, None]]
    state = {"prompts": [text], "_run_prompts": [text], "_columns": columns, "_tokens": tokens, "_note": text, "stage": text}
    return {**plain(Compare()), **state}


def progress(text: str) -> dict:
    return {**plain(ProgressView(text)), "status": "running", "stage": text, "detail": text, "unit": text[:100], "total": 3.0}


def bitmap(text: str) -> dict:
    state = plain(BitMap([{"key": "model.layers.0.self_attn.q_proj", "bpw": 4.0}], selected=[0, "q"]))
    cell = BitCell(0, text[:2000], 4.0, 1, 1, 1, 1, 1, None, None, [[text[:2000], 4.0, text[:2000], []]])._asdict()
    return {**state, "title": text, "_matrices": [text[:2000]], "_cells": [cell], "selected": [0, text[:2000]]}


@lru_cache
def browsed() -> dict:
    return plain(WeightBrowser(Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"))


def weights(text: str) -> dict:
    return {**browsed(), "title": text, "_original": text, "matrix": text, "_matrices": [text]}


def microscope(text: str) -> dict:
    state = plain(SamplerMicroscope(np.float32([2, 1, 0]), new_ids=[0, 1], top_k=2, seed=1))
    tokens = [[i, text] for i in range(3)]
    line = [[0, text, 0.7], [1, text, 0.3]]
    return {**state, "_prompt": text, "_answer": tokens, "_tokens": tokens, "_line": line, "token_text": text, "_others": text}


def pagetable(text: str) -> dict:
    cells = [["used", 256, [1, 2], text[:9], -1, "new"], ["cached", 4, [], "", 0, ""]]
    frame = {"page_size": 256, "pages": cells, "requests": [[1, False, 256, 256, 0, [0]]], "evictions": 0, "preemptions": 0}
    return {**plain(PageTable({**frame, "label": text})), "title": text}


def speculation(text: str) -> dict:
    stats = {"kind": text, "steps": 1, "plain_steps": 0, "proposed": 2, "accepted": 1, "lengths": [0, 1], "tokens": 2, "tps": 1.0}
    tokens = [[text, 1, "ngram", 0.5, 0, []], [text, 2, "target", None, 0, [text]]]
    state = {"status": "idle", "error": "", "height": "", "_protocol": PROTOCOL_VERSION, "_static": False, "title": text, "_prompt": text}
    return {**state, "_tokens": tokens, "_stats": {**stats, "plain_tps": None, "same": None}}


def plan(text: str) -> dict:
    return {**plain(MemoryPlan(Path(exl2nb.__file__).parent / "demo_model", free=10**9)), "name": text}


PIXELS = base64.b64encode(bytes(range(4))).decode()  # one layer of 4 places


def errorflow(text: str) -> dict:
    flow = {"rows": [text[:2000]], "layers": 2, "tokens": 3, "errors": [[[0.1, 0.2]]], "flow": [[0.0, 0.1, 0.1, 0.2, 0.2]]}
    result = {"labels": [text[:2000], text], **flow, "cosines": [[[0.0, 0.5]] * 2], "kl": [0.2], "patched": [[1, 1, 0.1]]}
    return {**plain(ErrorFlow(result=result)), "prompt": text, "layer": 1}


def layerlens(text: str) -> dict:
    lists = {"top": [[0, 0, 0] * 4] * 2, "prob": [[5000] * 12] * 2, "target": [0, 0], "chance": [[5000] * 4] * 2, "kl": [[0.1] * 4]}
    return {**plain(LayerLens(result={"labels": [text, "b"], "layers": 1, "texts": [text, "b"], "words": [text], **lists})), "prompt": text}


def attention(text: str) -> dict:
    sizes = {"layers": 1, "heads": 1, "tokens": 2, "size": 2, "names": [text, text]}
    result = {"labels": [text, "b"], **sizes, "distance": [[[0.1]]], "patterns": [PIXELS] * 2}
    return {**plain(AttentionView(result=result)), "prompt": text}


def outliers(text: str) -> dict:
    maps = {"activations": [[PIXELS]], "lows": [0.1], "spans": [2.0], "weights": [[PIXELS]], "weight_lows": [0.1], "weight_spans": [1.0]}
    result = {"labels": [text], "layers": 1, "texts": [text], "points": [text[:2000]], "channels": [4], "bins": [4], **maps}
    return {**plain(OutlierMap(result={**result, "massive": [[0, 0, 0, 1, 9.0, 50.0]]})), "prompt": text, "channel": 1}


@lru_cache
def counted() -> dict:
    return plain(WeightHistogram(Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"))


def histogram(text: str) -> dict:
    groups = [{**group, "label": text} for group in counted()["_groups"]]
    return {**counted(), "_original": text, "matrix": text, "_matrices": [text], "_groups": groups}


INSIDE = {"errorflow": errorflow, "layerlens": layerlens, "attention": attention, "outliers": outliers, "histogram": histogram}
INSPECTORS = {"weights": weights, "microscope": microscope, "pagetable": pagetable, "speculation": speculation, "plan": plan}
WIDGETS = {"playground": playground, "explorer": explorer, "caches": caches, "compare": compare, "progress": progress, "bitmap": bitmap}
WIDGETS |= INSPECTORS | INSIDE
STREAMING = {"playground": playground, "caches": caches, "compare": compare}


@pytest.mark.parametrize("name", WIDGETS)
def test_text_is_only_ever_text(page, name):
    """No element, script or attribute comes of it; the text is there as it is; nothing leaves the widget's box."""
    for kind, text in hostile.TEXTS.items():
        if kind == "lone":  # what json can carry: half a pair becomes the replacement character on the way
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        MockHost(page, name, {**WIDGETS[name](text), "error": text, "status": "error"})
        found = page.evaluate("() => [window.pwned, document.querySelectorAll('main script, main img, main [onload]').length]")
        assert found == [None, 0], kind
        whole = page.evaluate("() => document.querySelector('.exl2nb').textContent")
        assert text.replace("\0", "\ufffd") in whole or text in whole, f"{kind} is not shown as it is"
        assert page.get_by_role("alert").count() == 1
        assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth"), f"{kind} widens the page"


@pytest.mark.parametrize("name", WIDGETS)
def test_a_line_of_a_megabyte(page, name):
    MockHost(page, name, WIDGETS[name](hostile.LONG))
    assert page.evaluate("() => window.pwned") is None
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth"), "the line widens the page"


@pytest.mark.parametrize(
    "name", ["playground", "explorer", "caches", "compare", "progress", "pagetable", "errorflow", "layerlens", "attention", "outliers"]
)
def test_a_silent_kernel_is_noticed_and_forgiven(page, name):
    page.clock.install()
    host = MockHost(page, name, {**WIDGETS[name]("text"), "status": "running"})
    notice = page.locator(".exl2nb-lost")
    page.clock.run_for(4000)
    assert not notice.is_visible() and {"type": "ping"} not in host.sent
    page.clock.run_for(3000)
    assert host.sent.count({"type": "ping"}) == 1, "it is asked once"
    page.evaluate("() => window.deliver({type: 'pong'})")
    page.clock.run_for(3000)
    assert not notice.is_visible(), "an answer is an answer"
    page.clock.run_for(12_000)
    assert notice.is_visible() and "run the cell again" in notice.inner_text()
    assert page.evaluate("() => document.querySelector('.exl2nb').textContent").count("text"), "what is shown stays"
    page.evaluate("() => window.deliver({type: 'pong'})")
    assert not notice.is_visible()
    page.evaluate("() => window.put({status: 'done'})")
    page.clock.run_for(30_000)
    assert not notice.is_visible(), "what does not run needs no kernel"


ASK = {
    "explorer": lambda page: page.get_by_role("slider", name="Bits per weight").fill("3"),
    "weights": lambda page: page.get_by_label("Column").fill("3"),
    "microscope": lambda page: page.get_by_role("slider", name="Top-k, slider").fill("1"),
    "pagetable": lambda page: page.get_by_role("button", name="Live").click(),
    "playground": lambda page: page.get_by_role("button", name="Generate").click(),
    "errorflow": lambda page: page.get_by_role("button", name="Patch each layer in turn").click(),
    "histogram": lambda page: page.get_by_label("Row").fill("3"),
}


@pytest.mark.parametrize("name", ASK)
def test_a_question_that_nobody_answers_is_noticed(page, name):
    """A kernel that died while nothing ran: the reader moves something, and is told; where nobody asks, nobody is disturbed."""
    page.clock.install()
    host = MockHost(page, name, {**WIDGETS[name]("text"), "_can_live": True, "_has_model": True})
    notice = page.locator(".exl2nb-lost")
    page.clock.run_for(20_000)
    assert not notice.is_visible() and {"type": "ping"} not in host.sent
    ASK[name](page)
    page.keyboard.press("Tab")
    page.clock.run_for(2000)
    assert {"type": "ping"} in host.sent
    page.clock.run_for(6000)
    assert notice.is_visible() and "run the cell again" in notice.inner_text()
    page.evaluate("() => window.deliver({type: 'pong'})")
    page.clock.run_for(20_000)
    assert not notice.is_visible(), "an answer is an answer"


@pytest.mark.parametrize("name", WIDGETS)
def test_a_second_view_shows_the_same_and_both_close_cleanly(page, name):
    MockHost(page, name, WIDGETS[name]("text"))
    page.evaluate("async () => { window.closeSecond = await window.view('second'); }")
    shown = page.evaluate("() => ['first', 'second'].map((id) => document.getElementById(id).textContent)")
    assert shown[0] == shown[1] != ""
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids)), "ids of two views clash"
    before = page.evaluate("() => window.listenerCount()")
    page.evaluate("() => { window.closeSecond(); window.closeView(); window.forget?.(); }")
    assert page.locator(".exl2nb").count() == 0
    assert page.evaluate("() => window.listenerCount()") == 0 < before


@pytest.mark.parametrize("name", STREAMING)
def test_lost_messages_are_asked_for_and_healed(page, name):
    state = {**STREAMING[name]("text"), "_tokens": [], "status": "running"}
    host = MockHost(page, name, state)
    width = {"playground": 5, "caches": 8, "compare": 8}[name]
    items = [([f" w{i}", i, 0.5, 1, []] if width == 5 else [0, f" w{i}", i, 0.5, None, None, None, None]) for i in range(9)]
    begin = {"type": "snapshot", "run": 1, "seq": -1, "prompt": "p", "items": [], "stats": NOTHING}
    deltas = [{"type": "delta", "run": 1, "seq": i, "items": [item], "stats": NOTHING} for i, item in enumerate(items)]
    host.deliver(begin, deltas[0], *deltas[2:6])
    assert host.sent[-1] == {"type": "resync"}
    assert host.sent.count({"type": "resync"}) == 1, "at most once a second"
    host.deliver({**begin, "seq": 5, "items": items[:6]}, deltas[3], deltas[6])
    words = ".exl2nb-token, .exl2nb-kl-token"
    assert page.locator(words).all_text_contents() == [f" w{i}" for i in range(7)]
    host.deliver({"type": "done", "run": 1, "seq": 8, "reason": "done", "stats": NOTHING})
    assert host.sent[-1] == {"type": "resync"}, "a lost tail is noticed"
    host.deliver({**begin, "seq": 8, "items": items}, {"type": "of another kind"}, {"type": "delta", "run": 0, "seq": 0, "items": items})
    assert page.locator(words).count() == 9, "what is not of this run changes nothing"
