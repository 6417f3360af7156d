"""The pictures of the documentation, taken of the real bundles with real results, light and dark: docs/pictures/*.png.

Slow, and writes into the documentation: run with -m slow after a widget has changed its looks. The quick test only looks at what is there.
"""

import struct
from pathlib import Path

import pytest
from everything import everything, show_all

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 200_000
NAMES = ("playground", "explorer", "bitmap", "plan", "weights", "microscope", "speculation", "pagetable", "caches", "compare")
NAMES += ("errorflow", "layerlens", "attention", "histogram", "outliers", "lora")
WIDTH = 1000


@pytest.fixture(scope="module")
def states(llm):
    return everything(llm)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_take_them(page, states, theme):
    show_all(page, states, theme=theme, width=WIDTH, unfold=False)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        page.locator(f"#{name} .exl2nb").screenshot(path=PICTURES / f"{name}-{theme}.png")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_they_are_there_and_small(name, theme):
    data = (PICTURES / f"{name}-{theme}.png").read_bytes()
    assert len(data) < MOST_BYTES
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 500 and height > 80
    assert data != (PICTURES / f"{name}-{'dark' if theme == 'light' else 'light'}.png").read_bytes(), "both of one theme"
