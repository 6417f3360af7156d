"""docs/internals/generator.md: each item has a public name that exists, an example that runs, and a test that is there."""

import asyncio
import importlib
import re
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.sampling import explain

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs" / "internals" / "generator.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [EGHIJK]\d+ ", line)
]
ITEMS = {"E": 13, "G": 22, "H": 9, "I": 22, "J": 7, "K": 6}


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


def test_every_item_is_told():
    page = (ROOT / "docs" / "internals" / "generator.md").read_text(encoding="utf-8")
    missing = [f"{group}{n}" for group, count in ITEMS.items() for n in range(1, count + 1) if not re.search(rf"\b{group}{n}\b", page)]
    assert not missing


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_names_and_tests_exist(row):
    _, name, example, test = row
    assert resolve(code(name)) is not None, name
    file, function = code(test).split("::")
    assert re.search(rf"def {function}\b", (ROOT / file).read_text(encoding="utf-8")), test
    if code(example) is None:
        number = example.removeprefix("notebook ")
        assert list((ROOT / "notebooks").glob(f"{number}_*.ipynb")), example


@pytest.mark.cpu
def test_the_examples_run(llm, tmp_path):
    pytest.importorskip("llguidance")
    ids = llm.tokenizer.encode("It was")
    known = {"llm": llm, "ex": ex, "ids": ids, "folder": tmp_path, "asyncio": asyncio, "explain": explain}
    known["row"] = llm.generate("It was", max_tokens=1, return_logits=True).logits[0]
    for item, _, example, _ in ROWS:
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
