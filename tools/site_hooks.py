"""What mkdocs asks while it builds the site: pages that are not in docs/, links that leave docs/, notebooks without scripts of others.

Links in the documents are relative paths of the repository, so that they work on a code host. Here a link to a file outside of docs/
becomes a link to its page of the site; a file without one is linked at the public repository, or named alone where there is none.
"""

from __future__ import annotations

import itertools
import posixpath
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import api_reference  # noqa: E402 - the line above finds them
import site_charts  # noqa: E402
import site_widgets  # noqa: E402
from links import REPOSITORY  # noqa: E402

OUTSIDE = {
    "exl2nb/quant/FORMAT.md": "internals/exl2_format.md",
    "exl2nb/cache/FORMAT.md": "internals/cache_format.md",
    "csrc/cuda/README.md": "internals/cuda.md",
    "exl2nb/demo_model/README.md": "internals/demo_model.md",
    "exl2nb/seeing_model/README.md": "internals/seeing_model.md",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
    "benchmarks/README.md": "benchmarks/scripts.md",
    "CONTRIBUTING.md": "internals/contributing.md",
    "CHANGELOG.md": "internals/changelog.md",
    ".github/SECURITY.md": "internals/security.md",
    ".github/CODE_OF_CONDUCT.md": "internals/conduct.md",
    **{f"benchmarks/log/{path.name}": f"benchmarks/log/{path.name}" for path in sorted((ROOT / "benchmarks" / "log").glob("*.md"))},
}
"""Documents outside of docs/ -> their pages."""
FOLDERS = {"docs/pictures": "gallery/README.md", "benchmarks/log": "benchmarks/results.md", "benchmarks": "benchmarks/index.md"}
"""Folders that documents link to -> the page that shows what is in them."""
MIGRATION = ("migrate.md", "exllamav2.md", "transformers.md", "langchain.md", "lm_eval.md")
FOREIGN = re.compile(r'<(script|style|clipboard-copy)\b.*?</\1>|<div class="clipboard-copy-txt".*?</div>|<link\b[^>]*>', re.S)
"""What the plugin adds to a notebook besides its cells."""
PAIR = "".join(rf'<img class="{theme}" loading="lazy" \1-{theme}.png"\2>' for theme in ("light", "dark"))
"""A picture in both themes, of which the style sheet shows one."""
WASM = ROOT / "build" / "wasm"
WIDGETS = ROOT / "build" / "site-widgets"
WORDS = "The playground streams an answer; the sampler microscope and the bitrate explorer follow their sliders"
LOOP = "".join(
    [
        '<div class="loop">',
        *(
            f'<video class="{theme}" muted loop playsinline preload="none" poster="pictures/loop-{theme}.webp" width="860" height="588" '
            f'aria-label="{WORDS}" src="pictures/loop-{theme}.webm"></video>'
            for theme in ("light", "dark")
        ),
        '<button type="button">Pause</button></div>',
    ]
)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1|^(?: {4}|\t).*?$", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation follows the tables of the guide and of the internals; a page that they do not list comes after the others."""
    docs = ROOT / "docs"
    guide = ordered(docs, "guide", "README.md")
    internals = ordered(docs, "internals", "architecture.md")
    log = sorted((page for page in OUTSIDE.values() if page.startswith("benchmarks/log/")), reverse=True)
    config.nav = [
        {"Home": "index.md"},
        {"Guide": [page for page in guide if Path(page).name not in MIGRATION]},
        {"Migration": [f"guide/{name}" for name in MIGRATION]},
        {
            "Gallery": [
                "gallery/README.md",
                "gallery/browser.md",
                "gallery/widgets.md",
                {"Course": [f"gallery/{path.name}" for path in sorted((docs / "gallery").glob("*.ipynb"))]},
            ]
        },
        {"Benchmarks": ["benchmarks/index.md", "benchmarks/results.md", "benchmarks/scripts.md", {"Log": log}]},
        {"API": ["api/index.md", *(f"api/{module}.md" for module in (*api_reference.PUBLIC, *api_reference.MODULES))]},
        {"Internals": [*internals, *(page for page in OUTSIDE.values() if page.startswith("internals/"))]},
    ]
    return config


