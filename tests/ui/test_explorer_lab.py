"""The explorer and the map in a real JupyterLab: dragging reaches the kernel and comes back, also while another cell runs."""

import pytest
from lab import Lab, Notebook

pytestmark = pytest.mark.slow  # run by .ci/run

CELLS = [
    "import time, exl2nb as ex\nm = ex.demo_measurement()\n"
    "x, b = ex.widgets.BitrateExplorer(m, bpw=4.0), ex.widgets.BitMap(m.solve(bpw=3.5))",
    "x",
    "time.sleep(4); print('slept')",
    "print(x.solved, x.plan.bpw < 2.51)",
    "b",
    "print(b.selected)",
]


@pytest.fixture(scope="module")
def book(lab: Lab, lab_page):
    book = Notebook(lab, lab_page, CELLS)
    book.run(0)
    return book


@pytest.fixture
def page(book):
    return book.page


def test_drag_while_a_cell_runs(book, page, screenshots):
    book.run(1)
    slider = page.get_by_role("slider", name="Bits per weight")
    figures = page.locator(".exl2nb-explorer .exl2nb-figures")
    before = figures.inner_text()
    book.start(2)
    slider.fill("2.5")
    page.wait_for_function(
        "(old) => document.querySelector('.exl2nb-explorer .exl2nb-figures').textContent !== old", arg=before, timeout=3500
    )
    page.screenshot(path=screenshots / "lab-explorer.png")
    book.wait_idle()
    assert book.run(3).strip() == "2.5 True"


def test_a_chosen_cell_is_known_in_python(book, page):
    book.run(4)
    shown = page.locator(".exl2nb-bitmap")
    shown.get_by_role("gridcell", name="layer 3 down:").click()
    shown.locator(".exl2nb-strip > div").first.wait_for()
    assert book.run(5).strip() == "[3, 'down']"
