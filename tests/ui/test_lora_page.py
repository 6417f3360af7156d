"""The real bundle of LoraExplorer: map, slider and answers, by pointer and keyboard, in both themes, without a kernel."""

import sys
from pathlib import Path

import pytest
from mock_host import MockHost, low_controls, state_of, violations

import exl2nb as ex
from exl2nb import widgets as w

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from site_widgets import ASK, adapted


@pytest.fixture(scope="module")
def shown():
    with ex.demo(device="cpu", progress=None) as llm:
        yield state_of(w.LoraExplorer(llm, adapted(llm), ASK, max_tokens=16))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_can_be_read_by_everybody(page, shown, theme, screenshots):
    MockHost(page, "lora", shown, theme=theme)
    page.locator("section").screenshot(path=screenshots / f"lora-{theme}.png")
    assert violations(page) == []
    assert low_controls(page) == []


def test_map_slider_and_answers(page, shown):
    host = MockHost(page, "lora", shown)
    cells = page.get_by_role("gridcell")
    assert cells.count() == 84
    cells.nth(3).click()
    host.frame()
    assert host.sent[-1]["values"]["selected"] == [3, "q"]
    assert page.locator(".exl2nb-inside-line").inner_text().startswith("layer 3 q: ")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    host.frame()
    assert host.sent[-1]["values"]["selected"] == [3, "k"]
    before = cells.nth(3).inner_text()
    slider = page.get_by_role("slider", name="Scale")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    host.frame()
    assert host.sent[-1] == {"type": "scale", "scale": 0.95} and slider.get_attribute("aria-valuetext") == "scale 0.95"
    assert page.get_by_text("generating…").is_visible() and float(cells.nth(3).inner_text()) <= float(before)
    answer = {**shown["_result"], "scale": 0.95, "adapted": shown["_result"]["adapted"][:5]}
    host.put(scale=0.95, status="done", _result=answer)
    assert page.get_by_text("pirate × 0.95").first.is_visible() and page.get_by_text("mean KL").is_visible()
    text = page.get_by_role("group", name="pirate × 0.95: text")
    text.focus()
    page.keyboard.press("ArrowRight")
    host.frame()
    assert "in the model alone, KL" in page.locator(".exl2nb-readout-rows").inner_text()
    sent = len(host.sent)
    host.put(scale=0.6)  # the kernel's, with an older answer: the page asks for the new one, once
    host.frame()
    assert [one for one in host.sent[sent:] if one.get("type") == "scale"] == [{"type": "scale", "scale": 0.6}]


def test_without_a_kernel(page, shown):
    MockHost(page, "lora", {**shown, "_static": True, "_has_model": False})
    assert page.get_by_role("slider", name="Scale").is_disabled()
    assert not page.get_by_role("button", name="Generate").is_visible()
    assert page.get_by_role("gridcell").count() == 84
