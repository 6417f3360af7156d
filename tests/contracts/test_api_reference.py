"""What the API reference is made of: every public name says what it is."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import api_reference


@pytest.mark.parametrize("module", api_reference.PUBLIC)
def test_public_names_have_docstrings(module):
    assert api_reference.undocumented(module) == []


def test_one_without_is_found(monkeypatch):
    import exl2nb

    monkeypatch.setattr(exl2nb, "plan", lambda: None)
    assert api_reference.undocumented("exl2nb") == ["exl2nb.plan"]
