"""What goes wrong around widgets: interrupts, closed models, several widgets on one engine, floods of messages, hostile text.

After each, the widget can be read and the engine goes on. What happens in the page stands in tests/ui/test_faults_*.py ("page": the true
bundle, the kernel played by the test; "Lab": a real JupyterLab). What is where:

    dead kernel          page: test_a_silent_kernel_is_noticed_and_forgiven (those that run), test_a_question_that_nobody_answers_is_noticed
                         (those that ask); Lab: test_a_kernel_that_dies_leaves_a_readable_widget. BitMap, MemoryPlan and Speculation
                         answer in the page and ask nobody
    page loaded again    here: test_a_second_page_gets_the_whole_run (widgets that stream); Lab: CacheExplorer, test_answers_lab.py
    second view          page: test_a_second_view_shows_the_same_and_both_close_cleanly (all)
    Run All              Lab: test_answers_lab.py; every notebook: tests/notebooks
    a cell run again     here: test_the_cell_is_run_again_while_it_streams; Lab: Playground
    two on one engine    here: test_all_widgets_on_one_engine
    interrupt            here: while waiting, loading, converting; Lab: the stop button; 1,000 random ones: tests/converter/test_storm.py
    a closed model       here: widgets that run, BitrateExplorer, those that keep what they saw; PageTable: test_pagetable.py
    1,000 messages/s     here: the floods; lost ones, page: test_lost_messages_are_asked_for_and_healed
    an untrusted book    Lab: test_a_notebook_nobody_trusts (all)
    hostile text         script tags, bidi controls, ANSI, lines of a megabyte: page: test_text_is_only_ever_text, test_a_line_of_a_megabyte
                         (all); here: twins and exports (all)
"""

import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
from fakes import FakeModel

import exl2nb as ex
from exl2nb.core.errors import EngineClosed, Exl2Error, GenerationError
from exl2nb.core.progress import Progress
from exl2nb.generator.request import Completion, Timings, Token
from exl2nb.generator.speculation import Acceptance
from exl2nb.widgets import (
    BitMap,
    BitrateExplorer,
    CacheExplorer,
    Compare,
    MemoryPlan,
    PageTable,
    Playground,
    ProgressView,
    SamplerMicroscope,
    Speculation,
    WeightBrowser,
)
from tests.widgets.page import tell

DATA = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
TEXT = "It was a dark night, and the old man"
TINY = {"rows": 2, "length": 64, "report_rows": 2}
HOSTILE = "<script>window.pwned=1</script><img src=x onerror=alert(1)>\x1b[31m\u202e</div>\"'`"


class Copy(FakeModel):
    def close(self):
        pass


def playground(llm, tokens):
    return Playground(llm, prompt=TEXT, max_tokens=tokens, temperature=0)


def caches(llm, tokens):
    return CacheExplorer(llm, prompt=TEXT, modes=["q8"], max_tokens=min(tokens, 512))


def compare(llm, tokens):
    return Compare({"a": llm, "b": (llm, {"temperature": 1.0, "seed": 1})}, prompts=[TEXT], max_tokens=tokens)


WIDGETS = {"playground": playground, "caches": caches, "compare": compare}


def text_of(widget) -> str:
    if isinstance(widget, Playground):
        return widget.text
    frame = widget.to_frame()
    return frame.text.iloc[0]


def free(llm) -> bool:
    return llm.engine.wait_idle(10) and llm.engine.pages.num_free == llm.engine.spec.num_pages


@pytest.mark.parametrize("name", WIDGETS)
def test_an_interrupt_while_waiting(llm, name):
    """The interrupt comes out at once, the run ends, its pages are free, and the next run is right."""
    widget = WIDGETS[name](llm, 900)
    widget.start()
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        widget.wait()
    assert time.monotonic() - began < 8
    assert widget.status == "stopped", "it had ended before the interrupt was out"
    assert free(llm)
    again = WIDGETS[name](llm, 6)
    again.start()
    again.wait()
    assert text_of(again) == llm.generate(TEXT, max_tokens=6, temperature=0).text


