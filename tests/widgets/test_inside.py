"""The widgets that look inside: what they measure on the demo model and its 4-bit twin, what they refuse, their twins and exports."""

import base64
import math
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.model.sources import ReconstructedWeights
from exl2nb.model.store import open_store
from exl2nb.quant.exl2 import Exl2Tensors
from exl2nb.widgets import AttentionView, ErrorFlow, LayerLens, OutlierMap, WeightHistogram
from exl2nb.widgets import attention as attention_module
from exl2nb.widgets.outliers import group_errors
from tests.widgets.page import exported, state, tell

EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
TEXT = "It was a dark night, and the old man"


@pytest.fixture(scope="module")
def low():
    with ex.load(EXL2, progress=None) as model:
        yield model


@pytest.fixture(scope="module")
def flow(llm, low):
    return ErrorFlow({"16 bits": llm, "4 bits": low, "q4 cache": (llm, {"cache": "q4"})}, TEXT)


@pytest.fixture(scope="module")
def lens(llm, low):
    return LayerLens({"16 bits": llm, "4 bits": low}, TEXT)


def test_layer_lens_says_what_traces_say(lens, llm, low):
    names = ["blocks.0.hook_resid_pre", "blocks.*.hook_resid_post", "logits"]
    want, got = llm.trace(TEXT, names), low.trace(TEXT, names)
    frame = lens.to_frame().set_index(["model", "layer", "token"])
    for layer, token in [(-1, 2), (4, 3), (11, 8)]:
        one, other = (side.lens(0, "hook_resid_pre") if layer < 0 else side.lens(layer) for side in (want, got))
        row = frame.loc["4 bits", layer, token]
        assert row.top == low.tokenizer.piece(int(other[token].argmax()))
        assert row.prob == pytest.approx(float(other[token].softmax(-1).max()), abs=1e-4)
        assert row.target == llm.tokenizer.piece(int(want.logits[token].argmax()))
        assert row.chance == pytest.approx(float(other[token].softmax(-1)[want.logits[token].argmax()]), abs=1e-4)
        divergence = float(torch.nn.functional.kl_div(other.log_softmax(-1), one.softmax(-1), reduction="none").sum(-1)[token])
        assert row.kl == pytest.approx(divergence, rel=0.01, abs=1e-6)
    assert frame.loc["16 bits"].kl.eq(0).all() and "top-1 differs at" in repr(lens)
    alone = LayerLens(llm, TEXT)
    assert alone.to_frame().top.tolist() == lens.to_frame().query("model == '16 bits'").top.tolist()
    assert alone.to_dict()["kl"] == []


@pytest.fixture(scope="module")
def attention(llm, low):
    return AttentionView({"16 bits": llm, "4 bits": low}, TEXT, layer=6)


def test_attention_view_shows_the_patterns_of_traces(attention, llm, low):
    name = "blocks.6.attn.hook_pattern"
    want, got = llm.trace(TEXT, name)[name], low.trace(TEXT, name)[name]
    for side, pattern in enumerate((want, got)):
        assert (attention.pattern(6, 2, side) - pattern[2]).abs().max() < 0.004, "a byte a place"
    assert (attention.layer, attention.head) == (6, 2)
    moved = (want - got).abs().sum(-1).mean(-1) / 2
    frame = attention.to_frame().query("layer == 6")
    assert frame.moved.tolist() == pytest.approx(moved.tolist(), rel=1e-3)
    (heads,), (one,) = state(attention, "_heads"), state(attention, "_one")
    assert (heads["layer"], one["layer"], one["head"]) == (6, 6, 2) and len(one["data"]) == 2
    attention.layer = 99  # the page shows the last one
    assert state(attention, "_heads")[0]["layer"] == 11
    with pytest.raises(OptionError, match="head is 4; expected"):
        attention.look(0, 4)
    attention.look(6, 0)
    stored = exported(attention)["_stored"]
    assert [one["layer"] for one in stored] == list(range(12))


