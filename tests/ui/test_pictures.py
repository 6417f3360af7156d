"""The pictures of the documentation, taken of the real widgets in a real JupyterLab, light and dark: docs/pictures/*.png.

Slow, and writes into the documentation: run with -m slow after a widget has changed its looks. The quick test only looks at what is there.
"""

import struct
from pathlib import Path

import pytest
from lab import Notebook

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
DATA = ROOT / "tests" / "data" / "demo-exl2-4.0bpw"
MOST_BYTES = 200_000
ASK = "It was a dark night, and the old man"
SETUP = "import exl2nb as ex\nllm = ex.demo(progress=None)\nmeasured = ex.demo_measurement()"
CELLS = {
    "playground": f"play = ex.widgets.Playground(llm, prompt={ASK!r}, max_tokens=80, seed=7)\nplay.start().wait()\nplay",
    "explorer": "ex.widgets.BitrateExplorer(measured, llm, bpw=3.0, measured=[(3, .2605), (4, .0698), (6, .0049)])",
    "bitmap": "ex.widgets.BitMap(measured.solve(bpw=3.5), selected=[3, 'down'])",
    "plan": "ex.widgets.MemoryPlan(llm, context=4096, batch=8, free=100_000_000)",
    "weights": f"ex.widgets.WeightBrowser({str(DATA)!r}, llm, column=17)",
    "microscope": f"ex.widgets.SamplerMicroscope(llm, {ASK!r}, max_tokens=12, temperature=0.8, top_p=0.9, seed=7)",
    "speculation": "story = 'It was a dark and stormy night. The old man had a boat and a dog. ' * 4\n"
    "ex.widgets.Speculation(llm, story, max_tokens=60, temperature=0)",
    "pagetable": "table = ex.widgets.PageTable(llm, period_s=0.02).start()\n"
    "rain = 'The rain fell on the town. ' * 70\nllm.generate(rain, max_tokens=1)\n"
    "llm.generate([rain + 'Who came?', rain + 'Who left?', 'It was'], max_tokens=60, ignore_eos=True)\ntable.stop(); table.wait(5)\n"
    "seen = table.to_frame()\ntable.frame = int((seen.owners.map(len) > 1).groupby(seen.frame).sum().idxmax())\ntable",
    "caches": f"caches = ex.widgets.CacheExplorer(llm, prompt={ASK!r}, max_tokens=40)\ncaches.start(); caches.wait()\ncaches",
    "compare": f"two = ex.widgets.Compare({{'original': llm, '4 bits': {str(DATA)!r}}}, "
    "prompts=['She opened the letter and'], max_tokens=40)\ntwo.start(); two.wait()\ntwo",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_take_them(lab, browser, theme):
    """One notebook, one cell and one picture for every widget."""
    lab.set_theme(f"JupyterLab {theme.capitalize()}")
    context = browser.new_context(viewport={"width": 1280, "height": 1700})
    page = context.new_page()
    page.set_default_timeout(60_000)
    PICTURES.mkdir(parents=True, exist_ok=True)
    try:
        book = Notebook(lab, page, [SETUP, *CELLS.values()])
        book.run(0, timeout_s=120)
        for number, name in enumerate(CELLS, 1):
            book.run(number, timeout_s=120)
            widget = page.locator(f".exl2nb.exl2nb-{name}")
            widget.wait_for()
            page.wait_for_timeout(500)  # fonts and the last frames
            widget.screenshot(path=PICTURES / f"{name}-{theme}.png")
    finally:
        lab.set_theme("JupyterLab Light")
        context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", CELLS)
def test_they_are_there_and_small(name, theme):
    data = (PICTURES / f"{name}-{theme}.png").read_bytes()
    assert len(data) < MOST_BYTES
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 500 and height > 80
    assert data != (PICTURES / f"{name}-{'dark' if theme == 'light' else 'light'}.png").read_bytes(), "both of one theme"
