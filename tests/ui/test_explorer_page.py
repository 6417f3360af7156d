"""The real BitrateExplorer bundle in a browser: the test plays the kernel with the true allocator."""

from pathlib import Path

import pytest
from mock_host import ROUNDED, MockHost, state_of, violations

import exl2nb as ex
from exl2nb.widgets import BitrateExplorer
from tests.widgets.page import exported, state

MOVED = ("bpw", "solved", "nbytes", "predicted_kl", "solve_ms", "_cells")


@pytest.fixture(scope="module")
def explorer():
    return BitrateExplorer(ex.demo_measurement(), measured=[(3.0, 0.270), (4.0, 0.065), (6.0, 0.0046)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_drag_recolour_make_and_read(page, explorer, screenshots, theme):
    explorer.solve(4.0)
    host = MockHost(page, "explorer", state_of(explorer, _can_make=True), theme=theme)
    first = page.get_by_role("gridcell", name="layer 0 q:")
    before = (first.inner_text(), page.locator(".exl2nb-figures").inner_text(), page.locator(".exl2nb-dot").get_attribute("cx"))
    assert page.locator(".exl2nb-curve .exl2nb-mark").count() == 3
    slider = page.get_by_role("slider", name="Bits per weight")
    slider.fill("2.5")
    assert host.sent[-1] == {"type": "solve", "bpw": 2.5}
    slider.fill("2.6")
    slider.fill("2.7")
    assert host.sent[-1] == {"type": "solve", "bpw": 2.5}, "one question on its way at a time"
    explorer.solve(2.5)
    host.put(**{name: getattr(explorer, name) for name in MOVED})
    assert host.sent[-1] == {"type": "solve", "bpw": 2.7}, "then the last wish"
    explorer.solve(2.7)
    host.put(**{name: getattr(explorer, name) for name in MOVED})
    assert page.locator(".exl2nb-big").inner_text() == "2.70"
    after = (first.inner_text(), page.locator(".exl2nb-figures").inner_text(), page.locator(".exl2nb-dot").get_attribute("cx"))
    assert first.inner_text() == f"{explorer.grid.cells[0].bpw:.1f}"
    assert all(a != b for a, b in zip(before[1:], after[1:]))
    page.get_by_label("Prompt").fill("A dark")
    page.get_by_role("button", name="Convert").click()
    assert host.sent[-1] == {"type": "make", "bpw": 2.7, "prompt": "A dark"}
    host.put(status="running", stage="quantize", progress=0.4)
    assert page.get_by_role("progressbar").is_visible()
    assert page.locator(".exl2nb-making .exl2nb-actions").inner_text().endswith("quantizing…")
    page.get_by_role("button", name="Stop").click()
    assert host.sent[-1] == {"type": "stop"}
    host.put(status="done", original=" night <b>fell", made=" night <i>came", made_bpw=2.7)
    answers = page.locator(".exl2nb-answer")
    assert answers.all_inner_texts() == [" night <b>fell", " night <i>came"]
    assert page.locator("mark").inner_text() == "i>came"
    first.click()
    host.frame()
    assert page.locator(".exl2nb-strip > div").count() == len(explorer.grid.cells[0].parts[0].runs)
    page.screenshot(path=screenshots / f"explorer-{theme}.png")
    assert violations(page, besides=ROUNDED) == []


def test_the_curve_and_the_colours_say_what_they_mean(page, explorer):
    """Predicted, expected of a conversion with few calibration tokens, measured; a bar of the colours; the same in a saved picture."""
    explorer.solve(3.0)
    host = MockHost(page, "explorer", state_of(explorer, _can_make=True))
    words = page.locator(".exl2nb-curve-legend").inner_text()
    assert words.split("\n") == ["predicted", f"expected ({state(explorer, '_tokens'):,} tokens)", "measured"]
    assert page.locator("path.exl2nb-line").count() == 2
    told = page.locator(".exl2nb-making .exl2nb-actions").inner_text()
    assert f"expected KL {explorer.expected_kl:.2g}, calibrated on 4,096 tokens" in told
    bar = page.get_by_role("img", name="bits per weight: colours from 2 to 8")
    assert bar.inner_text().split() == ["bits", "per", "weight", "2", "3", "4", "5", "6", "8"]
    page.get_by_role("button", name="share of KL").click()
    host.frame()
    most = max(cell.share for cell in explorer.grid.cells)
    assert page.get_by_role("img", name="share of the predicted KL").inner_text().endswith(f"{100 * most:.1f} %")
    with page.expect_download() as saved:
        page.get_by_role("button", name="SVG").click()
    picture = Path(saved.value.path()).read_text()
    assert picture.startswith("<svg") and "class=" not in picture and "var(" not in picture
    assert picture.count("<rect") == len(explorer.grid.cells) and "predicted KL" in picture
    with page.expect_download() as saved:
        page.get_by_role("button", name="PNG").click()
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
    host.put(_factor=1.01)
    assert page.locator("path.exl2nb-line").count() == 1, "as good as predicted: one line"


def test_what_happens_is_said_aloud(page, explorer):
    host = MockHost(page, "explorer", state_of(explorer, _can_make=True))
    spoken = page.locator("[role=status].exl2nb-sr")
    host.put(status="running", stage="measure")
    assert spoken.inner_text() == "measuring sensitivity…"
    host.put(status="done", stage="", made_bpw=3.0)
    assert spoken.inner_text().startswith("Conversion done.")


def test_the_map_follows_the_slider_before_the_kernel_answers(page, explorer):
    """From the curve, in the next frame; the kernel's allocation takes its place, and stays where no answer comes."""
    explorer.solve(4.0)
    host = MockHost(page, "explorer", state_of(explorer))
    in_order = "sort((a, b) => a.dataset.i - b.dataset.i)"
    shown = f"() => [...document.querySelectorAll('[role=gridcell][data-i]')].{in_order}.map((cell) => cell.textContent)"
    exact = [f"{cell.bpw:.1f}" for cell in explorer.grid.cells]
    near = min(state(explorer, "_curve"), key=lambda point: abs(point[0] - 2.5))
    code = f"""async () => {{
      const slider = document.querySelector('input[type=range]');
      slider.value = 2.5;
      slider.dispatchEvent(new Event('input', {{bubbles: true}}));
      await new Promise(requestAnimationFrame);
      await new Promise(requestAnimationFrame);
      return ({shown})();
    }}"""
    assert page.evaluate(code) == [f"{bits:.1f}" for bits in near[3]] != exact
    assert page.locator(".exl2nb-figures").inner_text().startswith("about ")
    page.wait_for_timeout(1700)  # nobody answers: what the kernel said last is shown again
    page.get_by_role("button", name="Share of").click()
    page.get_by_role("button", name="Bits").first.click()
    host.frame()
    assert page.evaluate(shown) == exact


def test_a_size_asks_the_kernel_and_its_error_is_seen(page, explorer):
    explorer.solve(4.0)
    host = MockHost(page, "explorer", state_of(explorer, _can_make=False))
    size = page.get_by_role("spinbutton", name="Size")
    assert size.input_value() == f"{explorer.nbytes / 2**20:.2f}"
    size.fill("7")
    size.press("Enter")
    assert host.sent[-1] == {"type": "solve_size", "kind": "bytes", "size": 7 * 2**20, "context": 4096, "cache": "fp16"}
    explorer.solve(bytes=7 * 2**20)
    host.put(**{name: getattr(explorer, name) for name in MOVED})
    assert page.locator(".exl2nb-big").inner_text() == f"{explorer.solved:.2f}"
    assert not page.get_by_label("Tokens of the cache").is_visible()
    asked = len(host.sent)
    page.get_by_label("Set by").select_option("fits")
    assert (size.input_value(), len(host.sent)) == ("", asked), "a memory of which nobody said how large"
    size.fill("9")
    page.get_by_label("Cache", exact=True).select_option("q8")
    assert host.sent[-1]["kind"] == "fits" and host.sent[-1]["cache"] == "q8"
    host.put(status="error", error="nothing is so small")
    assert page.get_by_role("alert").inner_text() == "nothing is so small"
    assert violations(page, besides=ROUNDED) == []


def test_export_moves_along_the_curve_without_a_kernel(page, explorer, tmp_path):
    explorer.solve(4.0)
    explorer.to_html(tmp_path / "explorer.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "explorer.html").as_uri())
    slider = page.get_by_role("slider", name="Bits per weight")
    slider.fill("6")
    page.wait_for_function("() => Number(document.querySelector('.exl2nb-big').textContent) > 5.8")
    shown = float(page.locator(".exl2nb-big").inner_text())
    curve = exported(explorer)["_curve"]
    assert len(curve) == 60
    bits = next(p[3] for p in curve if abs(p[0] - shown) < 0.01)
    assert page.get_by_role("gridcell", name="layer 0 q:").inner_text() == f"{bits[0]:.1f}"
    assert page.get_by_role("button", name="Convert").count() == 0
