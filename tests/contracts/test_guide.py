"""docs/guide: the Python blocks of every page run from top to bottom, and links lead somewhere."""

import re
from pathlib import Path

import pytest

import exl2nb as ex

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
DOCUMENTS = [*GUIDE, *(ROOT / "docs" / "internals").glob("*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").rglob("*.md")]


@pytest.mark.cpu
@pytest.mark.parametrize("page", [page for page in GUIDE if page.stem != "README"], ids=lambda page: page.stem)
def test_examples_run(page, llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"ex": ex, "llm": llm}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        if "regex=" in block:
            pytest.importorskip("llguidance")
        exec(block, known)


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "guide" / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in GUIDE if page.stem != "README" and f"({page.name})" not in index]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    assert not [link for link in links if link and not (page.parent / link).exists()]
