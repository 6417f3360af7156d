"""Every example in a docstring runs, and says what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

import exl2nb

ROOT = Path(exl2nb.__file__).parent
WITH_EXAMPLES = sorted(path for path in ROOT.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
NAMES = [".".join(("exl2nb", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__") for path in WITH_EXAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    examples = [example for test in doctest.DocTestFinder().find(module, name) for example in test.examples]
    assert examples
    assert not doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed
