"""What a notebook's kernel takes at its worst moment: resident memory, against the 1 GB that Binder guarantees.

python tools/notebook_memory.py notebooks/01_quickstart.ipynb
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT_BYTES = 10**9


def execute(book: Any, folder: Path, *, timeout_s: int = 900) -> int:
    """Run a notebook in `folder`, without widget state; returns the kernel's peak resident bytes (0 where the system does not tell).

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    from nbclient import NotebookClient

    peaks: list[int] = []
    client = NotebookClient(book, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}, store_widget_state=False)
    client.on_cell_complete = lambda cell, cell_index: peaks.append(peak_bytes(client.km.provisioner.pid))
    client.execute()
    return max(peaks, default=0)


def peak_bytes(pid: int) -> int:
    """Most memory that a process has had resident."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def main() -> int:
    """Exit code 1 where one takes more than the limit."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    worst = 0
    for path in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as folder:
            peak = execute(nbformat.read(path, as_version=4), Path(folder))
        print(f"{path.name}: {peak / 1e6:.0f} MB resident at most")
        worst = max(worst, peak)
    return int(worst > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
