"""The real bundles of the widgets that look inside: what they draw and ask the kernel, the keyboard, a model of 80 layers, exports."""

import base64

import pytest
from everything import DATA
from mock_host import ROUNDED, MockHost, low_controls, state_of, violations

import exl2nb as ex
from exl2nb import widgets as w
from tests.widgets.page import state

TEXT = "It was a dark night, and the old man"


@pytest.fixture(scope="module")
def made(llm):
    with ex.load(DATA, progress=None) as low:
        sides = {"16 bits": llm, "4 bits": low}
        flow = w.ErrorFlow({**sides, "q4": (llm, {"cache": "q4"})}, TEXT)
        flow.patch(3).wait()
        outliers = w.OutlierMap(sides, TEXT)
        outliers.look(9, 190)
        yield {
            "errorflow": flow,
            "layerlens": w.LayerLens(sides, TEXT),
            "attention": w.AttentionView(sides, TEXT, layer=6, head=2),
            "histogram": w.WeightHistogram({**sides, "again": DATA}, layer=3, matrix="mlp.down_proj", row=7),
            "outliers": outliers,
        }


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["errorflow", "layerlens", "attention", "histogram", "outliers"])
def test_it_can_be_read_by_everybody(page, made, name, theme, screenshots):
    MockHost(page, name, state_of(made[name]), theme=theme)
    page.locator("section").screenshot(path=screenshots / f"{name}-{theme}.png")
    assert violations(page) == [] or violations(page, besides="label-content-name-mismatch") == []
    assert low_controls(page) == []


def test_error_flow_chooses_patches_and_reads(page, made):
    host = MockHost(page, "errorflow", state_of(made["errorflow"]))
    shown = made["errorflow"].to_dict()
    cells = page.get_by_role("gridcell")
    assert cells.count() == 12 * len(shown["rows"])
    cells.nth(shown["rows"].index("o") * 12 + 3).click()
    host.frame()
    assert host.sent[-1]["values"]["layer"] == 3
    detail = page.locator(".exl2nb-inside-part[aria-live=polite]").inner_text()
    assert detail.startswith("Layer 3. Attention raises the stream's error from") and "With only this layer patched back: KL" in detail
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    host.frame()
    assert host.sent[-1]["values"]["layer"] == 4
    page.get_by_role("button", name="Patch layer 4 back to 16 bits").click()
    assert host.sent[-1] == {"type": "patch", "layer": 4}
    page.get_by_role("button", name="Patch each layer in turn").click()
    assert host.sent[-1] == {"type": "patch", "layer": -1}
    host.put(status="running")
    page.get_by_role("button", name="Patch each layer in turn").click(force=True)
    assert host.sent[-1] == {"type": "patch", "layer": -1} and page.get_by_text("running…").is_visible()
    host.put(status="done", _result={**shown, "patched": [[1, 3, 0.04], [1, 4, 0.05]]})
    assert page.get_by_role("slider", name="KL reduction").locator("rect.exl2nb-plot-bar").count() == 2
    page.get_by_role("button", name="q4").click()
    host.frame()
    assert "q4 against 16 bits" in page.locator("b").first.inner_text()
    slider = page.get_by_role("slider", name="Relative error of the residual stream")
    slider.focus()
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext").startswith("before layer 0: 4 bits 0 %")
    page.keyboard.press("End")
    assert slider.get_attribute("aria-valuetext").startswith("layer 11, after the MLP: 4 bits")
    page.get_by_label("Prompt").fill("Another")
    page.get_by_role("button", name="Trace").click()
    assert host.sent[-1] == {"type": "read", "prompt": "Another"}


def test_layer_lens_follows_a_token(page, made):
    host = MockHost(page, "layerlens", state_of(made["layerlens"]))
    shown = made["layerlens"].to_dict()
    assert page.get_by_role("option").count() == len(shown["texts"])
    assert page.locator("tbody tr").count() == 13
    page.get_by_role("option").nth(3).click()
    host.frame()
    assert host.sent[-1]["values"]["token"] == 3
    assert page.get_by_role("option").nth(3).get_attribute("aria-selected") == "true"
    first = page.locator("tbody tr").first.inner_text()
    frame = made["layerlens"].to_frame().query("layer == 11 and token == 3")
    assert all(top.strip() in first for top in frame.top), "the top row is the last layer"
    page.keyboard.press("ArrowRight")
    host.frame()
    assert host.sent[-1]["values"]["token"] == 4
    heat = page.get_by_role("application")
    heat.focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".exl2nb-inside-line").inner_text().startswith("layer 11, after")


