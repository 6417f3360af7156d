"""The pictures of the documentation, taken of the real bundles with real results, light and dark: docs/pictures/*.png.

The slow test, which CI runs, takes them anew and fails where one no longer looks like its widget. EXL2NB_TAKE_PICTURES replaces them:

    EXL2NB_TAKE_PICTURES=1 .venv/bin/python -m pytest -m slow tests/ui/test_pictures.py
"""

import base64
import os
import struct
from pathlib import Path

import pytest
from everything import everything, show_all
from site_widgets import WIDGETS

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 200_000
NAMES = (*WIDGETS, "seeing")
WIDTH = 1000
MOST_TALLER, MOST_DIFFERENT = 0.03, 2.0
"""How much taller a picture may be, and by how many of 255 its colours may differ in the mean: fonts differ between machines."""

COMPARE = """async ([a, b, across]) => {
  const pixels = async (data) => {
    const image = new Image();
    image.src = 'data:image/png;base64,' + data;
    await image.decode();
    return image;
  };
  const [one, two] = [await pixels(a), await pixels(b)];
  const high = Math.round((across * one.height) / one.width);
  const small = (image) => {
    const canvas = new OffscreenCanvas(across, high), context = canvas.getContext('2d');
    context.imageSmoothingQuality = 'high';
    context.drawImage(image, 0, 0, across, high);
    return context.getImageData(0, 0, across, high).data;
  };
  const [first, second] = [small(one), small(two)];
  let sum = 0;
  for (let i = 0; i < first.length; i++) sum += Math.abs(first[i] - second[i]);
  return [Math.abs(one.height - two.height) / one.height, sum / first.length];
}"""


def unlike(page, old: bytes, new: bytes) -> str:
    """What tells two pictures apart, "" for nothing. A quarter of their size is compared, so that the edges of letters count little."""
    taller, different = page.evaluate(COMPARE, [base64.b64encode(old).decode(), base64.b64encode(new).decode(), 250])
    if taller > MOST_TALLER:
        return f"another height, {taller:.0%}"
    return f"colours differ by {different:.1f}" if different > MOST_DIFFERENT else ""


@pytest.fixture(scope="module")
def states(llm):
    return everything(llm)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_they_show_todays_widgets(page, states, theme):
    show_all(page, states, theme=theme, width=WIDTH, unfold=False)
    found = {name: page.locator(f"#{name} .exl2nb").screenshot() for name in NAMES}
    old = {name: (PICTURES / f"{name}-{theme}.png") for name in NAMES}
    changed = {name: why for name in NAMES if not old[name].is_file() or (why := unlike(page, old[name].read_bytes(), found[name]))}
    if os.environ.get("EXL2NB_TAKE_PICTURES"):
        for name, picture in found.items():
            old[name].write_bytes(picture)
        return
    assert not changed, f"{changed}: run EXL2NB_TAKE_PICTURES=1 pytest -m slow tests/ui/test_pictures.py, look at docs/pictures, commit"


def test_pictures_are_told_apart(page):
    """Themes differ, widgets differ, and a picture is like itself."""
    light, dark, other = ((PICTURES / f"{name}.png").read_bytes() for name in ("errorflow-light", "errorflow-dark", "outliers-light"))
    page.goto("about:blank")
    assert unlike(page, light, light) == ""
    assert "colours differ" in unlike(page, light, dark)
    assert unlike(page, light, other) != ""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_they_are_there_and_small(name, theme):
    data = (PICTURES / f"{name}-{theme}.png").read_bytes()
    assert len(data) < MOST_BYTES
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 500 and height > 80
    assert data != (PICTURES / f"{name}-{'dark' if theme == 'light' else 'light'}.png").read_bytes(), "both of one theme"
