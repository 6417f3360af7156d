"""The course on a GPU of 16 GB: fills a larger one until as much is free as on a T4, and executes every notebook in the rest.

    PYTHONPATH=build/lab python tools/small_gpu.py               # all notebooks; ends in a table, exit code 1 if one failed
    PYTHONPATH=build/lab python tools/small_gpu.py 01 08 --gib 10

This process holds the memory that shall not be there. So the cap holds for everything: torch's allocator, CUDA contexts, loaded kernels and
captured graphs, and what the driver reports as free. (`torch.cuda.set_per_process_memory_fraction` would bind the allocator alone, and
`ex.plan` would still see the whole card.) Notebook 08 gets random weights at the shape of Llama-3-8B in the place of a download.

Needs nbclient, ipykernel, ipywidgets and anywidget; notebook 10 also openai and exl2nb[server]. For a machine without them and without a
package index, make a folder to take along:

    python -m pip install --target build/lab --python-version 3.12 --only-binary=:all: nbclient ipykernel ipywidgets anywidget
    rm -r build/lab/jedi* build/lab/debugpy*    # half of its 123 MB, and not needed for this
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FREE_GIB = 14.6  # on a T4 of 16 GB, before any program uses it
SUBSTITUTES = (
    (r'"turboderp/Llama-3\.1-8B-Instruct-exl2"\n', "{folder!r}\n"),
    (r'\["3\.0bpw".*?\]', "[None]"),
    (r'"sentences": 200', '"sentences": 100'),  # a token for every byte
)
"""In notebook 08: pattern, replacement."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of one notebook. error: empty where every cell ran. gpu_gib: most memory of the GPU that was in use. host_mb: of its kernel."""

    name: str
    error: str
    seconds: float
    gpu_gib: float
    host_mb: float


@contextmanager
def filled(free_gib: float) -> Iterator[None]:
    """Hold all memory of the GPU but `free_gib`.

    Raises:
        RuntimeError: there is less than that.
    """
    import torch

    torch.zeros(1, device="cuda")  # this process's own context is not the notebooks'
    free = torch.cuda.mem_get_info()[0]
    surplus = free - int(free_gib * 2**30)
    if surplus < 0:
        raise RuntimeError(f"{free / 2**30:.1f} GiB of the GPU are free; expected at least {free_gib}: give a smaller --gib")
    held = torch.empty(surplus, dtype=torch.uint8, device="cuda")
    name, left = torch.cuda.get_device_name(), free_bytes() / 2**30
    print(f"{name}: {held.numel() / 2**30:.1f} GiB are held, {left:.1f} GiB are left for the notebooks", flush=True)
    yield
    del held
    torch.cuda.empty_cache()


def free_bytes() -> int:
    """Of the GPU."""
    import torch

    return torch.cuda.mem_get_info()[0]


@contextmanager
def watched(free: Callable[[], int]) -> Iterator[Callable[[], float]]:
    """Gives a function that tells the most GiB in use so far; looks every 20 ms."""
    before, least, end = free(), [free()], threading.Event()

    def look() -> None:
        while not end.wait(0.02):
            least[0] = min(least[0], free())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: (before - least[0]) / 2**30
    finally:
        end.set()
        thread.join()


def random_model(folder: Path) -> None:
    """An EXL2 model of random weights, with a chat template."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import make_random_model

    make_random_model.make(make_random_model.SHAPES["llama3-8b"], folder, bpw=4.0, seed=0)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    path.write_text(json.dumps(settings), encoding="utf-8")


def without_download(book: Any, folder: Path) -> None:
    """Give notebook 08 the model in `folder`.

    Raises:
        ValueError: the notebook has changed, so that there is nothing to replace.
    """
    for pattern, text in SUBSTITUTES:
        found = 0
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.source, count = re.subn(pattern, lambda _, text=text: text.format(folder=str(folder)), cell.source)
                found += count
        if found != 1:
            raise ValueError(f"notebook 08 has {found} places for {pattern}; expected one: change SUBSTITUTES")


def run(path: Path, folder: Path, *, model: Path | None = None, free: Callable[[], int] = free_bytes) -> Row:
    """Execute one notebook in `folder`; what a cell raises ends it and is the row's error."""
    import nbformat
    from nbclient.exceptions import CellExecutionError, DeadKernelError
    from notebook_memory import execute

    book = nbformat.read(path, as_version=4)
    if model is not None:
        without_download(book, model)
    error, host_mb, start = "", 0.0, time.monotonic()
    with watched(free) as most:
        try:
            host_mb = execute(book, folder, timeout_s=1800).peak_bytes / 1e6
        except CellExecutionError as failed:
            error = f"{failed.ename}: {failed.evalue}"
        except DeadKernelError as failed:
            error = str(failed)
        gpu_gib = most()
    return Row(name=path.stem, error=error, seconds=time.monotonic() - start, gpu_gib=gpu_gib, host_mb=host_mb)


def table(rows: list[Row]) -> str:
    """For a terminal, errors at the end of their lines."""
    lines = [f"{'notebook':<30} {'seconds':>8} {'GPU GiB':>8} {'host MB':>8}  result"]
    for row in rows:
        result = " ".join(row.error.split())[:200] or "ok"
        lines.append(f"{row.name:<30} {row.seconds:>8.1f} {row.gpu_gib:>8.2f} {row.host_mb:>8.0f}  {result}")
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names; none means all")
    parser.add_argument("--gib", type=float, default=FREE_GIB, help=f"memory that is left free (default {FREE_GIB})")
    args = parser.parse_args()
    from links import notebooks

    books = [path for path in notebooks() if not args.names or path.name.startswith(tuple(args.names))]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "random-8b"
        if any(path.name.startswith("08") for path in books):
            print("random weights at the shape of Llama-3-8B", flush=True)
            random_model(model)
        with filled(args.gib):
            for path in books:
                folder = Path(scratch) / path.stem
                folder.mkdir()
                os.environ["IPYTHONDIR"] = str(folder / "ipython")
                rows.append(run(path, folder, model=model if path.name.startswith("08") else None))
                print(table(rows[-1:]).splitlines()[1], flush=True)
    print(f"\nwith {args.gib} GiB\n{table(rows)}")
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main())
