"""The real BitMap bundle in a browser: recolouring, choosing, keys, both themes, and the export without a kernel."""

import pytest
from mock_host import ROUNDED, MockHost, state_of, violations

import exl2nb as ex
from exl2nb.widgets import BitMap


@pytest.fixture(scope="module")
def shown():
    measurement = ex.demo_measurement()
    return BitMap(measurement.solve(bpw=3.5), other=measurement.solve(bpw=5))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_map_strip_and_metrics(page, shown, screenshots, theme):
    host = MockHost(page, "bitmap", state_of(shown), theme=theme)
    cells = page.get_by_role("gridcell").filter(has_text=".")
    assert cells.count() == len(shown.grid.cells)
    first = page.get_by_role("gridcell", name="layer 0 q:")
    assert first.inner_text() == f"{shown.grid.cells[0].bpw:.1f}"
    first.click()
    host.frame()
    cell = shown.grid.cells[0]
    bars = page.locator(".exl2nb-strip > div")
    assert bars.count() == len(cell.parts[0].runs)
    total = sum(run.rows * run.groups for run in cell.parts[0].runs)
    widths = [bars.nth(i).bounding_box()["width"] for i in range(bars.count())]
    expected = [run.rows * run.groups / total for run in cell.parts[0].runs]
    assert [w / sum(widths) for w in widths] == pytest.approx(expected, abs=0.01), "widths true to rows"
    assert host.sent[-1]["values"]["selected"] == [0, "q"]
    before = first.evaluate("(cell) => cell.style.background")
    page.get_by_role("button", name="share of KL").click()
    host.frame()
    assert first.inner_text() == f"{100 * cell.share:.1f}"
    assert first.evaluate("(cell) => cell.style.background") != before
    page.get_by_role("button", name="difference").click()
    host.frame()
    assert first.inner_text()[0] in "+−0"
    page.get_by_role("button", name="bits").click()
    host.frame()
    page.screenshot(path=screenshots / f"bitmap-{theme}.png")
    assert violations(page, besides=ROUNDED) == []


def test_keys(page, shown):
    host = MockHost(page, "bitmap", state_of(shown))
    page.get_by_role("gridcell", name="layer 0 q:").focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    host.frame()
    assert host.sent[-1]["values"]["selected"] == [1, "k"]
    assert page.locator(".exl2nb-readout").inner_text().startswith("layer 1 k:")
    page.keyboard.press("Escape")
    host.frame()
    assert host.sent[-1]["values"]["selected"] == []
    assert page.locator(".exl2nb-strip").count() == 0


def test_names_are_text(page):
    hostile = BitMap([{"key": "model.layers.0.<img src=x onerror=fail()>", "bpw": 4.0}], title="<script>fail()</script>")
    host = MockHost(page, "bitmap", state_of(hostile))
    host.frame()
    assert page.locator("img").count() == 0
    assert page.get_by_role("rowheader").inner_text().startswith("<img")


def test_export_without_kernel(page, shown, open_export):
    open_export(shown)
    page.get_by_role("gridcell", name="layer 2 down:").click()
    page.locator(".exl2nb-strip > div").first.wait_for()
    assert "bits" in page.locator(".exl2nb-strip-box").inner_text()


def test_a_model_of_80_layers_draws_in_a_blink(page):
    roles = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    big = BitMap([{"key": f"model.layers.{i}.m.{role}", "bpw": 4.0} for i in range(80) for role in roles])
    MockHost(page, "bitmap", state_of(big))
    assert page.locator(".exl2nb-cell").count() == 560
    assert page.evaluate("() => { const t = performance.now(); window.view('second'); return performance.now() - t; }") < 2000
