"""Tests look at results and official views: they do not read private attributes of the package or replace them."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OPEN = {"generator", "model"}
"""Folders that still read private attributes. Take them out as they are done."""
FOREIGN = {
    "_repr_html_", "_repr_mimebundle_", "_ipython_display_",  # what IPython calls
    "_replace", "_asdict", "_fields",  # of named tuples
    "_actions", "_obj",  # of argparse and ctypes
    "_cdata", "_schema",  # of torch's storages and ops
    "_reply_subshell_for",  # of ipykernel's comms
}  # fmt: skip
SUSPECT = re.compile(r"(?<!\bself)(?<!\bcls)\._[A-Za-z]|attr\(")
"""What a text holds that may read a private attribute: to parse all of them takes seconds."""
READERS = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in FOREIGN


def private_reads(text: str) -> list[str]:
    """Lines that read or replace a private attribute of anything but self, cls and torch."""
    found = []
    if not SUSPECT.search(text):
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            whole = ast.unparse(node)
            if whole.split(".")[0] not in ("self", "cls", "torch"):
                found.append(f"{node.lineno}: {whole}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in READERS:
            texts = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if any(is_private(text.split(".")[-1]) for text in texts):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def files() -> list[Path]:
    paths = (path.relative_to(TESTS) for path in sorted(TESTS.rglob("*.py")))
    return [path for path in paths if path.parts[0] not in OPEN]


def test_no_test_reads_what_is_private():
    found = [f"{path}:{line}" for path in files() for line in private_reads((TESTS / path).read_text(encoding="utf-8"))]
    assert not found, "private attributes are read; give the code an official view:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("engine._executor.run()", 1),
        ("f()._graphs[0]", 1),
        ("monkeypatch.setattr(module, '_parse', print)", 1),
        ("monkeypatch.setattr('exl2nb.io.reader._parse', print)", 1),
        ("getattr(engine, '_executor', None)", 1),
        ("self._own, cls._kinds, torch._C.size, x.__dict__, row._replace(a=1), widget._repr_html_()", 0),
        ("getattr(engine, '__doc__'), setattr(module, 'parse', '_x')", 0),
    ],
)
def test_private_reads_are_found(text, count):
    assert len(private_reads(text)) == count
