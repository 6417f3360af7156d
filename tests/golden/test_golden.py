"""The public surface is what the golden files say."""

import difflib
import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("golden_make", Path(__file__).with_name("make.py"))
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
NEEDS = {"openapi.txt": ("fastapi", "llguidance"), "signatures.txt": ("ipywidgets", "anywidget")}


@pytest.mark.parametrize("name", make.FILES)
def test_the_public_surface_has_not_changed(name, monkeypatch):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    if name == "help.txt" and sys.version_info >= (3, 13):
        pytest.skip("argparse of Python 3.13 breaks lines at other places")
    monkeypatch.setenv("COLUMNS", str(make.HELP_COLUMNS))
    kept = (make.HERE / name).read_text(encoding="utf-8").splitlines()
    diff = list(difflib.unified_diff(kept, make.FILES[name]().splitlines(), f"tests/golden/{name}", "now", lineterm="", n=0))
    assert not diff, "the public surface changed; if that is meant, run `python tests/golden/make.py` and commit\n" + "\n".join(diff[:60])
