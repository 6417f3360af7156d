"""ProgressView and what progress="auto" means."""

import io
import sys
import types

import pytest

from exl2nb.core.errors import Interrupted, OptionError
from exl2nb.core.progress import Meter, Progress, SilentSink, TextSink, showing
from exl2nb.widgets import ProgressView, progress_view
from tests.widgets.page import tell


def test_shows_the_latest_event():
    view = ProgressView("convert")
    view(Progress(stage="measure", done=3, total=12, unit="layers", elapsed_s=2.0, eta_s=6.0, detail="layer 3"))
    shown = (view.status, view.stage, view.done, view.total, view.rate, view.eta_s, view.detail)
    assert shown == ("running", "measure", 3, 12, 1.5, 6.0, "layer 3")
    assert repr(view) == "convert: measure: 3/12 layers (2.0 s, 6 s left)"
    html = view._repr_mimebundle_()[0]["text/html"]
    assert "3/12 layers" in html


def test_share_and_time_left_are_those_of_the_whole_work():
    """At 13 of 25 passes nearly all of the work is still to come."""
    view = ProgressView("convert")
    view(
        Progress(stage="measure", done=13, total=25, unit="passes", elapsed_s=1.2, eta_s=1.1, share=0.52, work_share=0.03, work_eta_s=44.0)
    )
    assert (view.share, view.eta_s, view.rate) == (0.03, 44.0, 0.0)
    assert repr(view) == "convert: measure: 13/25 passes (1.2 s, 44 s left)"
    view(Progress(stage="download", done=5, unit="files", state="done"))
    assert view.share is None


def test_nothing_is_named_twice():
    view = ProgressView("compare")
    view(Progress(stage="compare", done=3, total=12, unit="tokens", elapsed_s=2.0, eta_s=6.0))
    assert repr(view) == "compare: 3/12 tokens (2.0 s, 6 s left)"
    view(Progress(stage="compare", done=12, total=12, unit="tokens", elapsed_s=8.0, state="done"))
    assert repr(view) == "compare: done in 8.0 s"


def test_updates_are_throttled_but_the_end_arrives(monkeypatch):
    view, updates = ProgressView(), []
    view.observe(lambda change: updates.append(change["new"]), names="done")
    with Meter("quantize", total=5000, unit="columns", sink=view) as meter:
        for _ in range(5000):
            meter.step()
    assert len(updates) < 200
    assert (view.done, view.status) == (5000, "done")
    assert view.finished[0][0] == "quantize"


def test_stages_end_in_one_line():
    with ProgressView("convert") as view:
        for stage in ("measure", "write"):
            with Meter(stage, total=1, sink=view) as meter:
                meter.step()
            assert view.status == "running"
    assert view.status == "done"
    assert repr(view).startswith("convert: done in 0.0 s (measure 0.0 s, write 0.0 s)")
    with view:
        assert view.finished == []


def test_cancel_raises_in_the_work_and_only_there():
    view = ProgressView("convert")
    steps = []

    def work():
        with view, Meter("measure", total=9, sink=view) as meter:
            for step in range(9):
                if step == 2:
                    tell(view, {"type": "stop"})
                meter.step()
                steps.append(step)

    with pytest.raises(Interrupted, match="convert: cancelled"):
        work()
    assert steps == [0, 1]
    assert view.status == "stopped"
    assert repr(view).startswith("convert: cancelled after")
    with Meter("again", total=1, sink=view) as meter:
        meter.step()
    assert view.status == "done"


def test_a_failure_is_shown():
    with pytest.raises(ZeroDivisionError), ProgressView("x") as view, Meter("measure", sink=view):
        1 / 0  # noqa: B018
    assert view.status == "error"


def test_unknown_keyword():
    with pytest.raises(OptionError, match="did you mean 'cancellable'"):
        ProgressView(cancelable=False)


def test_notebook_sink_appears_only_for_long_work(monkeypatch):
    shown = []
    monkeypatch.setattr(ProgressView, "show", lambda self: shown.append(self))
    with progress_view.notebook_sink("load") as sink, Meter("load", total=1, sink=sink) as meter:
        meter.step()
    assert shown == []
    monkeypatch.setattr(progress_view, "APPEAR_AFTER_S", 0.0)
    with progress_view.notebook_sink("convert") as sink:
        for stage in ("a", "b"):
            with Meter(stage, total=1, sink=sink) as meter:
                meter.step()
    assert len(shown) == 1
    assert [stage for stage, _, _ in shown[0].finished] == ["a", "b"]
    assert shown[0].status == "done"


def test_auto_means_where_the_caller_looks(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def kind():
        with showing("auto", "work") as sink:
            return type(sink)

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert kind() is SilentSink
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert kind() is TextSink
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert kind() is progress_view.NotebookSink
    events = []
    with showing(events.append) as sink:
        sink(Progress(stage="x"))
    assert events
    with showing(None) as sink:
        assert isinstance(sink, SilentSink)
    with pytest.raises(OptionError, match="progress is 'always'"), showing("always"):
        pass
