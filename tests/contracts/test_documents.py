"""What README, guide, docstrings and the table of generator features say is what happens: examples run, links and names exist."""

import asyncio
import doctest
import importlib
import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.cli.commands import COMMANDS
from exl2nb.sampling import explain

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
GENERATOR = (ROOT / "docs" / "internals" / "generator.md").read_text(encoding="utf-8")
FEATURES = [
    [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in GENERATOR.splitlines()
    if re.match(r"\| [EGHIJK]\d+ ", line)
]
COUNTS = {"E": 13, "G": 22, "H": 9, "I": 22, "J": 7, "K": 6}
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
    assert {"convert", "generate", "chat", "eval", "inspect", "logits", "doctor"} <= named <= set(COMMANDS)
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
    assert len(forms) == 3
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


# ---- docs/internals/generator.md: each item has a public name that exists, an example that runs, and a test that exists.


def code(cell):
    return cell[1:-1] if cell.startswith("`") else None


def resolve(name):
    """The object of a dotted name: modules first, then attributes and annotations of what they hold."""
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for part in parts[at:]:
            found = getattr(found, part, None) or ("field" if part in getattr(found, "__annotations__", {}) else None)
        return found
    return None


def test_every_feature_has_a_row():
    missing = [
        f"{group}{n}" for group, count in COUNTS.items() for n in range(1, count + 1) if not re.search(rf"\b{group}{n}\b", GENERATOR)
    ]
    assert not missing


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0])
def test_names_and_tests_exist(row):
    _, name, example, test = row
    assert resolve(code(name)) is not None, name
    file, function = code(test).split("::")
    assert re.search(rf"def {function}\b", (ROOT / file).read_text(encoding="utf-8")), test
    if code(example) is None:
        number = example.removeprefix("notebook ")
        assert list((ROOT / "notebooks").glob(f"{number}_*.ipynb")), example


@pytest.mark.cpu
def test_feature_examples_run(llm, tmp_path):
    pytest.importorskip("llguidance")
    ids = llm.tokenizer.encode("It was")
    known = {"llm": llm, "ex": ex, "ids": ids, "folder": tmp_path, "asyncio": asyncio, "explain": explain}
    known["row"] = llm.generate("It was", max_tokens=1, return_logits=True).logits[0]
    for item, _, example, _ in FEATURES:
        *first, last = (code(example) or "None").split("; ")
        for statement in first:
            exec(statement, known)
        try:
            value = eval(last, known)
        except Exception as error:
            raise AssertionError(f"{item}: {last}") from error
        assert value is not False, (item, last)
        if value is not None and hasattr(value, "close") and value is not llm:
            value.close()
