"""The real WeightBrowser bundle in a browser: the bits of a field, one value through all stages, keys, both themes, the export."""

from pathlib import Path

import pytest
from mock_host import ROUNDED, MockHost, state_of, violations

import exl2nb
from exl2nb.widgets import WeightBrowser
from tests.widgets.page import state, tell

QUANTISED = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
ORIGINAL = Path(exl2nb.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def glass():
    widget = WeightBrowser(QUANTISED, ORIGINAL, layer=0, matrix="self_attn.q_proj", column=17)
    yield widget
    widget.close()


def trace(page) -> str:
    return page.locator(".exl2nb-trace").inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_one_value_through_all_stages(page, glass, screenshots, theme):
    glass.look(group=0, column=17)
    shown = state(glass, "_slice")
    host = MockHost(page, "weights", state_of(glass), theme=theme)
    assert page.locator(".exl2nb-word").count() == shown["bits"] == 5
    words = ["".join(row.locator("[data-v]").all_inner_texts()) for row in page.locator(".exl2nb-word").all()]
    assert [int(word, 2) for word in words] == shown["words"]
    page.locator(".exl2nb-word [data-v='6']").first.hover()
    host.frame()
    lit = page.locator(".exl2nb-word .exl2nb-on")
    assert lit.count() == 5, "the whole field, though it lies in two words"
    low_first = "".join(reversed(lit.all_inner_texts()[:3])) + "".join(reversed(lit.all_inner_texts()[3:]))
    assert sorted(low_first) == sorted(f"{shown['codes'][6]:05b}")
    said = trace(page)
    assert f"row {shown['rows'][6]}, stored as {shown['first_row'] + 6}" in said
    assert "word 0, bits 31–30 and word 1, bits 2–0" in said
    assert f"{shown['codes'][6]:05b}" in said and f"{shown['codes'][6]} − 16" in said
    assert "original" in said and "steps" in said
    page.get_by_role("gridcell").nth(9).click()
    host.frame()
    assert host.sent[-1]["values"]["value"] == 9
    assert f"row {shown['rows'][9]}," in trace(page)
    page.screenshot(path=screenshots / f"weights-{theme}.png")
    assert violations(page, besides=ROUNDED) == []


def test_places_are_asked_of_the_kernel(page, glass):
    glass.look(layer=0, matrix="self_attn.q_proj", group=0, column=17)
    host = MockHost(page, "weights", state_of(glass))
    assert not page.get_by_label("32 rows").is_visible(), "a group of one unit has nothing to choose"
    here = {"layer": 0, "matrix": "self_attn.q_proj", "group": 0, "unit": 0, "column": 17}
    page.get_by_label("Column").fill("9999")
    page.get_by_label("Column").press("Tab")
    assert host.sent[-1] == {"type": "look", **here, "column": state(glass, "_columns") - 1}
    page.get_by_label("Matrix").select_option("mlp.down_proj")
    assert host.sent[-1] == {"type": "look", **here, "matrix": "mlp.down_proj"}
    page.get_by_label("Layer").select_option("none")
    assert host.sent[-1] == {"type": "look", **here, "layer": -1}
    tell(glass, host.sent[-1])
    host.put(**state_of(glass))
    assert page.locator(".exl2nb-word").count() == 8
    assert page.get_by_label("Matrix").input_value() == "lm_head"
    assert page.get_by_label("32 rows").get_attribute("max") == "3"


def test_keys(page, glass):
    glass.look(layer=0, matrix="mlp.up_proj", group=1, column=3)
    glass.value = 0
    host = MockHost(page, "weights", state_of(glass))
    page.get_by_role("gridcell").first.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "End"):
        page.keyboard.press(key)
    host.frame()
    assert host.sent[-1]["values"]["value"] == 23
    assert f"row {state(glass, '_slice')['rows'][23]}," in trace(page)
    assert page.get_by_role("status").inner_text().startswith(f"row {state(glass, '_slice')['rows'][23]}, bits ")
    assert page.get_by_role("gridcell").nth(23).evaluate("(cell) => cell === document.activeElement")


def test_export_without_kernel(page, glass, tmp_path):
    glass.to_html(tmp_path / "weights.html")
    assert (tmp_path / "weights.html").stat().st_size < 200_000
    page.context.set_offline(True)
    page.goto((tmp_path / "weights.html").as_uri())
    page.get_by_role("gridcell").nth(4).click()
    assert f"row {state(glass, '_slice')['rows'][4]}," in trace(page)
    assert page.get_by_label("Column").is_disabled()
