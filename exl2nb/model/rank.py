"""A rank's process: `python -m exl2nb.model.rank TASK`, started by `model.parallel.load_parallel`, never by hand.

Ends when rank 0 says so, when an exchange fails, and when the process that started it ends: its standard input closes then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta


def main() -> None:
    """Load, say so, and carry out what rank 0 says."""
    task = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from exl2nb.model.parallel import HOST, START_S, Group, Rank, RankModel, read_part
    from exl2nb.model.rope import RopeOverride

    store = TCPStore(HOST, task["port"], is_master=False, timeout=timedelta(seconds=START_S))
    rank, size, code = task["rank"], task["size"], 0
    try:
        rope = RopeOverride(**task["rope"])
        config, network, context = read_part(task["directory"], rank, size, context=task["context"], rope=rope)
        store.set(f"loaded {rank}", "1")
        Rank(RankModel(config, network, Group(rank, size, store), context=context)).serve()
    except Exception as error:  # mostly that rank 0, or another rank, is gone; it says so
        with suppress(RuntimeError):
            store.set(f"failed {rank}", f"{type(error).__name__}: {error}")
        code = 1
    os._exit(code)  # noqa: TID251 - without waiting for threads of torch


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)  # noqa: TID251 - in the middle of an exchange


if __name__ == "__main__":
    main()
