"""PageTable's Python half: the view is the table, events between frames, live watching, replay, bad frames, export."""

import json
import threading
import time

import pytest

import exl2nb
from exl2nb.core.errors import OptionError
from exl2nb.widgets import PageTable
from exl2nb.widgets.pagetable import event_of, frame_of
from exl2nb.widgets.protocol import PageCell
from tests.widgets.page import exported, state, tell

STORY = "The rain fell on the old town, and nobody was in the streets. " * 30


@pytest.fixture
def llm():
    with exl2nb.demo(progress=None, cache_tokens=4096) as llm:
        yield llm


def test_the_view_is_the_table(llm):
    both = llm.stream([STORY + "Then", STORY + "But"], max_tokens=200, seed=1, ignore_eos=True)
    chunks = both.chunks()
    for _ in range(8):
        next(chunks)
    snapshot = llm.cache.snapshot()
    table = PageTable(snapshot, title="two alike")
    both.cancel()
    for page, cell in zip(snapshot.pages, table.shown["pages"]):
        assert (cell[0], cell[1], tuple(cell[2])) == (page.state, page.tokens, page.owners)
        if cell[4] >= 0 and page.parent:
            assert snapshot.pages[cell[4]].key == page.parent or any(
                list(one.pages[i : i + 2]) == [cell[4], page.page] for one in snapshot.requests for i in range(len(one.pages))
            )
    assert [one[5] for one in table.shown["requests"]] == [list(one.pages) for one in snapshot.requests]
    assert repr(table) == f"PageTable({len(snapshot.pages)} pages of 256 tokens: " + (
        f"{snapshot.num('used')} used ({snapshot.num('shared')} shared), {snapshot.num('cached')} cached, {snapshot.num('free')} free, "
        "0 evicted so far)"
    )
    assert snapshot.num("shared") >= 1, "the beginning is shared"
    frame = table.to_frame()
    assert (frame.state == "used").sum() == snapshot.num("used")


@pytest.mark.parametrize(
    ("before", "now", "event"),
    [
        (("free", 0, [], ""), ("used", 3, [1], ""), "new"),
        (("cached", 256, [], "ab"), ("used", 256, [1], "ab"), "found"),
        (("cached", 256, [], "ab"), ("used", 9, [1], ""), "evicted"),
        (("cached", 40, [], ""), ("used", 60, [1], ""), "found"),
        (("cached", 40, [], ""), ("used", 2, [1], ""), "evicted"),
        (("used", 256, [1], "ab"), ("used", 256, [1, 2], "ab"), "joined"),
        (("used", 256, [1], "ab"), ("used", 256, [2], "ab"), ""),
        (("used", 256, [1], "ab"), ("cached", 256, [], "ab"), "freed"),
        (("used", 20, [1], ""), ("free", 0, [], ""), "freed"),
        (("cached", 256, [], "ab"), ("free", 0, [], ""), "cleared"),
        (("cached", 256, [], "ab"), ("cached", 256, [], "cd"), "evicted"),
        (("cached", 256, [], "ab"), ("cached", 256, [], "ab"), ""),
        (("free", 0, [], ""), ("free", 0, [], ""), ""),
    ],
)
def test_what_happened_to_a_page(before, now, event):
    assert event_of(PageCell(*before, -1, ""), PageCell(*now, -1, "")) == event


def test_evictions_are_seen():
    with exl2nb.demo(progress=None, context=1024, cache_tokens=1024) as llm:
        table = PageTable(llm)
        for word in ("One", "Two", "Three", "Four", "Five"):
            llm.generate(f"{word}. {STORY}", max_tokens=1)
            table.take(word)
        assert table.shown["evictions"] == llm.cache.snapshot().evictions > 0
    events = table.to_frame().groupby("frame").event.agg(lambda e: set(e) - {""}).tolist()
    assert "evicted" in set().union(*events)
    assert [frame["label"] for frame in table.frames] == ["", "One", "Two", "Three", "Four", "Five"]