def ordered(docs: Path, folder: str, index: str) -> list[str]:
    """Pages of a folder in the order in which its index links them."""
    named = re.findall(r"\]\(([\w./-]+\.md)\)", (docs / folder / index).read_text(encoding="utf-8"))
    there = [path.relative_to(docs / folder).as_posix() for path in sorted((docs / folder).rglob("*.md"))]
    return [f"{folder}/{name}" for name in dict.fromkeys([index, *named, *there]) if name in there]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside of docs/, the API, the charts and the live widgets."""
    pages = {site: (ROOT / source).read_text(encoding="utf-8") for source, site in OUTSIDE.items()}
    try:
        pages |= {f"api/{name}": text for name, text in api_reference.pages().items()}
    except ValueError as problem:
        raise PluginError(str(problem)) from problem
    pages["benchmarks/index.md"] = site_charts.page()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    site_widgets.export(WIDGETS)
    for name in (*site_widgets.WIDGETS, *site_widgets.BROWSER):
        files.append(File.generated(config, f"gallery/live/{name}.html", abs_src_path=str(WIDGETS / f"{name}.html")))
    for path in (WASM / "engine.wasm", WASM / "model.bin", ROOT / "tests" / "data" / "demo-exl2-4.0bpw" / "tokenizer.json"):
        if not path.is_file():
            raise PluginError(f"{path} is missing; `make docs` makes it")
        files.append(File.generated(config, f"site/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/, drawings, and places where something made is put: `<!-- chart: quality -->`, `<!-- widget: plan -->`."""
    source = next((path for path, site in OUTSIDE.items() if site == page.file.src_uri), f"docs/{page.file.src_uri}")
    if source.startswith("benchmarks/log/"):
        page.meta["search"] = {"exclude": True}  # every page of the site loads the index
    text = outside_code(markdown, lambda part: LINK.sub(lambda found: relinked(found, source, page.file.src_uri), part))
    text = re.sub(r"^```mermaid\n(.*?)^```$", lambda found: drawing(found[1]), text, flags=re.M | re.S)
    text = text.replace("<!-- loop -->", LOOP)
    text = re.sub(r"<!-- chart: (\w+) -->", lambda found: site_charts.chart(found[1]), text)
    return re.sub(r"<!-- widget: (\w+) -->", lambda found: live(found[1], page.file.src_uri), text)


def outside_code(markdown: str, change: Any) -> str:
    """The text with `change` made to what is no code block."""
    parts, at = [], 0
    for block in FENCE.finditer(markdown):
        parts += [change(markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(markdown[at:])])


def relinked(found: re.Match[str], source: str, page: str) -> str:
    """A link of the document `source` for the page `page` of the site."""
    words, (target, _, anchor) = found[1], found[2].partition("#")
    if "://" in target or target.startswith("mailto:") or not target:
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    site = OUTSIDE.get(path) or FOLDERS.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if site is not None:
        link = posixpath.relpath(site, posixpath.dirname(page) or ".")
        return f"[{words}]({link}{'#' + anchor if anchor else ''})"
    return f"[{words}]({REPOSITORY}/blob/main/{path})" if REPOSITORY else words


def live(name: str, page: str) -> str:
    """A live widget in a frame; site.js tells it the page's colours and gives it its height."""
    title, words = {**site_widgets.WIDGETS, **site_widgets.BROWSER}[name]
    link = posixpath.relpath(f"gallery/live/{name}.html", posixpath.dirname(page) or ".")
    return (
        f'<iframe class="live" data-widget="{name}" src="{link}" loading="lazy" height="420" '
        f'title="{escape(title)}: {escape(words)}"></iframe>\n'
        f'<p class="live-link"><a href="{link}">{escape(title)} on a page of its own</a></p>'
    )


# ---- drawings: a flow chart of mermaid's as nested lists, which need no script and fit a telephone


def drawing(source: str) -> str:
    """Lanes, the steps of each in order, and the arrows between lanes."""
    lanes: list[tuple[str, list[str]]] = []
    label: dict[str, str] = {}
    arrows: list[tuple[str, str]] = []
    home: dict[str, int] = {}
    for line in source.splitlines():
        if lane := re.match(r'\s*subgraph \w+\["(.*?)"\]', line):
            lanes.append((lane[1], []))
        elif re.search(r"<?-->", line):
            nodes = [re.match(r'(\w+)(?:\["(.*?)"\])?$', part.strip()) for part in re.split(r"<?-->", line)]
            ids = [node[1] for node in nodes if node]
            for node in nodes:
                if node and node[2]:
                    label[node[1]] = node[2]
            if line.startswith("    "):
                for each in ids:
                    if each not in home:
                        home[each] = len(lanes) - 1
                        lanes[-1][1].append(each)
            else:
                arrows += itertools.pairwise(ids)

    def step(name: str) -> str:
        first, _, file = label.get(name, name).partition("<br/>")
        onward = "".join(f' <span class="flow-to">→ {escape(label.get(b, b).partition("<br/>")[0])}</span>' for a, b in arrows if a == name)
        return f"<li>{escape(first)}{f'<code>{escape(file)}</code>' if file else ''}{onward}</li>"

    boxes = "".join(f"<div><strong>{escape(title)}</strong><ol>{''.join(map(step, names))}</ol></div>" for title, names in lanes)
    return f'<div class="flow">{boxes}</div>'


# ---- pages as HTML


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A notebook keeps its cells alone: the plugin's page brings 600 kB of styles and a script from another host."""
    html = re.sub(r'<img ([^>]*?)-light\.png"([^>]*)>', PAIR, html)
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = FOREIGN.sub("", html)
    html = html.replace("highlight-ipynb", "highlight").replace('data-jp-theme-light="true" data-jp-theme-name="JupyterLab Light"', "")
    html = re.sub(r'<div class="jp-(?:InputPrompt|OutputPrompt)[^"]*">[^<]*</div>', "", html)
    return re.sub(r'(<div class="[^"]*highlight hl-[^"]*">)<pre>(.*?)</pre>', r"\1<pre><code>\2</code></pre>", html, flags=re.S)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The theme's search is a dialog without a name."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
