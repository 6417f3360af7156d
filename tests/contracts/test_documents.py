"""What README, guide and docstrings say is what happens: examples run, links and names exist."""

import doctest
import importlib
import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.cli.commands import COMMAND_HELP

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import api_reference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))  # their Python blocks: tests/site/test_code.py
CLIENTS = sorted((ROOT / "docs" / "guide" / "clients").glob("*.md"))  # their examples need a server: tests/server/test_client_pages.py
DOCUMENTS = [
    *GUIDE,
    *CLIENTS,
    *(ROOT / "docs" / "internals").glob("*.md"),
    *(ROOT / "docs" / "gallery").glob("*.md"),
    ROOT / "docs" / "index.md",
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / ".github").glob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "exl2nb").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    assert not [link for link in links if link and not (page.parent / link).exists()]
    assert links or page.name != "README.md"


def test_every_limit_has_its_test():
    """SECURITY.md names a test for each; `::name` is in the file named before it."""
    rows = (ROOT / ".github" / "SECURITY.md").read_text(encoding="utf-8")
    found, path = [], None
    for file, name in re.findall(r"`((?:tests/[\w/]+\.py)?)(?:::(\w+))?`", rows):
        path = ROOT / file if file else path
        if file or name:
            found.append((path, name))
    assert len(found) > 25
    assert not [f"{path}::{name}" for path, name in found if not path.is_file() or (name and f"def {name}(" not in path.read_text())]


# ---- README


def test_readme_example_prints_its_output():
    code, output = re.search(r"```python\n(.*?)```\n+```\n(.*?)```", README, re.S).groups()
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().strip() == output.strip()


def test_readme_names_commands_and_targets_that_exist():
    named = set(re.findall(r"`(?:exl2nb )?(convert|generate|chat|eval|inspect|logits|doctor|demo)\b", README))
    assert {"convert", "generate", "chat", "eval", "inspect", "logits", "doctor"} <= named <= set(COMMAND_HELP)
    targets = set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.M)]


def test_every_benchmark_is_described():
    described = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = [p.relative_to(ROOT / "benchmarks").as_posix() for p in (ROOT / "benchmarks").rglob("*") if p.suffix in (".py", ".cu")]
    assert len(scripts) > 10
    assert not [script for script in scripts if f"`{script}" not in described]


def test_forms_of_issues_are_whole():
    """GitHub drops a form that breaks its rules, and says so only in its web page."""
    yaml = pytest.importorskip("yaml")
    forms = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))]
    forms = [form for form in forms if "body" in form]
    assert forms
    for form in forms:
        assert form.keys() == {"name", "description", "labels", "body"}
        ids = [part["id"] for part in form["body"]]
        assert len(set(ids)) == len(ids) and any(part.get("validations", {}).get("required") for part in form["body"])
        assert {part["type"] for part in form["body"]} <= {"textarea", "input"}
        assert all(part["attributes"]["label"] for part in form["body"])


def test_pages_name_files_that_exist():
    """Paths in backticks in the security policy and in NOTICE."""
    texts = [(ROOT / ".github" / "SECURITY.md").read_text(encoding="utf-8"), (ROOT / "NOTICE").read_text(encoding="utf-8")]
    named = [path.rstrip(".,:") for text in texts for path in re.findall(r"(?<!/)\b(?:exl2nb|csrc|widgets)/[\w./-]+", text)]
    assert len(named) > 4
    assert not [path for path in named if not (ROOT / path).exists()]


# ---- docs/guide


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "guide" / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in GUIDE if page.stem != "README" and f"({page.name})" not in index]
    clients = (ROOT / "docs" / "guide" / "server.md").read_text(encoding="utf-8")
    assert CLIENTS and not [page.name for page in CLIENTS if f"(clients/{page.name})" not in clients]


# ---- Docstrings


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    assert any(test.examples for test in doctest.DocTestFinder().find(module, name))
    assert not doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed


@pytest.mark.parametrize("module", api_reference.PUBLIC)
def test_public_names_have_docstrings(module):
    assert api_reference.undocumented(module) == []


def test_a_name_without_docstring_is_found(monkeypatch):
    monkeypatch.setattr(ex, "plan", lambda: None)
    assert api_reference.undocumented("exl2nb") == ["exl2nb.plan"]