@pytest.mark.parametrize("name", WIDGETS)
def test_a_model_closed_under_a_widget(name):
    llm = ex.demo(progress=None)
    widget = WIDGETS[name](llm, 900)
    widget.start()
    time.sleep(0.05)
    llm.close()
    with suppress(Exl2Error):  # unless it was complete already
        widget.wait(20)
    assert widget.status in ("error", "done")
    with pytest.raises(EngineClosed):
        widget.start().wait()
    assert "closed" in widget.error and widget.status == "error"
    assert widget._repr_mimebundle_()[0]["text/html"]
    widget.close()


def test_a_model_closed_under_the_explorer(measurement, llm, monkeypatch):
    closed = ex.demo(progress=None)
    closed.close()
    monkeypatch.setattr(ex, "convert", lambda *_, **__: SimpleNamespace(quality=None))
    monkeypatch.setattr(ex, "load", lambda *_, **__: Copy([" a", " copy"]))
    explorer = BitrateExplorer(measurement, closed, bpw=3.0, max_tokens=4)
    with pytest.raises(Exl2Error, match="closed"):
        explorer.make().wait(60)
    assert explorer.status == "error" and "closed" in explorer.error
    explorer.solve(5.0)
    assert explorer.solved == 5.0, "the slider needs no model"
    explorer.close()
    assert llm.generate(TEXT, max_tokens=1).tokens


def test_what_was_seen_outlives_the_model():
    """These keep what they need: a slider or a place can still be moved when the model is closed, as after a last cell that closes it."""
    llm = ex.demo(progress=None)
    scope = SamplerMicroscope(llm, TEXT, max_tokens=4, temperature=0.8, seed=7)
    guesses = Speculation(llm, TEXT, max_tokens=4, temperature=0)
    weights = WeightBrowser(DATA, llm, column=3)
    llm.close()
    tell(scope, {"type": "sample", "at": 2, "settings": {"top_k": 5}})
    tell(weights, {"type": "look", "layer": 0, "matrix": weights.matrix, "group": 0, "unit": 0, "column": 9})
    assert (scope.at, scope.params.top_k, weights.column) == (2, 5, 9)
    assert [widget.error for widget in (scope, guesses, weights)] == ["", "", ""]
    for widget in (scope, guesses, weights):
        assert widget._repr_mimebundle_()[0]["text/html"]
        widget.close()


@pytest.mark.parametrize("name", WIDGETS)
def test_the_cell_is_run_again_while_it_streams(llm, name):
    """`widget.start()` again says what to do; a new widget in its place runs beside the old one; both are right."""
    old = WIDGETS[name](llm, 60)
    old.start()
    with pytest.raises(GenerationError, match=r"call .stop\(\) or .wait\(\) first"):
        old.start()
    new = WIDGETS[name](llm, 60)
    new.start()
    new.wait()
    old.wait()
    assert old.status == new.status == "done"
    assert text_of(old) == text_of(new) == llm.generate(TEXT, max_tokens=60, temperature=0).text


def test_all_widgets_on_one_engine(llm):
    alone = llm.generate(TEXT, max_tokens=40, temperature=0).text
    widgets = [make(llm, 40) for make in WIDGETS.values() for _ in range(2)]
    for widget in widgets:
        widget.start()
    for widget in widgets:
        widget.wait()
    assert [text_of(widget) for widget in widgets] == [alone] * len(widgets)
    assert free(llm)


@pytest.fixture
def traffic(monkeypatch):
    """Counts what goes to the page: custom messages and trait updates."""
    counts = {"messages": 0}
    for name in ("send", "send_state"):
        original = getattr(ipywidgets.Widget, name)

        def counted(self, *args, _original=original, **kwargs):
            counts["messages"] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(ipywidgets.Widget, name, counted)
    return counts


@pytest.mark.parametrize("name", ["playground", "compare"])
def test_a_flood_of_tokens_is_no_flood_of_messages(traffic, name):
    """5,000 tokens without a pause: far below the 1,000 messages a second at which a Jupyter server drops them."""
    model = FakeModel()
    widget = Playground(model, max_tokens=5000) if name == "playground" else Compare(model, prompts=["p"], max_tokens=1000)
    began = time.monotonic()
    widget.start()
    widget.wait(60)
    seconds = time.monotonic() - began
    assert widget.status == "done"
    assert traffic["messages"] < 60 + 60 * seconds