def test_attention_of_a_long_text_is_averaged(llm):
    """Rows are means over queries, and still add up to 1 as far as bytes go; thumbnails too."""
    view = AttentionView({"fp32": llm, "q4": (llm, {"cache": "q4"})}, "The rain fell on the town. " * 60)
    shown = view.to_dict()
    assert shown["size"] == 256 < shown["tokens"] and len(shown["names"]) == 256
    assert shown["names"][0].startswith("token")
    assert (view.pattern(0, 0, 1).sum(-1) - 1).abs().max() < 0.15
    whole = llm.trace("The rain fell on the town. " * 60, "blocks.0.attn.hook_pattern", pattern_size=256)["blocks.0.attn.hook_pattern"]
    assert (view.pattern(0, 0) - whole[0]).abs().max() < 0.004
    assert state(view, "_heads")[0]["size"] == 48 and len(view.to_html()) < 1_600_000


def test_attention_of_a_long_text_appears_row_by_row(llm, monkeypatch):
    """In the background, at once displayed; rows are the final ones, and Stop ends it between two steps."""
    monkeypatch.setattr(attention_module, "SHOW_EVERY_S", 0.0)
    text = "The rain fell on the town. " * 60
    view = AttentionView({"fp32": llm, "q4": (llm, {"cache": "q4"})}, text, wait=False)
    seen = []
    view.observe(lambda change: seen.append((state(view, "_share"), change["new"][0]["rows"], change["new"][0]["data"][0])), "_one")
    view.wait()
    shares, rows = [share for share, _, _ in seen], [known for _, known, _ in seen]
    assert view.status == "done" and rows[-1] == [256, 256] and shares == sorted(shares) and len(seen) > 2
    first = next(known for known in rows if 0 < known[0] < 256)
    assert first[1] == 0, "the reference comes first"
    part = next(data for _, known, data in seen if known == first)
    size = 256 * (first[0] - 1)
    assert base64.b64decode(part)[:size] == base64.b64decode(seen[-1][2])[:size]
    assert (view.pattern(0, 0).sum(1) - 1).abs().max() < 0.15
    view.observe(lambda change: view.stop(), "_one")
    view.start(text + " And then").wait()
    assert view.status == "stopped" and state(view, "_share") < shares[-1] == 1


@pytest.fixture(scope="module")
def outliers(llm, low):
    return OutlierMap({"16 bits": llm, "4 bits": low}, TEXT)


def test_outlier_map_says_what_traces_and_weights_say(outliers, llm):
    name = "blocks.9.hook_resid_pre"
    stream = llm.trace(TEXT, name)[name]
    most = outliers.to_frame().iloc[0]
    token, channel = divmod(int(stream.abs().argmax()), 256)
    at_9 = outliers.to_frame().query("model == '16 bits' and layer == 9").iloc[0]
    assert (at_9.token, at_9.channel) == (token, channel) and at_9["value"] == pytest.approx(float(stream[token, channel]), rel=1e-3)
    assert abs(most["value"]) >= abs(at_9["value"]) and at_9.ratio == pytest.approx(
        float(stream.abs().max() / stream.abs().median()), rel=1e-3
    )
    shown = outliers.ranges(0)
    assert torch.allclose(shown[9], stream.abs().amax(0), rtol=0.05)
    with open_store(llm.config, llm.path) as store:
        weights = ReconstructedWeights(llm.config, store)
        names = [f"model.layers.4.self_attn.{part}_proj.weight" for part in "qkv"]
        largest = torch.cat([weights[name].float() for name in names]).abs().amax(0)
    assert torch.allclose(outliers.ranges(1, weights=True)[4], largest, rtol=0.05)
    outliers.look(9, channel)
    effect = outliers.effect
    assert effect["activations"][0] > effect["activations"][1] > 0 and effect["activation"] == pytest.approx(
        float(stream[:, channel].abs().max())
    )
    tell(outliers, {"method": "ignored"})
    with pytest.raises(OptionError, match="channel is 256; expected"):
        outliers.look(0, 256)


def test_one_outlier_costs_its_group():
    """By hand: three others of 1, a step of 8 / 3 for all of them rounds them to 0; without the outlier they are exact."""
    values = torch.tensor([[1.0], [8.0], [-1.0], [1.0]])
    assert group_errors(values, 1, 3) == [1.0, 0.0]


@pytest.fixture(scope="module")
def histogram(llm):
    widget = WeightHistogram({"16 bits": llm, "4 bits": EXL2}, layer=3, matrix="mlp.down_proj", row=7)
    yield widget
    widget.close()


