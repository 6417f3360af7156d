"""Imports point down, without circles: the contract in pyproject.toml, checked by import-linter as in `make lint`, and modules by grimp."""

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
    rooms = {p.parent.name for p in package.glob("*/__init__.py")} | {p.stem for p in package.glob("*.py") if p.stem != "__init__"}
    assert rooms == listed


def test_no_import_circles():
    """Between modules, imports inside functions included. `LLM.load` and `LLM.serve` reach up by one lazy import each."""
    graph = pytest.importorskip("grimp").build_graph("exl2nb", exclude_type_checking_imports=True, cache_dir=None)
    for above in ("llm.load", "server.http_server"):
        graph.remove_import(importer="exl2nb.llm.llm", imported=f"exl2nb.{above}")
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while outside := [m for m, imported in left.items() if not imported & left.keys() or not any(m in other for other in left.values())]:
        for module in outside:
            del left[module]
    circles = {module: sorted(imported & left.keys()) for module, imported in left.items()}
    assert not circles
