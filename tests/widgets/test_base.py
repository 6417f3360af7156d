"""What all widgets share: keywords, messages, errors, twins without a kernel."""

import gc
import json
import re
import sys
from contextlib import suppress

import pytest

from exl2nb import widgets
from exl2nb.core.errors import OptionError
from exl2nb.widgets import ExlWidget, Playground, ProgressView, static
from tests.widgets.page import tell


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(OptionError, match="Playground: unknown keyword 'temprature'; did you mean 'temperature'"):
        Playground(temprature=1)
    with pytest.raises(OptionError, match="unknown keyword 'text'"):
        Playground(text="read-only traits are no keywords")
    with pytest.raises(OptionError, match="'view' trait"):
        Playground(view="rainbow")


def test_a_closed_widget_leaves_nothing_registered():
    """Neither itself nor the layout that it made; a caller's own layout stays his."""
    from ipywidgets import Layout
    from ipywidgets.widgets.widget import _instances

    layout = Layout(width="50%")
    before = len(_instances)
    for _ in range(5):
        for widget in (Playground(), ProgressView(), Playground(layout=layout)):
            assert widget.layout is not None
            widget.close()
            widget.close()
    assert len(_instances) == before and layout.comm is not None
    layout.close()


def test_a_constructor_that_was_not_reached_is_closed_in_silence(monkeypatch):
    """The garbage collector closes what Python refused to make."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    for kind in (getattr(widgets, name) for name in dir(widgets) if name[0].isupper()):
        for arguments in ((), (None, None), (1, 2, 3)):
            with suppress(Exception):
                kind(*arguments)
        with suppress(Exception):
            kind(nonsense=1)
    gc.collect()
    assert not seen


def test_height_takes_pixels_and_css():
    assert Playground(height=200).height == "200px"
    assert Playground(height="20em").height == "20em"


def test_reply_routing_is_opted_out_of(monkeypatch):
    """ipykernel 7.4 routes a comm's messages to the shell that sent last; ours must take the default."""

    import comm
    import ipykernel
    from ipykernel.comm import Comm as Real

    class Pinned(comm.DummyComm):
        _reply_subshell_for = None

    assert not hasattr(Playground().comm, "_reply_subshell_for"), "an older comm, which needs nothing, was changed"
    monkeypatch.setattr(comm, "create_comm", Pinned)
    assert Playground().comm._reply_subshell_for({}, "the default") == "the default"

    if tuple(map(int, ipykernel.__version__.split(".")[:2])) >= (7, 4):
        assert hasattr(Real, "_reply_subshell_for"), (
            "ipykernel renamed it: Stop may now queue behind a busy cell, see ExlWidget._unpin_replies"
        )


def test_strange_messages_change_nothing():
    widget = Playground()
    for message in (None, "text", {}, {"type": "unheard of"}, {"type": "__init__"}, {"type": ["list"]}, [1]):
        tell(widget, message)
    assert widget.status == "idle"


def test_an_error_in_a_handler_shows_in_the_widget():
    class Broken(ExlWidget):
        def _receive_poke(self, message):
            raise ValueError("no such layer")

    widget = Broken()
    tell(widget, {"type": "poke"})
    assert (widget.status, widget.error) == ("error", "ValueError: no such layer")


def test_bundle_has_widget_html_and_text():
    widget = Playground(result={"text": "a <b>", "prompt": "Once"})
    data, metadata = widget._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert data["text/plain"].startswith("Playground(done, 1 token)")
    assert "a &lt;b&gt;" in data["text/html"]
    assert not re.search(r"<script|<style|javascript:|\son\w+=", data["text/html"], re.I)
    assert isinstance(metadata, dict)


def test_colab_metadata_is_kept(monkeypatch):
    import anywidget

    monkeypatch.setattr(anywidget.AnyWidget, "_repr_mimebundle_", lambda self, **kw: ({"x": 1}, {"x": {"colab": "url"}}))
    assert Playground()._repr_mimebundle_()[1] == {"x": {"colab": "url"}}


def test_display_publishes_the_widget_and_a_replaceable_twin(monkeypatch):
    import IPython.display

    published = []
    monkeypatch.setattr(IPython.display, "publish_display_data", lambda data, metadata, transient=None: published.append((data, transient)))
    widget = Playground()
    widget._ipython_display_()
    (live, none), (twin, transient) = published
    assert set(live) == {"application/vnd.jupyter.widget-view+json"}
    assert none is None
    assert set(twin) == {"text/html", "text/plain"}
    assert set(transient) == {"display_id"}
    widget._ipython_display_()
    assert published[3][1] == transient, "the second display has another twin"


def test_repr_is_cheap_and_short():
    widget = Playground(result={"text": "x" * 100_000})
    assert len(repr(widget)) < 200
    assert repr(ProgressView("convert")) == "convert: waiting"


def test_offline_page_is_self_contained(tmp_path):
    widget = Playground(result={"text": "</script><script>alert(1)</script>", "prompt": "Once"})
    assert widget.to_html(tmp_path / "page.html", title="A <title>") is None
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"""(src|href)=(?!\\?"\$\{)|@import|https?://(?!www\.w3\.org)""", text), "refers to something outside"
    assert "<title>A &lt;title&gt;</title>" in text
    assert text.count("<script") == 2
    data = json.loads(re.search(r'id="exl2nb-export">(.*?)</script>', text, re.S).group(1))
    assert data["state"]["_tokens"][0][0] == "</script><script>alert(1)</script>"
    assert data["state"]["_static"] is True
    with pytest.raises(OptionError, match="does not exist"):
        widget.to_html(tmp_path / "no" / "page.html")
    assert "srcdoc=" in widget.as_html().data


def test_tints_match_the_front_end():
    assert [static.surprise(p) for p in (1, 0.9, 0.89, 0.5, 0.2, 0.05, 0.049, 0, None)] == [0, 0, 1, 1, 2, 3, 4, 4, 0]


def test_bundles_are_small_and_there():
    for name in ("playground.js", "playground.css", "progress.js", "progress.css", "host.js"):
        assert 100 < (static.STATIC_FOLDER / name).stat().st_size < 50_000
    for name in ("playground.css", "progress.css"):
        text = (static.STATIC_FOLDER / name).read_text()
        rules = re.findall(r"(?:^|})([^{}@]+)\{", re.sub(r"@keyframes [\w-]+\{(?:[^{}]*\{[^}]*\})*\}|@media[^{]*\{", "}", text))
        assert rules
        assert all(".exl2nb" in rule for rule in rules), "a rule outside .exl2nb would restyle the notebook"
