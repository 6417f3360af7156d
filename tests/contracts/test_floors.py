"""Imports point down: the contract in pyproject.toml, checked by import-linter as in `make lint`."""

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]


def test_imports_point_down(monkeypatch):
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename="pyproject.toml", no_cache=True) == EXIT_STATUS_SUCCESS


def test_every_room_has_a_floor():
    listed = {room.strip() for layer in CONTRACT["layers"] for room in layer.split("|")}
    package = ROOT / "exl2nb"
    rooms = {p.parent.name for p in package.glob("*/__init__.py")} | {
        p.stem for p in package.glob("*.py") if p.stem not in ("__init__", "__main__")
    }
    assert rooms == listed
