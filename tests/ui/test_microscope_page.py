"""The real SamplerMicroscope bundle in a browser: sliders ask the kernel, the table says what survives, places, keys, export."""

import pytest
from mock_host import MockHost, state_of, violations

from exl2nb.widgets import SamplerMicroscope
from tests.widgets.page import state


@pytest.fixture(scope="module")
def scope(llm):
    options = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.03, "repetition_penalty": 1.1, "seed": 7}
    return SamplerMicroscope(llm, "It was a dark night, and the old man", max_tokens=24, at=6, **options)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_table_line_and_sliders(page, scope, screenshots, theme):
    scope.look(6).set(top_p=0.9)
    host = MockHost(page, "microscope", state_of(scope), theme=theme)
    heads = page.locator("thead th")
    assert heads.count() == 1 + len(scope.explanation.steps)
    for head, step in zip(heads.all()[1:], scope.explanation.steps):
        assert f"{step.survivors:,} left" in head.inner_text()
    row = page.locator("tbody tr[data-drawn]")
    assert row.count() == 1
    assert scope.token_text.replace(" ", "␣") in row.inner_text()
    here = page.locator(".exl2nb-line .exl2nb-here").bounding_box()
    piece = page.locator(".exl2nb-line [data-drawn]").bounding_box()
    assert piece["x"] - 2 <= here["x"] + here["width"] / 2 <= piece["x"] + piece["width"] + 2, "the number points at the drawn token"
    slider = page.get_by_role("slider", name="Top-p, slider")
    for value in ("0.5", "0.4", "0.3"):
        slider.fill(value)
    asked = [m for m in host.sent if m["type"] == "sample"]
    assert asked == [{"type": "sample", "at": 6, "settings": {"top_p": 0.5}}], "one question on its way at a time"
    scope.set(top_p=0.5)
    host.put(**state_of(scope))
    assert host.sent[-1] == {"type": "sample", "at": 6, "settings": {"top_p": 0.3}}, "then the last wish"
    scope.set(top_p=0.3)
    host.put(**state_of(scope))
    last = scope.explanation.steps[-1]
    assert f"{last.survivors:,} left" in heads.last.inner_text()
    scope.set(top_p=0.9)
    host.put(**state_of(scope))
    page.screenshot(path=screenshots / f"microscope-{theme}.png")
    assert violations(page) == []


def test_places_by_pointer_and_keys(page, scope):
    scope.look(6)
    host = MockHost(page, "microscope", state_of(scope))
    options = page.get_by_role("option")
    assert options.count() == len(state(scope, "_answer"))
    options.nth(3).click()
    assert host.sent[-1] == {"type": "sample", "at": 3, "settings": {}}
    scope.look(3)
    host.put(**state_of(scope))
    assert options.nth(3).get_attribute("aria-selected") == "true"
    assert ", as in the text" in page.locator(".exl2nb-drawn").inner_text()
    page.keyboard.press("ArrowRight")
    assert host.sent[-1] == {"type": "sample", "at": 4, "settings": {}}
    page.get_by_label("Seed").fill("123")
    page.get_by_label("Seed").press("Tab")
    host.put(error="OptionError: no")
    assert page.get_by_role("alert").inner_text() == "OptionError: no"


def test_names_are_text(page, scope):
    host = MockHost(
        page, "microscope", state_of(scope, _prompt="<img src=x onerror=fail()>", _answer=[[1, "<script>fail()</script>"]], at=0)
    )
    host.frame()
    assert page.locator("img").count() == 0
    assert page.get_by_role("option").inner_text() == "<script>fail()</script>"


def test_export_without_kernel(page, scope, tmp_path):
    scope.to_html(tmp_path / "scope.html")
    assert (tmp_path / "scope.html").stat().st_size < 200_000
    page.context.set_offline(True)
    page.goto((tmp_path / "scope.html").as_uri())
    assert page.locator("tbody tr").count() == len(state(scope, "_tokens"))
    assert page.get_by_role("slider", name="Top-p, slider").is_disabled()