def test_a_flood_of_measured_tokens_and_of_pages(traffic, llm):
    """CacheExplorer beside a PageTable that looks fifty times a second."""
    began = time.monotonic()
    table, widget = PageTable(llm, period_s=0.02), caches(llm, 200)
    with table:
        widget.start()
        llm.generate(TEXT, max_tokens=100, ignore_eos=True)
        widget.wait(60)
    assert widget.status == "done" and len(table.frames) > 1
    assert traffic["messages"] < 120 + 90 * (time.monotonic() - began)


def test_a_flood_of_progress_and_of_moves(traffic, measurement):
    view = ProgressView("load")
    began = time.monotonic()
    with view:
        for i in range(20_000):
            view(Progress(stage="load", done=i, total=20_000, unit="tensors", elapsed_s=1.0))
    assert traffic["messages"] < 30 + 40 * (time.monotonic() - began)
    assert view.status == "done"
    explorer = BitrateExplorer(measurement)
    before = traffic["messages"]
    for _ in range(10):
        tell(explorer, {"type": "solve", "bpw": 3.0})
    assert traffic["messages"] - before <= 20, "an answer is one message, whatever number of traits it has"


class Interrupting:
    """A ProgressView that is interrupted at its n-th event, as by the stop button of the notebook."""

    def __init__(self, view, n):
        self.view, self.left = view, n

    def __call__(self, event):
        self.view(event)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def __enter__(self):
        self.view.__enter__()
        return self

    def __exit__(self, *error):
        return self.view.__exit__(*error)


@pytest.mark.parametrize("work", ["load", "convert"])
def test_an_interrupt_during_long_work(llm, tmp_path, work, measurement):
    """It comes out, the line says that it was cancelled, threads and memory are free, and the same call works afterwards."""
    view, threads = ProgressView(work), threading.active_count()
    sink = Interrupting(view, 2 if work == "load" else 4)
    options = {"bpw": 3.0, "measurement": measurement, **TINY, "work_dir": tmp_path / "work"}
    with pytest.raises(KeyboardInterrupt):
        ex.load(llm.path, progress=sink) if work == "load" else ex.convert(llm.path, tmp_path / "made", progress=sink, **options)
    assert view.status == "stopped"
    assert "cancelled after" in view._repr_mimebundle_()[0]["text/html"]
    assert threading.active_count() <= threads
    assert llm.generate(TEXT, max_tokens=1).tokens
    if work == "load":
        with ex.load(llm.path, progress=None) as again:
            assert again.generate(TEXT, max_tokens=4, temperature=0).text == llm.generate(TEXT, max_tokens=4, temperature=0).text
    with pytest.raises(KeyboardInterrupt):  # the line can be used again, and the work begun again: it is interrupted once more
        ex.load(llm.path, progress=Interrupting(view, 2))
    assert view.status == "stopped" and len(view.finished) <= 3


def hostile_widgets():
    token = {"text": HOSTILE, "id": 1, "prob": 0.5, "rank": 2, "top": [(HOSTILE, 0.5)]}
    kl = [0, HOSTILE, 1, 0.5, 0.5, 0.1, True, HOSTILE]
    needle = {"fact": HOSTILE, "question": HOSTILE, "answer": HOSTILE, "tokens": 1}
    progress = ProgressView(HOSTILE)
    progress(Progress(stage=HOSTILE, done=1, total=2, unit=HOSTILE, elapsed_s=1.0))
    seen = {"modes": ["fp16"], "prompt": HOSTILE, "tokens": [kl], "model": HOSTILE, "verdict": HOSTILE, "needle_text": needle}
    yield Playground(result={"text": HOSTILE, "tokens": [token], "prompt": HOSTILE})
    yield CacheExplorer(result={**seen, "needle": [["fp16", None, 0.1, 1]]})
    yield Compare(result={"columns": [[HOSTILE, HOSTILE, 1, 2.0]], "prompts": [HOSTILE], "tokens": [kl], "note": HOSTILE})
    yield progress
    yield BitMap({"path": HOSTILE, "matrices": [{"key": HOSTILE, "bpw": 4.0}]})


