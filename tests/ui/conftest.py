"""Browser, JupyterLab and screenshots. Without a browser the tests skip and say so; under CI=true that is a failure."""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for lab.py and mock_host.py: pytest's importlib mode leaves the path alone

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing(what: str):
    message = f"{what}; on Debian: apt-get install chromium"
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install exl2nb[dev])")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        missing("no Chromium found")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser):
    """A page in a context of its own; an error in its scripts fails what used it."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page, errors = context.new_page(), []
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert not errors, f"errors in the page: {errors}"


@pytest.fixture
def page(browser):
    with opened(browser) as page:
        yield page


@pytest.fixture
def open_export(page, tmp_path):
    """Writes a widget's export, of less than 200 kB, and opens it in `page` without network."""

    def open_export(widget):
        widget.to_html(tmp_path / "export.html")
        assert (tmp_path / "export.html").stat().st_size < 200_000
        page.context.set_offline(True)
        page.goto((tmp_path / "export.html").as_uri())

    return open_export


@pytest.fixture(scope="module")
def lab_page(browser):
    """One page for a module: JupyterLab and its kernel take seconds to start."""
    with opened(browser) as page:
        yield page


@pytest.fixture(scope="session")
def lab(browser, tmp_path_factory):
    from lab import Lab

    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """Where pictures are kept: EXL2NB_SCREENSHOTS, else tests/ui/screenshots (ignored by git)."""
    folder = Path(os.environ.get("EXL2NB_SCREENSHOTS", "") or Path(__file__).parent / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
