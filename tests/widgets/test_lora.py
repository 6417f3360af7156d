"""LoraExplorer: the numbers of its map and of its answers, the slider's messages, refusals, what is kept of it."""

import json

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.widgets import LoraExplorer
from tests.llm.lora_maker import write_lora
from tests.widgets.page import state, tell

TEXT = "The old man went to the river and"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with ex.demo(device="cpu", progress=None) as llm:
        llm.loras.load(write_lora(tmp_path_factory.mktemp("l"), llm.config, rank=3, size=0.1), name="pirate")
        yield llm


@pytest.fixture(scope="module")
def widget(own):
    return LoraExplorer(own, "pirate", TEXT, max_tokens=12)


def test_the_map_is_norms(widget, own):
    frame = widget.to_frame().set_index(["layer", "matrix"])
    assert len(frame) == 84 and set(frame["rank"]) == {3}
    whole = own.model.matrix(3, "up")
    change = own.loras["pirate"].changes
    op = next(op for op, one in change.items() if one.parts and one.parts[0].a.shape[0] == own.config.hidden_size and len(one.parts) == 2)
    assert change[op].parts
    assert frame.loc[(3, "up"), "weight"] == pytest.approx(float(whole[:, own.config.intermediate_size :].norm()), rel=1e-3)
    target = own.loras["pirate"].file.targets[3, ("down",)]
    assert frame.loc[(3, "down"), "change"] == pytest.approx(float(target.scale * (target.b @ target.a).norm()), rel=1e-3)
    assert repr(widget).startswith("LoraExplorer(pirate at scale 1: 84 matrices, change ") and "mean KL" in repr(widget)


def test_answers_and_their_kl(widget, own):
    shown = widget.to_dict()
    assert "".join(token[1] for token in shown["base"]) == own.generate(TEXT, max_tokens=12, temperature=0).text
    assert "".join(token[1] for token in shown["adapted"]) == own.generate(TEXT, lora="pirate", max_tokens=12, temperature=0).text
    ids = [*own.tokenizer.encode(TEXT), *(token[2] for token in shown["adapted"])]
    for lora, column in ((None, "model_prob"), ("pirate", "prob")):
        want = own.score(ids, lora=lora).logprobs[-len(shown["adapted"]) :]
        assert torch.tensor(widget.to_token_frame()[column]).log().tolist() == pytest.approx(want, abs=2e-3)
    assert all(token[5] > 0 for token in shown["adapted"]) and shown["kl"] == pytest.approx(widget.to_token_frame()["kl"].mean(), rel=1e-2)


def test_the_slider(own):
    widget = LoraExplorer(own, "pirate", TEXT, max_tokens=6)
    base = widget.to_dict()["base"]
    tell(widget, {"type": "scale", "scale": 0.0})
    widget.wait()
    shown = widget.to_dict()
    assert widget.scale == shown["scale"] == 0 and shown["kl"] == 0 and shown["base"] == base
    assert [token[2] for token in shown["adapted"]] == [token[2] for token in base]
    for scale in (0.5, 1.0, 1.5):  # as a hand drags it: what counts is where it ends
        tell(widget, {"type": "scale", "scale": scale})
    widget.wait()
    if widget.to_dict()["scale"] != 1.5:  # the last message came when the run was about to end: the page asks again
        tell(widget, {"type": "scale", "scale": 1.5})
        widget.wait()
    assert widget.to_dict()["scale"] == widget.scale == 1.5
    tell(widget, {"type": "read", "prompt": "She opened the letter"})
    widget.wait()
    assert widget.prompt == "She opened the letter" and widget.to_dict()["base"] != base
    tell(widget, {"type": "scale", "scale": "high"})
    assert widget.status == "error" and "invalid scale" in widget.error


def test_what_is_shown_can_be_kept(widget, tmp_path):
    again = LoraExplorer(result=json.loads(json.dumps(widget.to_dict())))
    assert repr(again) == repr(widget) and again.to_dict() == widget.to_dict() and not state(again, "_has_model")
    data, _ = widget._repr_mimebundle_()
    assert "<script" not in data["text/html"] and "model alone" in data["text/html"]
    widget.to_html(tmp_path / "page.html")
    assert 10_000 < (tmp_path / "page.html").stat().st_size < 1_500_000
    with pytest.raises(OptionError, match="no model is attached"):
        again.at(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda llm: LoraExplorer(), "expected models"),
        (lambda llm: LoraExplorer(llm, "nobody"), "nobody.*not loaded; loaded are pirate"),
        (lambda llm: LoraExplorer(llm, "pirate", "a" * 9000), "expected 2 to 512"),
        (lambda llm: LoraExplorer(llm, "pirate", TEXT, scale=9.0), "scale is 9.0; expected -4 to 4"),
        (lambda llm: LoraExplorer(llm, "pirate", TEXT, max_tokens=0), "max_tokens"),
        (lambda llm: LoraExplorer(llm, "pirate", TEXT, selected=[1]), "selected is"),
        (lambda llm: LoraExplorer(result={"cell": []}), "did you mean 'cells'"),
    ],
)
def test_what_does_not_fit_is_named(own, make, message):
    with pytest.raises(OptionError, match=message):
        make(own)
