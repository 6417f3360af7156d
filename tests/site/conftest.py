"""The built site on a port of this machine, in Chromium. What a page asks of other hosts, and its errors, fail the test."""

import http.server
import importlib.util
import os
import threading
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
_spec = importlib.util.spec_from_file_location("ui_conftest", ROOT / "tests" / "ui" / "conftest.py")
_ui = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ui)
browser = _ui.browser


@pytest.fixture(scope="session")
def site():
    if not (SITE / "index.html").is_file():
        (pytest.fail if os.environ.get("CI", "").lower() == "true" else pytest.skip)("the site is not built: make docs")
    return SITE


@pytest.fixture(scope="session")
def address(site):
    """The site on a port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def opened(browser):
    """Opens pages in colours and at a width; what they ask of other hosts or report as errors fails the test."""
    foreign, problems, contexts = [], [], []

    def open_page(address, theme="light", width=1400):
        context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on(
            "request", lambda request: foreign.append(request.url) if urlsplit(request.url).hostname not in (None, "127.0.0.1") else None
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not foreign, f"fetched from other hosts: {foreign}"
    assert not problems, problems
