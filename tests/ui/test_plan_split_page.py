"""MemoryPlan of several devices in a browser: borders by pointer and keys, the same numbers as Python, the export."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from mock_host import MockHost, low_controls, state_of, violations

import exl2nb as ex
from exl2nb.llm.memory import Stage
from exl2nb.llm.split_plan import Holder, KindFormula, SplitFormula, SplitPlan
from exl2nb.widgets import MemoryPlan

DEMO = Path(ex.__file__).parent / "demo_model"
LAYERS = 32
SHOWN = """() => {
  const root = document.querySelector('#first');
  const rows = [...root.querySelectorAll('tr[data-device]')].map((row) => [row.dataset.device, Number(row.dataset.bytes)]);
  return [Object.fromEntries(rows), root.querySelector('.exl2nb-verdict').textContent, root.querySelector('.exl2nb-line code').textContent];
}"""


def large(*, gpus: int = 1, speeds: bool = True) -> SplitPlan:
    """Sizes as of eight billion weights, a processor and cards of 6 GiB, with every coefficient in play."""
    demo = ex.plan(DEMO, free=2**30).formula
    pages = {mode: size * 42 for mode, size in demo.page_bytes.items()}
    host = replace(demo, weights=5_000_000_000, page_bytes=pages, longest=65_536)
    stages = (Stage(270_000_000, 100_000, 512), Stage(35_000_000, 60_000, 20_992))
    card = replace(host, stages=stages, chunk=2048, graph_fixed=150_000_000, graph_row=700_001, logits_row=513_024, segments=1)
    layers = tuple(120_000_000 + 1_000 * i for i in range(LAYERS))
    parts = {"cpu": (525_336_576, *layers, 270_000_000), "cuda": (525_336_576, *(size + 300 for size in layers), 280_000_001)}
    kinds = {
        kind: KindFormula(parts=parts[kind], read=(0, *parts[kind][1:]), stream=1_048_576, lent=1_000_003, formula=one)
        for kind, one in (("cpu", host), ("cuda", card))
    }
    devices = [Holder("cpu", 32 * 2**30, 40e9), *(Holder(f"cuda:{i}", 6 * 2**30, 360e9) for i in range(gpus))]
    if not speeds:
        devices = [Holder(name, limit) for name, limit, _ in devices]
    formula = SplitFormula(devices=tuple(devices), kinds=kinds, lends=True)
    choice = {"context": 4096, "batch": 1, "mode": "fp16"}
    borders = [10 + 11 * i for i in range(gpus)]
    shares = formula.shares(borders, **choice)
    return SplitPlan(name="eight billion", path="models/8b", context=4096, batch=1, cache_mode="fp16", shares=shares, formula=formula)


def test_browser_and_python_agree(page):
    """On a grid of borders and settings: bytes of each device, verdict and line of Python."""
    planned = large(gpus=2)
    MockHost(page, "plan", state_of(MemoryPlan(planned)))
    borders = [[0, 0], [0, 32], [32, 32], [1, 2], [10, 21], [7, 7]]
    grid = list(itertools.product(borders, (1, 257, 65_536), (1, 3, 100), ("fp16", "q4")))
    shown = page.evaluate(
        """async (grid) => {
          const shown = [];
          for (const [borders, context, batch, cache_mode] of grid) {
            window.put({ borders, context, batch, cache_mode });
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            shown.push((SHOWN)());
          }
          return shown;
        }""".replace("SHOWN", SHOWN),
        grid,
    )
    for (ends, context, batch, mode), (sizes, words, line) in zip(grid, shown):
        expected = planned.at(borders=ends, context=context, batch=batch, cache=mode)
        held = {share.device: share.total for share in expected.shares}
        assert sizes == {name: held.get(name, 0) for name in ("cpu", "cuda:0", "cuda:1")}, (ends, context, batch, mode)
        assert words == expected.verdict(), (ends, context, batch, mode)
        assert line == expected.load_line


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_border_is_dragged_and_moved_by_keys(page, screenshots, theme):
    planned = large()
    host = MockHost(page, "plan", state_of(MemoryPlan(planned)), theme=theme)
    border = page.get_by_role("slider", name="Border between cpu and cuda:0")
    assert border.get_attribute("aria-valuenow") == "10"
    assert border.get_attribute("aria-valuetext").startswith("cpu 10 layers, cuda:0 22 layers; ")
    border.focus()
    for key, at in (("ArrowRight", 11), ("ArrowLeft", 10), ("PageUp", 14), ("PageDown", 10), ("End", 32), ("Home", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        host.frame()
        assert border.get_attribute("aria-valuenow") == str(at), key
    track = page.locator(".exl2nb-track").bounding_box()
    handle = border.bounding_box()
    assert handle["width"] >= 24 and handle["height"] >= 24
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * 5 / LAYERS + 3, track["y"] + 5, steps=4)
    host.frame()
    assert border.get_attribute("aria-valuenow") == "5"
    page.mouse.up()
    assert {message["type"] for message in host.sent} == {"save"}, "nothing is asked of the kernel"
    assert host.sent[-1]["values"]["borders"] == [5]
    expected = planned.at(borders=[5])
    sizes, words, line = page.evaluate(SHOWN)
    assert sizes["cuda:0"] == expected.shares[1].total
    assert words == expected.verdict()
    assert page.get_by_role("status").inner_text() == words, "said when the hand is off"
    assert "devices={'cuda:0': '27 layers', 'cpu': 'rest'}" in line
    page.screenshot(path=screenshots / f"plan-split-{theme}.png")
    assert violations(page) == []
    assert low_controls(page) == []
    assert "fits" in words and page.locator(".exl2nb-over").count() == 0
    page.get_by_label("Sequences").fill("8")
    page.keyboard.press("Tab")
    host.frame()
    assert "too much for cuda:0 by" in page.locator(".exl2nb-verdict").inner_text()
    assert page.locator("tr[data-device='cuda:0'] .exl2nb-over").count() == 1
    page.screenshot(path=screenshots / f"plan-split-over-{theme}.png")
    assert violations(page) == []


def test_borders_push_each_other_and_limits_fill(page, screenshots):
    planned = large(gpus=3)
    host = MockHost(page, "plan", state_of(MemoryPlan(planned)))
    page.get_by_role("slider", name="Border between cuda:1 and cuda:2").focus()
    page.keyboard.press("Home")
    host.frame()
    assert host.sent[-1]["values"]["borders"] == [0, 0, 0]
    page.get_by_role("slider", name="Border between cpu and cuda:0").focus()
    page.keyboard.press("PageUp")
    host.frame()
    assert host.sent[-1]["values"]["borders"] == [4, 4, 4]
    for name, gib in (("cuda:0", "1"), ("cuda:1", "2"), ("cuda:2", "3")):
        page.get_by_label(f"{name} may hold, GiB").fill(gib)
        page.keyboard.press("Tab")
    page.get_by_role("button", name="Fill cuda:0, cuda:1, cuda:2").click()
    host.frame()
    limits = {"cuda:0": 2**30, "cuda:1": 2 * 2**30, "cuda:2": 3 * 2**30}
    borders = host.sent[-1]["values"]["borders"]
    shares = planned.at(borders=borders, limits=limits).shares
    assert len(shares) == 4 and all(share.total <= limits.get(share.device, 2**60) for share in shares)
    for i in range(3):  # one more layer finds no room
        more = [at - (j <= i) for j, at in enumerate(borders)]
        wider = {share.device: share.total for share in planned.at(borders=more, limits=limits).shares}
        assert wider[f"cuda:{i}"] > limits[f"cuda:{i}"]
    page.screenshot(path=screenshots / "plan-split-three.png")
    assert violations(page) == []


def test_filling_is_what_load_does(page):
    """The page's borders are those that Python gives the same budget."""
    asked = {"cuda:0": "250MiB", "cuda:1": "245MiB", "cpu": "rest"}
    planned = ex.plan(DEMO, devices=asked, cache="q8")
    host = MockHost(page, "plan", state_of(MemoryPlan(planned.at(borders=[12, 12]))))
    page.get_by_role("button", name="Fill cuda:0, cuda:1").click()
    host.frame()
    assert tuple(host.sent[-1]["values"]["borders"]) == planned.borders