def test_weight_histogram_counts_what_the_files_hold(histogram, llm):
    key = "model.layers.3.mlp.down_proj"
    (shown,) = state(histogram, "_groups")
    with open_store(llm.config, EXL2) as store:
        stored = Exl2Tensors.read(store, key)
    first, rows = shown["first"], shown["rows"]
    perm = stored.perm[first : first + rows]
    assert 7 in perm.tolist() and shown["bits"] == stored.groups[shown["group"]][0]
    codes = stored.codes()[first : first + rows]
    assert shown["codes"] == codes.flatten().bincount(minlength=1 << shown["bits"]).tolist()
    assert shown["scales"] == stored.scale_index()[shown["group"]].long().bincount(minlength=16).tolist()
    after = stored.reconstruct()[perm].float()
    with open_store(llm.config, llm.path) as store:
        before = ReconstructedWeights(llm.config, store)[f"{key}.weight"].float().T[perm]
    assert shown["error"] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert sum(shown["before"]) == sum(shown["after"]) == sum(shown["nearest"]) == before.numel()
    assert 3 < shown["entropy"] < 4 and repr(histogram).startswith("WeightHistogram(layer 3 mlp.down_proj, row 7; 4 bits: 4 bits, 3.")
    assert len(histogram.to_code_frame()) == 16 and histogram.to_frame().error[0] == shown["error"]
    data, _ = histogram._repr_mimebundle_()
    assert "<script" not in data["text/html"] and "clipped" in data["text/html"]
    tell(histogram, {"type": "place", "layer": 2, "matrix": "self_attn.q_proj", "row": 9999})
    assert (histogram.layer, histogram.matrix, histogram.row) == (2, "self_attn.q_proj", 255)
    histogram.layer = 1
    assert repr(histogram).startswith("WeightHistogram(layer 1 ")
    with pytest.raises(OptionError, match="has no matrix 'mlp'"):
        histogram.look(matrix="mlp")
    histogram.look(layer=3, matrix="mlp.down_proj", row=7)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "got 0 EXL2 models"),
        ([3], "got 'int'"),
        ({"a": EXL2, "b": EXL2.parent.parent.parent / "exl2nb" / "demo_model", "c": EXL2.parent.parent.parent / "exl2nb" / "demo_model"},
         "'c' is not quantised with EXL2, and there is an original already"),
    ],
)  # fmt: skip
def test_weight_histogram_refuses(sources, message):
    with pytest.raises(OptionError, match=message):
        WeightHistogram(sources)


def test_error_flow_measures_what_traces_say(flow, llm, low):
    names = ["blocks.3.hook_resid_mid", "blocks.3.attn.hook_q", "blocks.2.hook_resid_post", "blocks.3.hook_attn_out", "logits"]
    want, got = llm.trace(TEXT, names), low.trace(TEXT, names)

    def error(name):
        return float(((got[name] - want[name]).flatten(1).norm(dim=1) / want[name].flatten(1).norm(dim=1)).mean())

    shown = flow.to_dict()
    assert (shown["labels"], shown["layers"], shown["tokens"]) == (["16 bits", "4 bits", "q4 cache"], 12, len(want.ids))
    assert shown["errors"][0][shown["rows"].index("q")][3] == pytest.approx(error("blocks.3.attn.hook_q"), rel=1e-3)
    assert shown["flow"][0][7] == pytest.approx(error("blocks.3.hook_resid_mid"), rel=1e-3)
    assert shown["kl"][0] == pytest.approx(float(want.kl(got).mean()), rel=1e-3)
    before, added = (got[name] - want[name] for name in ("blocks.2.hook_resid_post", "blocks.3.hook_attn_out"))
    cosine = float(torch.nn.functional.cosine_similarity(before, added, dim=1).mean())
    assert shown["cosines"][0][0][3] == pytest.approx(cosine, abs=1e-3)
    assert len(flow.to_frame()) == 2 * 12 * len(shown["rows"])
    assert repr(flow).startswith("ErrorFlow(4 bits: KL 0.0") and "after layer 11; q4 cache" in repr(flow)