def test_live_watching_makes_frames_and_ends(llm):
    table = PageTable(llm, period_s=0.02)
    with table:
        assert table.live
        assert table.status == "running"
        llm.generate(STORY, max_tokens=60, ignore_eos=True)
    assert not table.live
    assert table.status == "stopped"
    assert len(table.frames) > 3
    used = [sum(cell[0] == "used" for cell in frame["pages"]) for frame in table.frames]
    assert max(used) > 0
    assert used[-1] == 0, "the last moment is after the answer"
    assert threading.active_count() < 20
    exported(table)


def test_a_closed_model_ends_watching():
    llm = exl2nb.demo(progress=None)
    table = PageTable(llm, period_s=0.02).start()
    llm.close()
    end = time.monotonic() + 5
    while table.live and time.monotonic() < end:
        time.sleep(0.01)
    assert not table.live
    assert table.error == ""
    assert len(table.frames) == 1


def test_replay_from_python_and_page(llm):
    shots = []
    for i in range(4):
        llm.generate(f"{i} {STORY}", max_tokens=1)
        shots.append(llm.cache.snapshot())
    table = PageTable(shots, labels=["a", "b"])
    assert (state(table, "_count"), state(table, "_shown")) == (4, 3)
    table.frame = 1
    assert (state(table, "_shown"), table.shown["label"], state(table, "_frames")[0]["label"]) == (1, "b", "b")
    with pytest.raises(OptionError, match="frame is 9; expected -1 .the last. to 3"):
        table.frame = 9
    assert table.frame == 1
    tell(table, {"type": "frame", "frame": 10**6, "live": False})
    assert state(table, "_shown") == 3
    tell(table, {"type": "frame", "frame": -5, "live": False})
    assert table.frame == -1
    tell(table, {"type": "frame", "frame": "x", "live": False})
    assert "an invalid frame" in table.error
    again = PageTable(json.loads(json.dumps([{**f, "pages": [list(c) for c in f["pages"]]} for f in table.frames])))
    assert state(again, "_frames") == state(PageTable(shots, labels=["a", "b"]), "_frames"), "the same from plain data"
    with pytest.raises(OptionError, match="has no model to watch"):
        table.start()
    with pytest.raises(OptionError, match="has no model to ask"):
        table.take()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "got 'int'"),
        ([], "no snapshot"),
        ({"pages": [[1]], "requests": []}, "a frame of plain data is not one"),
        (
            {"pages": [["full", 1, [], "", -1, ""]], "requests": [], "page_size": 256, "evictions": 0, "preemptions": 0},
            "an unknown state",
        ),
    ],
)
def test_bad_sources_are_named(source, message):
    with pytest.raises(OptionError, match=message):
        PageTable(source)


def test_bad_options(llm):
    with pytest.raises(OptionError, match="period_s is 0"):
        PageTable(llm, period_s=0)
    with pytest.raises(OptionError, match="frame is 5"):
        PageTable(llm, frame=5)


def test_static_twin_and_a_small_export(llm, tmp_path):
    llm.generate(STORY, max_tokens=1)
    table = PageTable(llm, title="<img src=x>")
    for _ in range(60):
        table.take("<script>alert(1)</script>")
    data, _ = table._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert "<img" not in data["text/html"]
    assert "page 0: cached" in data["text/html"]
    table.to_html(tmp_path / "pages.html")
    assert (tmp_path / "pages.html").stat().st_size < 200_000
    many = frame_of(llm.cache.snapshot())
    big = PageTable([{**many, "pages": [PageCell("used", 256, [i % 90], "ab" * 16, i - 1, "") for i in range(1024)]}] * 40)
    assert len(big.to_html() or "") < 200_000
    state = exported(big)
    assert state["_count"] == len(state["_frames"]) < 40
    assert state["_shown"] == state["_count"] - 1
