"""Every Python block of the documents runs, page by page from top to bottom, on the demo model.

A block that begins with `# not run by the tests: WHY` is not run. It must compile, its names must exist, and its calls of this package must
take their arguments. Pages of clients need a server: tests/server/test_client_pages.py runs them. Notebooks are executed by
tests/notebooks, examples in docstrings by tests/contracts/test_documents.py.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import exl2nb as ex

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "exl2nb").rglob("*.md"),
        *(ROOT / "csrc").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / ".github").glob("*.md"),
        *ROOT.glob("*.md"),
    ]
)
BLOCK = re.compile(r"^([ \t]*)```(?:python|py|pycon)\b[^\n]*\n(.*?)^\1```", re.M | re.S)
SET_ASIDE = re.compile(r"\A# not run by the tests: \S.{7,}\n")
NEEDS = {"regex=": "llguidance", "with_structured_output": "llguidance"}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = [inspect.cleandoc(f"\n{body}") if indent else body for indent, body in BLOCK.findall(text)]
    assert len(found) == len(re.findall(r"^[ \t]*```(?:python|py|pycon)\b", text, re.M)), "a block is not closed"
    return found


@pytest.mark.cpu
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page.parent.name != "clients"], ids=name)
def test_blocks_run(page, llm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known = {"ex": ex, "llm": llm, "__name__": "page"}
    for block in blocks(page):
        if SET_ASIDE.match(block):
            compile(block, name(page), "exec")
            assert not unknown(block, known), name(page)
            continue
        for module in (needed for words, needed in NEEDS.items() if words in block):
            pytest.importorskip(module)
        for module in imported(block):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed")
        exec(compile(block, name(page), "exec"), known)


def test_there_are_many():
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 30
    assert sum(bool(SET_ASIDE.match(block)) for block in found) < len(found) / 3


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_python_hides_in_an_indented_block(page):
    """Only blocks with a fence are run, so code that is Python must have one. Shell commands do not parse, or are bare words.

    Cells with magics are no Python; tests/contracts/test_links.py runs the one that the guide shows.
    """
    text = re.sub(r"^([ \t]*)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    hidden = []
    runs = re.findall(r"^\n((?:^ {4}(?![-*] |\d+\. ).*\n|^\n(?= {4}))+)", text, re.M)
    for block in (part for run in runs if "    %" not in run for part in run.split("\n\n")):
        try:
            tree = ast.parse(inspect.cleandoc(f"\n{block}"))
        except SyntaxError:
            continue
        if any(isinstance(node, (ast.Call, ast.Import, ast.ImportFrom)) for node in ast.walk(tree)):
            hidden.append(block)
    assert not hidden


def imported(block: str) -> set[str]:
    """Top-level names of the packages that a block imports."""
    found = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - {"exllamav2"}  # exl2nb puts it there


def unknown(block: str, known: dict) -> list[str]:
    """Names below `ex`, `llm` and exl2nb that do not exist, and calls of them whose arguments do not fit."""
    wrong = []
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "exl2nb":
            module = importlib.import_module(node.module)
            wrong += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
        elif isinstance(node, (ast.Attribute, ast.Call)):
            dotted = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            first, *rest = dotted.split(".")
            if first not in ("ex", "llm") or not all(part.isidentifier() for part in rest):
                continue
            value = known[first]
            for part in rest:
                value = getattr(value, part, wrong)
            if value is wrong:
                wrong.append(dotted)
            elif isinstance(node, ast.Call):
                try:
                    inspect.signature(value).bind(*node.args, **{each.arg: None for each in node.keywords if each.arg})
                except TypeError as problem:
                    wrong.append(f"{dotted}: {problem}")
    return wrong


def test_what_is_set_aside_is_checked(llm):
    known = {"ex": ex, "llm": llm}
    assert unknown("ex.load('a', context=1)\nllm.generate('a')", known) == []
    assert unknown("ex.lode('a')", known)[0] == "ex.lode"
    assert "colour" in unknown("ex.inspect('a', colour=1)", known)[0]
    assert unknown("from exl2nb.sampling import Nothing", known) == ["exl2nb.sampling.Nothing"]
