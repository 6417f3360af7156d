"""The real MemoryPlan bundle in a browser: the same numbers as Python, controls without a kernel, both themes, keys, the export."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from mock_host import MockHost, violations

import exl2nb as ex
from exl2nb.llm.memory import Stage
from exl2nb.widgets import MemoryPlan
from tests.widgets.page import exported

DEMO = Path(ex.__file__).parent / "demo_model"
READ = """() => [...document.querySelectorAll('#first tr[data-part]')].map((row) => [row.dataset.part, Number(row.dataset.bytes)])"""


def large() -> ex.MemoryPlan:
    """Sizes as of eight billion weights on a card of 8 GB, with every coefficient in play."""
    demo = ex.plan(DEMO, free=8 * 2**30)
    formula = replace(
        demo.formula,
        weights=4_700_000_000,
        page_bytes={mode: size * 42 for mode, size in demo.formula.page_bytes.items()},
        stages=(Stage(270_000_000, 100_000, 512), Stage(35_000_000, 60_000, 20_992)),
        chunk=2048,
        graph_fixed=3_000_000,
        graph_row=700_001,
        logits_row=513_024,
        longest=65_536,
        segments=1,
        adapters=84_000_123,
    )
    return type(demo).of(formula, name="eight billion", device="cuda", context=4096, batch=2, cache="fp16", free=8 * 2**30)


def state(widget) -> dict:
    return {**exported(widget), "_static": False}


def test_browser_and_python_agree(page):
    """On a grid of settings, byte for byte, and the verdict's longest context too."""
    planned = large()
    MockHost(page, "plan", state(MemoryPlan(planned)))
    grid = list(itertools.product((1, 255, 256, 257, 2047, 4096, 65_536), (1, 2, 3, 8, 9, 100), ("fp32", "fp16", "q6", "q4")))
    shown = page.evaluate(
        """async (grid) => {
          const shown = [];
          for (const [context, batch, cache_mode] of grid) {
            window.put({ context, batch, cache_mode });
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            const rows = [...document.querySelectorAll('#first tr[data-part]')].map((row) => [row.dataset.part, Number(row.dataset.bytes)]);
            shown.push([Object.fromEntries(rows), document.querySelector('#first .exl2nb-verdict').textContent]);
          }
          return shown;
        }""",
        grid,
    )
    for (context, batch, mode), (parts, words) in zip(grid, shown):
        expected = planned.at(context=context, batch=batch, cache=mode)
        assert parts == {**expected.parts, "total": expected.total}, (context, batch, mode)
        assert (": fits" in words) == expected.fits, (context, batch, mode)
        if expected.longest:
            assert f"{expected.longest:,} tokens of context" in words, (context, batch, mode)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_controls_answer_without_a_kernel(page, screenshots, theme):
    host = MockHost(page, "plan", state(MemoryPlan(large())), theme=theme)
    verdict = page.locator(".exl2nb-verdict")
    assert "fits" in verdict.inner_text()
    cache = dict(page.evaluate(READ))["cache"]
    page.get_by_label("Cache", exact=True).select_option("q4")
    host.frame()
    assert dict(page.evaluate(READ))["cache"] < cache / 3
    page.get_by_label("Cache", exact=True).select_option("fp32")
    page.get_by_label("Sequences").fill("4")
    page.keyboard.press("Tab")
    slider = page.get_by_label("Context, slider")
    slider.fill("48")
    host.frame()
    assert page.get_by_label("Context, tokens").input_value() == "65536"
    assert "too much; try" in verdict.inner_text()
    assert page.locator(".exl2nb-over").count() == 1
    assert all(message["type"] == "save" for message in host.sent), "nothing is asked of the kernel"
    assert {**host.sent[-1]["values"], "_formula": 0, "_modes": 0}["context"] == 65536
    assert page.get_by_role("status").inner_text() == verdict.inner_text()
    page.screenshot(path=screenshots / f"plan-{theme}.png")
    assert violations(page) == []


def test_keys_and_free_memory(page):
    host = MockHost(page, "plan", state(MemoryPlan(large())))
    slider = page.get_by_label("Context, slider")
    slider.focus()
    before = int(page.get_by_label("Context, tokens").input_value())
    page.keyboard.press("ArrowRight")
    host.frame()
    assert int(page.get_by_label("Context, tokens").input_value()) > before
    free = page.get_by_label("Free memory, GiB")
    free.fill("2")
    page.keyboard.press("Tab")
    host.frame()
    assert host.sent[-1]["values"]["free"] == 2 * 2**30
    assert "use fewer bits per weight" in page.locator(".exl2nb-verdict").inner_text()
    free.fill("")
    page.keyboard.press("Tab")
    host.frame()
    assert host.sent[-1]["values"]["free"] is None
    assert "not known" in page.locator(".exl2nb-verdict").inner_text()


def test_names_and_errors_are_text(page):
    data = json.loads(json.dumps(large().to_dict()))
    host = MockHost(page, "plan", state(MemoryPlan({**data, "name": "<img src=x onerror=fail()>"})))
    host.put(error="<b>bad</b>")
    assert page.locator("img").count() == 0
    assert page.get_by_role("alert").inner_text() == "<b>bad</b>"


def test_export_without_kernel(page, tmp_path):
    MemoryPlan(large()).to_html(tmp_path / "plan.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "plan.html").as_uri())
    page.get_by_label("Cache", exact=True).select_option("q4")
    page.locator(".exl2nb-verdict", has_text="fits").wait_for()