def test_attention_view_shows_a_head_and_what_it_loses(page, made):
    view = made["attention"]
    host = MockHost(page, "attention", state_of(view))
    assert page.get_by_role("option").count() == 4 and page.locator(".exl2nb-large:visible").count() == 3
    size = view.to_dict()["size"]
    pixels = page.locator(".exl2nb-large canvas").first.evaluate("(c) => [c.width, c.height]")
    assert pixels == [size, size]
    page.get_by_role("option").nth(1).click()
    host.frame()
    assert host.sent[-1]["values"]["head"] == 1
    large = page.get_by_role("application").nth(1)
    large.focus()
    page.keyboard.press("PageDown")
    words = page.locator(".exl2nb-inside-line").inner_text()
    assert "attends to" in words and "16 bits" in words and "4 bits" in words
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    assert "it comes later" in page.locator(".exl2nb-inside-line").inner_text()


def test_heads_of_another_layer_are_awaited_or_not_stored(page, made):
    """Between the key and the kernel's answer the heads of the last layer stay; only a page without a kernel says that it has none."""
    state = state_of(made["attention"])
    host = MockHost(page, "attention", state)
    title, heads = page.locator("h4", has_text="Heads of layer"), page.get_by_role("listbox", name="Heads of the layer")
    host.put(layer=2)
    assert title.inner_text().startswith("Heads of layer 6") and heads.get_by_role("option").count() == 4
    assert heads.get_attribute("aria-busy") == "true" and not page.get_by_text("not stored in this page").is_visible()
    assert violations(page, besides=ROUNDED) == []
    host.put(_heads=[{**state["_heads"][0], "layer": 2}])
    assert title.inner_text().startswith("Heads of layer 2") and heads.get_attribute("aria-busy") == "false"
    host = MockHost(page, "attention", {**state, "_static": True, "_stored": []})
    host.put(layer=2, _heads=[])
    assert page.get_by_text("not stored in this page").is_visible() and not heads.is_visible()
    assert violations(page, besides=ROUNDED) == []


def test_attention_that_is_being_read_has_rows_so_far(page, made):
    """Rows that are not known yet are empty, in the large picture and in the thumbnails."""
    view = made["attention"]
    state = state_of(view)
    size = state["_one"][0]["size"]
    partial = {**state["_one"][0], "rows": [4, 0]}
    heads = {**state["_heads"][0], "rows": [4, 0]}
    MockHost(page, "attention", {**state, "status": "running", "_share": 0.25, "_one": [partial], "_heads": [heads]})
    alpha = "(c, y) => c.getContext('2d').getImageData(0, y, 1, 1).data[3]"
    large = page.locator(".exl2nb-large canvas")
    assert [large.nth(0).evaluate(alpha, y) for y in (0, 3, 4, size - 1)] == [255, 255, 0, 0]
    assert large.nth(1).evaluate(alpha, 0) == large.nth(2).evaluate(alpha, 0) == 0
    small = page.locator(".exl2nb-head canvas").first
    assert [small.evaluate(alpha, y) for y in (3, 4, size + 2)] == [255, 0, 0]
    assert page.get_by_text("running… 25 %").is_visible()


def test_weight_histogram_asks_for_another_place(page, made):
    widget = made["histogram"]
    host = MockHost(page, "histogram", state_of(widget))
    assert page.locator(".exl2nb-group").count() == 2
    assert page.locator(".exl2nb-group").first.locator("rect.exl2nb-plot-bar[data-style='0']").count() == 16
    page.get_by_label("Matrix").select_option("self_attn.q_proj")
    assert host.sent[-1] == {"type": "place", "layer": 3, "matrix": "self_attn.q_proj", "row": 7}
    host.put(_groups=[dict(one) for one in state(widget, "_groups")])
    page.get_by_label("Row").fill("99999")
    page.get_by_label("Row").press("Enter")
    assert host.sent[-1]["row"] == state(widget, "_rows") - 1
    codes = page.get_by_role("slider", name="Codes of 4 bits")
    codes.focus()
    assert codes.get_attribute("aria-valuetext").startswith("code 0, level -8: stored")


def test_outlier_map_chooses_a_channel(page, made):
    widget = made["outliers"]
    host = MockHost(page, "outliers", state_of(widget))
    assert "without this channel" in page.locator("section").inner_text()
    assert page.locator(".exl2nb-massive tbody tr").count() == 16
    page.get_by_role("spinbutton", name="Channel").fill("17")
    page.get_by_role("spinbutton", name="Channel").press("Enter")
    host.frame()
    assert host.sent[-1]["values"]["channel"] == 17 and "Computing the effect" in page.locator("section").inner_text()
    page.get_by_role("button", name="down input").click()
    host.frame()
    assert host.sent[-1]["values"]["point"] == 3
    assert page.get_by_role("application").first.locator("canvas").evaluate("(c) => [c.width, c.height]") == [768, 12]