class Words:
    """A tokenizer of which every token is hostile."""

    eos_ids, highest_id = (), 2

    def piece(self, _token):
        return HOSTILE


def weights():
    browser = WeightBrowser(DATA)
    browser.title = HOSTILE
    return browser


def microscope():
    return SamplerMicroscope(np.log(np.float32([0.5, 0.3, 0.2])), new_ids=[0], top_k=2, seed=1, tokenizer=Words())


def pagetable():
    frame = {"page_size": 256, "pages": [["used", 256, [1], "aa", -1, "new"]], "requests": [], "evictions": 0, "preemptions": 0}
    return PageTable({**frame, "label": HOSTILE}, title=HOSTILE)


def plan():
    return MemoryPlan(replace(ex.plan(Path(ex.__file__).parent / "demo_model", free=10**9), name=HOSTILE))


def explorer():
    widget = BitrateExplorer(prompt=HOSTILE)
    widget.original = widget.made = HOSTILE
    return widget


def speculation():
    timings = Timings(prompt_tokens=1, new_tokens=1, queue_s=0.0, first_token_s=0.5, prefill_s=0.5, decode_s=0.02)
    told = Acceptance(kind="ngram", steps=1, proposed=1, accepted=1, lengths=(0, 1), plain_steps=0)
    token = Token(1, HOSTILE, -0.1, 0.9, 1)
    return Speculation(
        Completion(text=HOSTILE, tokens=(token,), finish_reason="length", timings=timings, seed=1, prompt=HOSTILE, speculation=told)
    )


GLASSES = (weights, microscope, pagetable, plan, explorer, speculation)
MAKERS = [*(pytest.param(lambda widget=widget: widget, id=type(widget).__name__) for widget in hostile_widgets()), *GLASSES]


@pytest.mark.parametrize("make", MAKERS)
def test_text_is_data_in_the_twin_and_in_the_export(make):
    widget = make()
    twin = widget._repr_mimebundle_()[0]
    assert "<script" not in twin["text/html"] and "<img" not in twin["text/html"]
    assert "&lt;script&gt;" in twin["text/html"] or "&lt;img" in twin["text/html"], "the text itself is missing"
    page = widget.to_html(title=HOSTILE)
    assert page.count("<script") == 2, "only our own"
    assert "<img" not in page
    assert "<script" not in widget.as_html().data.split('srcdoc="')[1]


@pytest.mark.parametrize("widget", [Playground(), CacheExplorer(), Compare(), ProgressView("x")], ids=lambda widget: type(widget).__name__)
@pytest.mark.parametrize(
    "message",
    [None, 3, "stop", [], {}, {"type": 1}, {"type": "__class__"}, {"type": "no such"}, {"type": "run"}, {"type": "generate"},
     {"type": "needle", "modes": 3}, {"type": "solve", "bpw": []}, {"type": "stop"}, {"type": "ping"}],
)  # fmt: skip
def test_nonsense_from_the_page(sent, widget, message):
    """Never raises; a message that asks for something shows why it cannot be had; `ping` is answered."""
    tell(widget, message)
    assert widget.status in ("idle", "error")
    assert (widget.status == "error") == bool(widget.error)
    assert (sent == [{"type": "pong"}]) == (message == {"type": "ping"})
    widget.status, widget.error = "idle", ""


def test_a_second_page_gets_the_whole_run(llm, sent):
    for make in WIDGETS.values():
        widget = make(llm, 12)
        widget.start()
        widget.wait()
        del sent[:]
        tell(widget, {"type": "ready"})
        assert [m["type"] for m in sent] == ["snapshot"]
        assert "".join(item[0 if isinstance(widget, Playground) else 1] for item in sent[0]["items"]).startswith(text_of(widget))


def test_the_folder_of_the_model_is_gone(tmp_path, llm):
    """What reads files later says which; what is loaded goes on."""
    with pytest.raises(Exl2Error, match="nothing"):
        BitMap(str(tmp_path / "nothing"))
    gone = Compare({"a": llm, "b": Path(tmp_path / "nothing")}, prompts=[TEXT], max_tokens=2).start()
    with pytest.raises(Exl2Error, match="nothing"):
        gone.wait()
    assert gone.status == "error"
