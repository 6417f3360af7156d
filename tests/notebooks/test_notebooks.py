"""Every notebook: committed without outputs, runs from top to bottom without a screen, and reads well where there is no kernel."""

import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import notebook_memory

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


# The cheapest one. .ci/run runs the others, with everything else that is slow in a browser or a kernel.
FIRST = ("07_speculation_and_batching",)


def ids(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_committed_without_outputs(path):
    import nbformat

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "strip the outputs (nbstripout)"
    assert "widgets" not in book.metadata
    assert not re.search(r"/(home|root|tmp)/", path.read_text()), "a path of somebody's machine"


@pytest.mark.timeout(1800)  # minutes on a machine of its own; this only ends what hangs
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[] if path.stem in FIRST else [pytest.mark.slow]) for path in NOTEBOOKS], ids=ids
)
def test_runs_headless_and_reads_without_a_kernel(path, tmp_path, monkeypatch):
    import nbformat
    from nbconvert import HTMLExporter

    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "2"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    book = nbformat.read(path, as_version=4)
    peak = notebook_memory.execute(book, tmp_path).peak_bytes  # a cell that raises ends it here, with the traceback
    limit = notebook_memory.LIMIT_BYTES * (1 if path.stem == "01_quickstart" else 1.8)  # Binder guarantees 1 GB, and ends what takes 2
    assert peak < limit, f"{peak / 1e6:.0f} MB resident; expected less than {limit / 1e6:.0f}"
    streams = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs if output.output_type == "stream"]
    assert all(output.name == "stdout" for output in streams), [output.text for output in streams if output.name != "stdout"]
    page, _ = HTMLExporter().from_notebook_node(book)
    if path.stem in CHECKS:
        CHECKS[path.stem](book, page)


def outputs(book) -> str:
    return "\n".join(str(output) for cell in book.cells if cell.cell_type == "code" for output in cell.outputs)


def check_caches(book, page: str) -> None:
    assert re.search(r"CacheExplorer\(done: fp16 KL 0, q8 KL", outputs(book))
    assert "bytes per token" in page and "not in the text" in page, "the static page has no texts or no needle"
    assert "FP16 gives “Margaret”" in outputs(book)


def check_colab(book, page: str) -> None:
    text = outputs(book)
    assert "### exl2nb" in text and "decode tok/s" in text, "the report is missing"
    assert re.search(r"CacheExplorer\(done: fp16 KL 0, q8 KL", text) and "eight together" in text
    assert re.search(r"Comparison\(4bpw \| demo_model: kl_mean=0\.[0-2]", text), "4 bits cost more than they should, or were not measured"
    assert "4711" in text or "No GPU: the cells below run the packaged model" in text


def check_quickstart(book, page: str) -> None:
    text = "\n".join(str(output) for cell in book.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "top-1" in text
    assert re.search(r"Playground\(done, 120 tokens", text), "the playground did not run to its end"
    assert re.search(r'class="exl2nb-static".*?the old man</span><span', page, re.S), "the generated text is missing in the static page"
    assert "convert to 3 bpw: done" in page, "the progress line is missing in the static page"
    assert "Error displaying widget" not in page


def check_sampling(book, page: str) -> None:
    text = "\n".join(str(output) for cell in book.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "the same token at 24 of 24 positions" in text
    assert re.search(r"SamplerMicroscope\(token 6 of 24", text)
    assert "Error displaying widget" not in page


CHECKS = {
    "01_quickstart": check_quickstart,
    "05_cache_quantisation": check_caches,
    "06_sampling_microscope": check_sampling,
    "08_colab": check_colab,
}