def test_a_layer_is_patched_back(flow, llm, low):
    """A bitrate gets the reference's weights, a cache what the reference's heads read."""
    flow.patch(3).wait().patch(3, side=2).wait()
    want = llm.trace(TEXT, "logits")
    by = {(one.side, one.layer): one.kl for one in flow.patched}
    assert by[1, 3] == pytest.approx(float(want.kl(low.trace(TEXT, "logits", patch={"blocks.3": llm})).mean()), rel=1e-3)
    z = {name: llm.trace(TEXT, name)[name] for name in ["blocks.3.attn.hook_z"]}
    assert by[2, 3] == pytest.approx(float(want.kl(llm.trace(TEXT, "logits", patch=z, cache="q4")).mean()), rel=1e-3)
    flow.patch().wait()
    assert sum(one.side == 1 for one in flow.patched) == 12 and "KL if patched back" in flow._repr_mimebundle_()[0]["text/html"]
    with pytest.raises(OptionError, match="layer is 12; expected"):
        flow.patch(12)


def test_messages_of_the_page_read_and_patch(llm, low):
    widget = ErrorFlow([llm, low], TEXT)
    assert widget.to_dict()["labels"] == ["demo_model", "demo-exl2-4.0bpw"]
    before = widget.to_dict()
    tell(widget, {"type": "read", "prompt": "She opened the letter"})
    widget.wait()
    assert widget.prompt == "She opened the letter" and widget.to_dict()["tokens"] < before["tokens"]
    tell(widget, {"type": "patch", "layer": 2})
    widget.wait()
    assert [one.layer for one in widget.patched] == [2]
    tell(widget, {"type": "read", "prompt": 3})
    assert widget.status == "error" and "sent no prompt" in widget.error


SHOWN = {"flow": ErrorFlow, "lens": LayerLens, "attention": AttentionView, "outliers": OutlierMap}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_can_be_kept(name, request, tmp_path):
    """As plain values, as HTML without scripts, as a page of its own; the same again from what to_dict gave."""
    import json

    widget = request.getfixturevalue(name)
    again = SHOWN[name](result=json.loads(json.dumps(widget.to_dict())))
    assert repr(again) == repr(widget) and again.to_dict() == widget.to_dict() and not state(again, "_has_model")
    data, _ = widget._repr_mimebundle_()
    assert "<script" not in data["text/html"] and data["text/plain"] == repr(widget)
    widget.to_html(tmp_path / "page.html")
    assert 10_000 < (tmp_path / "page.html").stat().st_size < 1_500_000
    with pytest.raises(OptionError, match="no model is attached"):
        again.start()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda llm: ErrorFlow(), "expected models, such as"),
        (lambda llm: ErrorFlow({"a": llm}), "got 1 of .*; expected 2 to 4 bitrates or caches"),
        (lambda llm: ErrorFlow({"a": llm, "b": "path"}), "'path' is no loaded model.*ex.load"),
        (lambda llm: ErrorFlow({"a": llm, "b": (llm, {"cash": "q4"})}), "ErrorFlow: b: unknown keyword 'cash'; did you mean 'cache'"),
        (lambda llm: ErrorFlow({"a": llm, "b": (llm, {"cache": "q5"})}), "unknown cache mode 'q5'"),
        (lambda llm: ErrorFlow([llm, llm], "a" * 9000), "expected 2 to 512"),
        (lambda llm: ErrorFlow([llm, llm], 3), "ErrorFlow: .*prompt"),
        (
            lambda llm: AttentionView(result={"layers": 1, "heads": 1, "size": 2, "patterns": ["AAA="]}),
            "AttentionView: result cannot be read",
        ),
        (lambda llm: ErrorFlow(result={"label": []}), "ErrorFlow: result: unknown keyword 'label'; did you mean 'labels'"),
    ],
)
def test_refusals(make, message, llm):
    with pytest.raises(OptionError, match=message):
        make(llm)


def test_models_of_another_shape_are_refused(llm):
    class Other:
        name, trace = "other", print
        config = type("Config", (), {"num_layers": 3})

    with pytest.raises(OptionError, match="'b' has num_layers 3 and 'a' 12"):
        ErrorFlow({"a": llm, "b": Other()})


def test_numbers_are_finite(flow):
    assert all(math.isfinite(value) for value in flow.to_frame().error)
