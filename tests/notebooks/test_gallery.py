"""The executed copies in docs/gallery/ are those of today's notebooks, and carry nothing that needs a kernel. Structure, not bytes."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gallery  # noqa: E402 - the line above finds it

COURSE = gallery.notebooks()


def cells(path: Path) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_the_copy_is_this_notebook_executed(path):
    copy = gallery.GALLERY / path.name
    assert copy.is_file(), f"run python tools/gallery.py build {path.name[:2]}"
    assert cells(copy) == cells(path), f"older than its notebook: run python tools/gallery.py build {path.name[:2]}"
    book = json.loads(copy.read_text(encoding="utf-8"))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] is not None for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert all(cell["outputs"] == gallery.joined(cell["outputs"]) for cell in code), "text in pieces reads as a line for each"
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(gallery.LIVE not in output.get("data", {}) for output in outputs), "widgets need a kernel; their twins do not"
    assert "widgets" not in book["metadata"]
    assert "<script" not in json.dumps([output.get("data", {}).get("text/html", "") for output in outputs])
    assert copy.stat().st_size < gallery.MOST_BYTES


def test_the_index_names_all():
    assert (gallery.GALLERY / "README.md").read_text(encoding="utf-8") == gallery.index(), "run python tools/gallery.py index"
