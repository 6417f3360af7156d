"""Decode on several GPUs of one machine, layers split over them and tensor parallel, beside one GPU and beside the floor.

    python benchmarks/many_gpus.py --out many.jsonl                           # all that this machine's GPUs allow
    python benchmarks/many_gpus.py --out many.jsonl --shapes llama2-70b:2.55 --gpus 1 2 4 --batches 1 8 64 --contexts 1024 32000
    python benchmarks/many_gpus.py --out many.jsonl --cpu --shapes demo:4.0   # without a GPU: does it run

Each part is a process with a time limit; a line of JSON is written after every measurement, so what is done stays done when a part fails.
The floor of a step: bytes that a rank reads over the bandwidth measured here, plus the exchanges of a step times the latency measured here
(parts one after the other for a split by layers). Random weights at real shapes (make_random_model.py); they stay in --models.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from devices import bandwidth
from make_random_model import SHAPES, make

import exl2nb as ex
from exl2nb.core.errors import GenerationError

EXCHANGES = 200  # of a captured run


def directory(root: Path, name: str) -> Path:
    """Of a model SHAPE:BPW or SHAPE/LAYERS:BPW, made once."""
    named, _, bpw = name.partition(":")
    kind, _, layers = named.partition("/")
    shape = replace(SHAPES[kind], num_hidden_layers=int(layers)) if layers else SHAPES[kind]
    path = root / f"{named.replace('/', '-')}-{bpw}"
    if not (path / "config.json").exists():
        make(shape, path, bpw=float(bpw))
    return path


def options_of(way: str, gpus: int, cpu: bool) -> dict[str, Any]:
    devices = ["cpu"] * gpus if cpu else [f"cuda:{i}" for i in range(gpus)]
    if gpus == 1:
        return {"device": devices[0]}
    return {"devices": devices, "parallel": "tensor" if way == "tensor" else "layers"}


def decode(task: dict[str, Any], write: Any) -> None:
    """Tokens a second and milliseconds a step for every context and batch."""
    path = directory(Path(task["models"]), task["model"])
    begun = time.perf_counter()
    room = max(context + task["tokens"] for context in task["contexts"])
    pages = -(-room // 256) + max(task["batches"])  # the requests share their prompt
    with ex.load(
        path, context=room, cache_tokens=256 * pages + 4096, progress=None, **options_of(task["way"], task["gpus"], task["cpu"])
    ) as llm:
        loaded = time.perf_counter() - begun
        read = llm.model.bytes_per_token
        for context in task["contexts"]:
            prompt = [5 + i % 190 for i in range(context)]
            texts: list[tuple[int, ...]] = []
            for batch in task["batches"]:
                best, steps = 0.0, 0.0
                for turn in range(task["rounds"] + 1):  # the first one warms up
                    first = last = 0.0
                    count, ids = 0, list[int]()
                    for event in llm.batch([prompt] * batch, max_tokens=task["tokens"], temperature=0, ignore_eos=True):
                        last = time.perf_counter()
                        if not first:
                            first, count = last, -len(event.tokens)  # what came with the first event is not counted
                        count += len(event.tokens)
                        if event.id == 0:
                            ids += [token.id for token in event.tokens]
                    if batch == 1:
                        texts.append(tuple(ids))
                    if turn and (speed := count / max(last - first, 1e-9)) > best:
                        best, steps = speed, 1e3 * batch / speed
                found = {"context": context, "batch": batch, "tok_s": round(best, 1), "step_ms": round(steps, 3)}
                write(
                    found
                    | {
                        "read_bytes": read,
                        "load_s": round(loaded, 1),
                        "repeats": len(set(texts)) <= 1,
                        "ids": list(texts[0][:16]) if texts else [],
                    }
                )


def exchange(task: dict[str, Any], write: Any) -> None:
    """Microseconds of an exchange of rows of 8192 numbers, among as many processes as GPUs."""
    import torch.multiprocessing as mp

    if not task["cpu"]:
        mp.spawn(exchanging, args=(task, task["out"]), nprocs=task["gpus"])
    else:
        write({"skipped": "exchanges between GPUs need GPUs"})


def exchanging(rank: int, task: dict[str, Any], out: str) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    from exl2nb import ops
    from exl2nb.ops.peers import Peers

    ops.libraries()
    size, width = task["gpus"], 8192
    torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", task["port"], is_master=rank == 0, timeout=timedelta(seconds=60))

    def swap(mine: bytes) -> list[bytes]:
        store.set(f"memory {rank}", mine.hex())
        return [bytes.fromhex(store.get(f"memory {other}").decode()) for other in range(size)]

    peers = Peers(rank, size, numbers=64 * width, vocab=[0] * (size + 1), device=torch.device("cuda", rank), swap=swap)
    for rows in (1, 8, 64):
        for kind in ("sum", "gather"):
            x = torch.randn(rows, width if kind == "sum" else width // size, device="cuda")
            run = (lambda x=x: peers.add(x)) if kind == "sum" else (lambda x=x: peers.gather(x, [x.shape[1]] * size))
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(EXCHANGES):
                    run()
            times = []
            for _ in range(5):
                graph.replay()
                torch.cuda.synchronize()
                begun = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begun) / EXCHANGES * 1e6)
            if rank == 0:
                with open(out, "a") as file:
                    file.write(
                        json.dumps({"part": "exchange", "gpus": size, "rows": rows, "kind": kind, "us": round(min(times), 2)}) + "\n"
                    )
    store.set(f"done {rank}", "1")
    for other in range(size):
        store.get(f"done {other}")


def killed(task: dict[str, Any], write: Any) -> None:
    """Seconds from the death of a rank to the error of the running request, and what the GPUs still hold after close."""
    path = directory(Path(task["models"]), task["model"])
    cards = 0 if task["cpu"] else task["gpus"]
    free = [torch.cuda.mem_get_info(i)[0] for i in range(cards)]
    llm = ex.load(path, context=1024, progress=None, **options_of("tensor", task["gpus"], task["cpu"]))
    llm.generate("It was", max_tokens=8, ignore_eos=True)
    at, said = 0.0, ""
    try:
        for number, _ in enumerate(llm.stream("It was", max_tokens=900, ignore_eos=True)):
            if number == 20:
                at = time.perf_counter()
                os.kill(llm.model.processes[-1].pid, signal.SIGKILL)
    except GenerationError as error:
        said = str(error)
    took = time.perf_counter() - at
    llm.close()
    torch.cuda.empty_cache()
    held = [(a - torch.cuda.mem_get_info(i)[0]) >> 20 for i, a in enumerate(free)]
    write({"seconds": round(took, 2), "said": said, "held_mib": held})


def yardstick(task: dict[str, Any], write: Any) -> None:
    """Bandwidth of reading on the first device."""
    write({"read_bytes_s": bandwidth("cpu" if task["cpu"] else "cuda:0"), "name": "cpu" if task["cpu"] else torch.cuda.get_device_name(0)})


def making(task: dict[str, Any], write: Any) -> None:
    """Write the model."""
    begun = time.perf_counter()
    path = directory(Path(task["models"]), task["model"])
    write({"s": round(time.perf_counter() - begun, 1), "bytes": sum(file.stat().st_size for file in path.iterdir())})


PARTS = {"yardstick": yardstick, "make": making, "exchange": exchange, "decode": decode, "killed": killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["llama2-70b:2.55", "llama3-8b:4.0"], help="SHAPE:BPW, or SHAPE/LAYERS:BPW")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024])
    parser.add_argument("--ways", nargs="+", choices=("tensor", "layers"), default=["tensor", "layers"])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds for a part")
    parser.add_argument("--models", default="build/bench")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        task = json.loads(args.part)
        about = {key: task[key] for key in ("part", "model", "way", "gpus") if key in task}

        def write(found: dict[str, Any]) -> None:
            with args.out.open("a") as file:
                file.write(json.dumps(about | found) + "\n")

        PARTS[task["part"]](task, write)
        return
    seen = len(args.gpus) and (max(args.gpus) if args.cpu else torch.cuda.device_count())
    counts = [count for count in args.gpus if count <= seen]
    common = {"cpu": args.cpu, "models": args.models, "out": str(args.out)}
    parts: list[dict[str, Any]] = [{"part": "yardstick"}]
    parts += [{"part": "exchange", "gpus": count, "port": 29400 + count} for count in counts if count > 1]
    sizes = {"batches": args.batches, "contexts": args.contexts, "tokens": args.tokens, "rounds": args.rounds}
    for model in args.shapes:
        parts.append({"part": "make", "model": model})
        runs = [(way, count) for count in counts for way in (args.ways if count > 1 else ["one"])]
        parts += [{"part": "decode", "model": model, "way": way, "gpus": count, **sizes} for way, count in runs]
    if counts and counts[-1] > 1:
        parts.append({"part": "killed", "model": args.shapes[-1], "gpus": counts[-1]})
    for part in parts:
        begun = time.perf_counter()
        command = [sys.executable, __file__, "--out", str(args.out), "--part", json.dumps(common | part)]
        try:
            done = subprocess.run(command, timeout=args.limit, capture_output=True, text=True)
            wrong = "" if done.returncode == 0 else done.stderr[-1500:]
        except subprocess.TimeoutExpired as late:
            wrong = f"no end within {args.limit:g} s; {(late.stderr or b'')[-800:]!r}"
        line = {"part": part["part"], "model": part.get("model"), "took_s": round(time.perf_counter() - begun, 1), "wrong": wrong}
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
    print(args.out.read_text())


if __name__ == "__main__":
    main()
