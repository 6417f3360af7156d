"""Every widget in ipywidgets' HTML manager, which VS Code's renderer, nbviewer and nbconvert show widgets with: no JupyterLab around them.

The page is what `ipywidgets.embed` writes, with VS Code's classes and colours; what it would fetch from a CDN comes from files. There is no
kernel: what works there is what works in the page alone.

Slow, and only where EXL2NB_RENDERER names a folder with `html-manager` and `requirejs` as npm packs them: `bash .ci/front_ends` makes one.
"""

import os
import re
from pathlib import Path

import anywidget
import pytest
from everything import DATA, examples
from mock_host import violations

import exl2nb

FOLDER = os.environ.get("EXL2NB_RENDERER", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FOLDER, reason="EXL2NB_RENDERER is not set: run .ci/front_ends"),
]
SCRIPTS = {
    "require": Path(FOLDER) / "requirejs" / "require.js",
    "embed-amd": Path(FOLDER) / "html-manager" / "dist" / "embed-amd.js",
    "anywidget": Path(anywidget.__file__).parent / "nbextension" / "index.js",
}
COLOURS = {
    "light": "--vscode-foreground:#3b3b3b;"
    "--vscode-editor-background:#ffffff;--vscode-input-background:#ffffff;--vscode-focusBorder:#005fb8",
    "dark": "--vscode-foreground:#cccccc;--vscode-editor-background:#1f1f1f;--vscode-input-background:#313131;--vscode-focusBorder:#0078d4",
}
ADDRESS = "http://renderer.invalid/"
PAGE = """<!doctype html><html lang="en" style="{colours}"><head><meta charset="utf-8"><title>renderer</title>
<style>body{{background:var(--vscode-editor-background);font-family:sans-serif}}</style></head>
<body class="vscode-{theme}"><main>{snippet}</main></body></html>"""


@pytest.fixture(scope="module")
def embedded(llm):
    """Names of the widgets, the script part of the page, and the places of the widgets."""
    from ipywidgets.embed import embed_snippet  # type: ignore[attr-defined]

    with exl2nb.load(DATA, progress=None) as low:
        made = examples(llm, low)
        snippet = re.sub(r' integrity="[^"]*"', "", embed_snippet(views=list(made.values()), drop_defaults=False))  # of the minified file
        for widget in made.values():
            widget.close()
    return list(made), snippet


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_widget_is_drawn(page, embedded, theme, screenshots):
    names, snippet = embedded
    text, asked = PAGE.format(colours=COLOURS[theme], theme=theme, snippet=snippet), []

    def answer(route):
        asked.append(route.request.url)
        if route.request.url == ADDRESS:
            route.fulfill(body=text, content_type="text/html")
            return
        stem = next((name for name in SCRIPTS if name in route.request.url.rsplit("@jupyter-widgets/html-manager", 1)[-1]), None)
        if stem is None:
            route.abort()
        else:
            headers = {"Access-Control-Allow-Origin": "*"}
            route.fulfill(body=SCRIPTS[stem].read_text(encoding="utf-8"), content_type="text/javascript", headers=headers)

    page.route(lambda url: url.startswith("http"), answer)
    page.set_viewport_size({"width": 1000, "height": 1000})
    page.goto(ADDRESS)
    for name in names:
        page.locator(f"section.exl2nb-{name}").first.wait_for(timeout=60_000)
        page.locator(f"section.exl2nb-{name}").first.screenshot(path=screenshots / f"renderer-{name}-{theme}.png")
    assert page.locator("section.exl2nb").count() == len(names), asked
    assert page.locator(".exl2nb-error:visible").count() == 0
    assert violations(page, "section.exl2nb", besides="label-content-name-mismatch") == []
    page.locator("section.exl2nb-plan").get_by_label("Cache", exact=True).select_option("q4")  # answered by the page itself
    page.locator("section.exl2nb-plan").get_by_text("fits, with memory for").first.wait_for()
    lens = page.locator("section.exl2nb-layerlens")
    lens.get_by_role("option").nth(2).click()
    lens.locator("[role=option][aria-selected=true]", has_text="was").wait_for()
