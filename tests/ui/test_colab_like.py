"""The widgets with the kernel packages that Colab has: ipykernel 6.17.1, ipywidgets 7.7.1, in a JupyterLab of that age.

Slow, and only where EXL2NB_COLAB_PYTHON names the Python of such an environment: `bash .ci/colab_like` makes one and runs this.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from lab import Lab, Notebook

PYTHON = os.environ.get("EXL2NB_COLAB_PYTHON", "")
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="EXL2NB_COLAB_PYTHON is not set: run .ci/colab_like")]

SETUP = """
import ipykernel, ipywidgets, anywidget, exl2nb as ex
llm = ex.demo(progress=None)
play = ex.widgets.Playground(llm, prompt="It was a dark night, and the old man", max_tokens=900, seed=7)
plan = ex.widgets.MemoryPlan(llm, free=10**9)
bits = ex.widgets.BitMap(ex.demo_measurement().solve(bpw=3.5))
print("ready")
"""
CELLS = [
    SETUP,
    "play",
    "print(play.status, llm.engine.pages.num_free == llm.engine.spec.num_pages, ipykernel.__version__, ipywidgets.__version__)",
    "from IPython.display import display\nplay.max_tokens = 300; play.start(); print('returned')",
    "play.wait(); print(play.n_tokens)",
    "display(plan, bits)",
    "print(plan.cache_mode, bits.selected)",
]


def test_the_python_side(tmp_path):
    """Every test of the widgets' Python halves, in that environment."""
    env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    files = sorted(str(path) for path in (ROOT / "tests/widgets").glob("test_*.py") if path.stem != "test_frontend")
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d\d+ passed|100%", done.stdout), done.stdout[-500:]


@pytest.fixture(scope="module")
def old_lab(browser, tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("oldlab"), python=PYTHON)
    yield lab
    lab.close()


@pytest.mark.timeout(600)
def test_the_playground_in_the_browser(old_lab, page, screenshots):
    """Streams, stops while the kernel is idle, and the text of a run that a cell waits for is complete."""
    book = Notebook(old_lab, page, CELLS)
    page.set_default_timeout(60_000)
    assert "ready" in book.run(0, timeout_s=120)
    book.run(1)
    page.get_by_role("button", name="Generate").click()
    page.locator(".exl2nb-token").nth(60).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".exl2nb-headline", has_text="Stopped after").wait_for(timeout=5000)
    page.screenshot(path=screenshots / "colab-like.png")
    status, free, kernel, widgets = book.run(2).split()
    assert (status, free) == ("stopped", "True")
    assert (kernel, widgets) == ("6.17.1", "7.7.1")
    assert "returned" in book.run(3)
    assert book.run(4).strip() == "300"
    page.locator(".exl2nb-headline", has_text="Done: reached the token limit").wait_for()
    assert page.locator(".exl2nb-token").count() == 300
    book.run(5)
    page.get_by_label("Cache", exact=True).select_option("q4")
    page.get_by_role("gridcell", name="layer 3 down:").click()
    page.locator(".exl2nb-strip > div").first.wait_for()
    page.screenshot(path=screenshots / "colab-like-more.png", full_page=True)
    assert book.run(6).strip() == "q4 [3, 'down']"
