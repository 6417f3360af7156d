"""The built site: links, anchors, other hosts, accessibility, size, live widgets, search. `make docs` builds what is looked at."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import expect

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
sys.path.insert(0, str(ROOT / "tests" / "ui"))
from mock_host import violations  # noqa: E402 - the line above finds it

pytestmark = pytest.mark.slow
MOST_BYTES = 1_500_000
LOOKED_AT = [
    "index.html", "guide/server.html", "guide/migrate.html", "gallery/index.html", "gallery/widgets.html", "gallery/browser.html",
    "gallery/01_quickstart.html", "gallery/06_sampling_microscope.html", "benchmarks/index.html", "api/index.html", "api/exl2nb.html",
    "internals/architecture.html",
]  # fmt: skip


class Page(HTMLParser):
    """Ids, links and addresses of what a page loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        text = path.read_text(encoding="utf-8")
        self.feed(text)
        self.loads += re.findall(r"url\((?:&quot;|[\"'])?(https?:[^)\"']+)", text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key) and not (key == "name" and tag != "a")}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        for key in ("src", "srcset", "poster", "data") + (("href",) if tag in ("link", "use", "image") else ()):
            if values.get(key):
                self.loads.append(values[key])


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html")) if "live" not in path.parts}


def test_every_link_and_anchor_leads_somewhere(site, pages):
    assert len(pages) > 50
    wrong, checked = [], 0
    for name, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            checked += 1
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append((name, link))
                continue
            other = pages.get(target.resolve().relative_to(site.resolve()).as_posix())
            if parts.fragment and other and unquote(parts.fragment) not in other.ids:
                wrong.append((name, link))
    assert checked > 1000 and not wrong


def test_nothing_is_loaded_from_other_hosts(site, pages):
    assert not [(name, load) for name, page in pages.items() for load in page.loads if load.startswith(("http:", "https:", "//"))]
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_axe_finds_nothing(opened, address, theme, width):
    found = {}
    for name in LOOKED_AT:
        page = opened(f"{address}/{name}", theme, width)
        page.wait_for_timeout(400)
        if wrong := violations(page, "body"):
            found[name] = wrong
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the window"
        page.context.close()
    assert not found


def test_the_landing_page_is_small_and_its_loop_plays(opened, address):
    page = opened("about:blank")
    sizes = {}
    page.on("response", lambda response: sizes.setdefault(response.url, response))
    page.goto(f"{address}/index.html", wait_until="networkidle")
    page.wait_for_function("() => [...document.querySelectorAll('.loop video')].some((v) => v.currentTime > 0.5 && !v.paused)")
    assert page.evaluate("() => document.querySelector('.loop video.light').duration") <= 15
    page.locator("iframe.live").scroll_into_view_if_needed()
    page.wait_for_timeout(1000)
    files = {urlsplit(url).path for url in sizes if url.startswith(address)}
    total = sum((SITE / path.strip("/")).stat().st_size for path in files if (SITE / path.strip("/")).is_file())
    assert any(path.endswith(".webm") for path in files) and any("live/explorer" in path for path in files)
    assert total < MOST_BYTES, {path: (SITE / path.strip("/")).stat().st_size for path in files}


@pytest.mark.parametrize("place", ["server", "folder"])
def test_sliders_move_without_a_kernel(opened, address, site, place):
    base = address if place == "server" else site.as_uri()
    page = opened(f"{base}/gallery/widgets.html")
    frame = page.locator("iframe[data-widget=explorer]")
    frame.scroll_into_view_if_needed()
    inside = frame.content_frame
    slider = inside.get_by_role("slider", name="Bits per weight")
    figures = inside.locator(".exl2nb-figures")
    before = figures.inner_text()
    assert "predicted KL" in before
    slider.fill("6")
    expect(figures).not_to_have_text(before, timeout=10_000)
    plan = page.locator("iframe[data-widget=plan]")
    plan.scroll_into_view_if_needed()
    page.wait_for_function("() => ![0, 420].includes(document.querySelector('iframe[data-widget=plan]').offsetHeight)", timeout=10_000)
    if place == "server":
        page.locator("label[for=__palette_1]").first.click()
        expect(inside.locator("html")).to_have_css("color-scheme", "dark", timeout=10_000)


@pytest.mark.parametrize("place", ["server", "folder"])
def test_the_search_finds(opened, address, site, place):
    page = opened(f"{address if place == 'server' else site.as_uri()}/guide/index.html")
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("speculation")
    page.locator(".md-search-result__item").first.wait_for()
    links = page.locator(".md-search-result__link").evaluate_all("(all) => all.map((a) => a.href)")
    assert any("generate.html" in link or "widgets.html" in link or "generator.html" in link for link in links)