def big(layers=80, tokens=64, heads=64):
    """Plain results of a model of 80 layers."""
    rows = ["q", "k", "v", "heads", "o", "stream after attention", "gate", "up", "activation", "down", "stream after MLP"]
    flow = {
        "labels": ["fp16", "2.5 bpw"], "rows": rows, "layers": layers, "tokens": tokens,
        "errors": [[[0.001 * (y + x) for x in range(layers)] for y in range(len(rows))]],
        "flow": [[0.001 * i for i in range(2 * layers + 1)]],
        "cosines": [[[0.0] * layers] * 2], "kl": [0.3], "patched": [[1, i, 0.2] for i in range(layers)],
    }  # fmt: skip
    count = (layers + 1) * tokens
    lens = {
        "labels": ["fp16", "2.5 bpw"], "layers": layers, "texts": [" word"] * tokens, "words": [" a", " b", " c"],
        "top": [[0, 1, 2] * count, [1, 0, 2] * count], "prob": [[5000, 3000, 100] * count] * 2, "target": [0] * tokens,
        "chance": [[5000] * count] * 2, "kl": [[0.1] * count],
    }  # fmt: skip
    pattern = base64.b64encode(bytes(48 * 48) * heads).decode()
    thumbs = {"layer": 0, "head": -1, "size": 48, "rows": [48] * 2, "data": [pattern] * 2}
    one = {"layer": 0, "head": 0, "size": 114, "rows": [114] * 2, "data": [base64.b64encode(bytes(114 * 114)).decode()] * 2}
    attention = {
        "labels": ["fp16", "2.5 bpw"],
        "layers": layers,
        "heads": heads,
        "tokens": 8192,
        "size": 114,
        "names": ["tokens 0 to 71"] * 114,
    }
    attention["distance"] = [[[0.05] * heads] * layers]
    text = base64.b64encode(bytes(range(256)) * 4 * layers).decode()
    outliers = {
        "labels": ["fp16", "2.5 bpw"], "layers": layers, "texts": [" word"] * tokens, "points": ["residual stream"], "channels": [8192],
        "bins": [1024], "activations": [[text] * 2], "lows": [0.1], "spans": [3.0], "weights": [[text] * 2], "weight_lows": [0.1],
        "weight_spans": [2.0], "massive": [[0, 3, 0, 17, 500.0, 900.0]],
    }  # fmt: skip
    return {
        "errorflow": {"_result": flow, "layer": 40}, "layerlens": {"_result": lens}, "outliers": {"_result": outliers, "channel": 100},
        "attention": {"_result": attention, "_heads": [thumbs], "_one": [one], "layer": 0, "head": 0},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["errorflow", "layerlens", "attention", "outliers"])
def test_a_model_of_80_layers_is_drawn(page, made, name, record_property):
    """All of it; how long it took is recorded, not judged: benchmarks/log has the numbers."""
    host = MockHost(page, name, state_of(made[name], side=1))
    state = big()[name]
    took = page.evaluate(
        """async (changes) => {
          const start = performance.now();
          window.put(changes);
          await new Promise((done) => requestAnimationFrame(done));
          document.body.offsetHeight;
          return performance.now() - start;
        }""",
        state,
    )
    record_property("draw_ms", took)
    print(f"{name}: 80 layers drawn in {took:.0f} ms")
    host.frame()
    expected = {
        "errorflow": ("[role=gridcell]", 880),
        "layerlens": ("tbody tr", 81),
        "attention": ("[role=option]", 64),
        "outliers": ("canvas", 2),
    }
    where, count = expected[name]
    assert page.locator(where).count() == count


@pytest.mark.parametrize("name", ["errorflow", "layerlens", "attention", "histogram", "outliers"])
def test_export_without_network(page, made, name, tmp_path):
    made[name].to_html(tmp_path / "page.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "page.html").as_uri())
    page.locator("section").wait_for()
    assert page.get_by_role("button", name="Trace").count() == 0 and page.get_by_role("button", name="Copy").is_visible()
    if name == "attention":  # the heads of other layers are stored
        page.get_by_role("application").first.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
        page.wait_for_timeout(100)
        assert page.get_by_role("option").count() == 4 and page.locator(".exl2nb-large:visible").count() == 3
