"""What a notebook's kernel takes: resident memory at its worst moment, against the 1 GB that Binder guarantees, and processor time.

python tools/notebook_memory.py notebooks/01_quickstart.ipynb
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_BYTES = 10**9


class Cost(NamedTuple):
    """Of one run: the kernel's peak resident bytes, and the processor seconds of all its threads; 0 where the system does not tell."""

    peak_bytes: int
    cpu_s: float


def execute(book: Any, folder: Path, *, timeout_s: int = 900) -> Cost:
    """Run a notebook in `folder`, without widget state.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    from nbclient import NotebookClient

    peaks: list[int] = []
    spent: list[float] = []
    client = NotebookClient(book, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}, store_widget_state=False)

    def look(cell: Any, cell_index: int) -> None:
        peaks.append(peak_bytes(client.km.provisioner.pid))
        spent.append(cpu_seconds(client.km.provisioner.pid))

    client.on_cell_complete = look
    client.execute()
    return Cost(max(peaks, default=0), max(spent, default=0.0))


def peak_bytes(pid: int) -> int:
    """Most memory that a process has had resident."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had, in all its threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Exit code 1 where one takes more than the limit."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    worst = 0
    for path in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as folder:
            cost = execute(nbformat.read(path, as_version=4), Path(folder))
        print(f"{path.name}: {cost.peak_bytes / 1e6:.0f} MB resident at most, {cost.cpu_s:.1f} s of processor time")
        worst = max(worst, cost.peak_bytes)
    return int(worst > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