def test_speeds_and_limits_that_are_not_known(page):
    state = state_of(MemoryPlan(large(speeds=False)))
    host = MockHost(page, "plan", {**state, "limits": [None, 6 * 2**30]})
    verdict = page.locator(".exl2nb-verdict")
    assert "what cpu may hold is not known: enter it; enter what cpu, cuda:0 reads" in verdict.inner_text()
    for label, text in (("cpu may hold, GiB", "16"), ("cpu reads, GB/s", "40"), ("cuda:0 reads, GB/s", "360")):
        page.get_by_label(label).fill(text)
        page.keyboard.press("Tab")
        host.frame()
    assert host.sent[-1]["values"]["limits"][0] == 16 * 2**30
    assert host.sent[-1]["values"]["speeds"] == [40e9, 360e9]
    assert verdict.inner_text() == large().at(limits={"cpu": 16 * 2**30}).verdict()


def test_names_are_text(page):
    planned = replace(large(), name="<img src=x onerror=fail()>", path="<b>'\"")
    host = MockHost(page, "plan", state_of(MemoryPlan(planned)))
    host.put(error="<b>bad</b>")
    assert page.locator("img, b > b").count() == 0
    assert page.get_by_role("alert").inner_text() == "<b>bad</b>"
    assert page.locator(".exl2nb-line code").inner_text() == planned.load_line


def test_export_without_kernel(page, tmp_path):
    MemoryPlan(large()).to_html(tmp_path / "plan.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "plan.html").as_uri())
    page.get_by_role("slider", name="Border between cpu and cuda:0").press("End")
    page.locator(".exl2nb-line code", has_text="device='cpu'").wait_for()
