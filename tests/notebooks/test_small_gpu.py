"""tools/small_gpu.py, which executes the course on a GPU that it fills first: what of it needs no GPU."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import small_gpu  # noqa: E402 - the line above finds it


def test_notebook_08_takes_a_model_from_a_folder(tmp_path):
    import nbformat

    book = nbformat.read(ROOT / "notebooks" / "08_colab.ipynb", as_version=4)
    small_gpu.without_download(book, tmp_path / "mine")
    code = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code" and not cell.source.startswith("#"))
    assert f"model = {str(tmp_path / 'mine')!r}\n" in code and "bitrates, context = [None], 8192" in code
    with pytest.raises(ValueError, match="change SUBSTITUTES"):
        small_gpu.without_download(book, tmp_path)


def test_a_notebook_that_fails_is_a_row(tmp_path, monkeypatch):
    import nbformat

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [nbformat.v4.new_code_cell(source) for source in ("x = 1", "raise MemoryError('full\\nof it')", "never")]
    path = tmp_path / "01_fails.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    left = iter([10 * 2**30, 10 * 2**30, 7 * 2**30])
    row = small_gpu.run(path, tmp_path, free=lambda: next(left, 9 * 2**30))
    assert (row.name, row.error) == ("01_fails", "MemoryError: full\nof it")
    assert row.gpu_gib == 3
    assert small_gpu.table([row]).splitlines()[1].endswith("  MemoryError: full of it")
