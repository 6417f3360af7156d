"""A rank's process: `python -m exl2nb.model.rank TASK`, started by `model.parallel.load_parallel`, never by hand.

Commands come through standard input. Ends when rank 0 says so, when an exchange fails, and when the process that started it ends: its
standard input closes then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from struct import Struct


def main() -> None:
    """Load, say so, and carry out what rank 0 says."""
    task = json.loads(sys.argv[1])
    import torch
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from exl2nb.model.parallel import COMMAND_HEADER, RENDEZVOUS_HOST, START_S, Rank, RankModel, join_group, read_part
    from exl2nb.model.rope import RopeOverride

    commands: SimpleQueue[tuple[tuple[int, ...], bytes]] = SimpleQueue()
    threading.Thread(target=_receive_commands, args=(commands, COMMAND_HEADER), daemon=True).start()
    store = TCPStore(RENDEZVOUS_HOST, task["port"], is_master=False, timeout=timedelta(seconds=START_S))
    rank, size, device, code = task["rank"], task["size"], task["device"], 0
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        rope = RopeOverride(**task["rope"])
        config, network, context = read_part(task["directory"], rank, size, context=task["context"], rope=rope, device=device)
        store.set(f"loaded {rank}", "1")
        group = join_group(config, rank, size, store, device)
        model = RankModel(config, network, group, context=context, device=device, deterministic=task["deterministic"])
        with torch.inference_mode():
            Rank(model, commands.get).serve()
    except Exception as error:  # mostly that rank 0, or another rank, is gone; it says so
        with suppress(RuntimeError):
            store.set(f"failed {rank}", f"{type(error).__name__}: {error}")
        code = 1
    os._exit(code)  # noqa: TID251 - without waiting for threads of torch


def _receive_commands(commands: SimpleQueue[tuple[tuple[int, ...], bytes]], header: Struct) -> None:
    """Read commands, also while a step runs: the end of what started this process ends it in the middle of an exchange."""
    with open(0, "rb", closefd=False) as file:
        while len(head := file.read(header.size)) == header.size:
            *numbers, follows = header.unpack(head)
            commands.put((tuple(numbers), file.read(follows)))
    os._exit(0)  # noqa: TID251 - in the middle of an exchange


if __name__ == "__main__":
    main()
