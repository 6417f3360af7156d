"""Decode on several GPUs of one machine, layers split over them and tensor parallel, beside one GPU and beside the floor.

    python benchmarks/many_gpus.py --out many.jsonl --seconds 240             # all that this machine's GPUs allow, in order of value
    python benchmarks/many_gpus.py --out many.jsonl --shapes llama2-70b:2.55 --gpus 1 2 4 --batches 1 8 64 --long 32000
    python benchmarks/many_gpus.py --out many.jsonl --cpu --shapes demo:4.0   # without a GPU: does it run

Each part is a process with a time limit, and another from one line of results to the next; then it and all that it has started are killed,
and the next part begins. A line of JSON is written after every measurement, so what is done stays done when a part fails. At the end a line
for every measurement beside one GPU: speedup, floor, share of the step in exchanges, tokens that are the same, greedy and drawn by a seed.
The floor of a step: bytes of weights and cache that a rank reads over the bandwidth measured here, plus the exchanges of a step times the
latency measured here (parts one after the other for a split by layers). Random weights at real shapes (make_random_model.py); they stay in
--models.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from devices import bandwidth
from make_random_model import SHAPES, make

import exl2nb as ex

EXCHANGES = 200  # of a captured run
MARK = "MANY_GPUS_PART"  # in the environment of a part and of all that it starts, which are killed by it
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. " * 2  # scored
LARGEST = 2_200_000  # tokens of all sequences together: 64 of 32000, 0.2 s a step of 70B on one H200
PORT = 5610  # of the first server


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


# ---- parts


def decode(task: dict[str, Any], write: Any) -> None:
    """Tokens a second and milliseconds a step for every context and batch; last of all a rank is killed, where that is wanted."""
    path = directory(Path(task["models"]), task["model"])
    cards = 0 if task["cpu"] else task["gpus"]
    free = [torch.cuda.mem_get_info(i)[0] for i in range(cards)]
    begun = time.perf_counter()
    room = max(512, *task["contexts"]) + task["tokens"] + 8  # TEXT has to fit too
    most = max(task["batches"])
    held = 256 * (-(-room // 256) + most * (2 + task["tokens"] // 256)) + 4096  # the requests share the pages of their prompt
    llm = ex.load(
        path, context=room, cache_tokens=held, max_sequences=max(16, most), progress=None,
        **options_of(task["way"], task["gpus"], task["cpu"]),
    )  # fmt: skip
    write({"load_s": round(time.perf_counter() - begun, 1), "where": llm.model.where})
    for context in task["contexts"]:
        for batch in task["batches"]:
            if context * batch > LARGEST:
                write({"context": context, "batch": batch, "left_out": f"more than {LARGEST} tokens"})
                continue
            write({"context": context, "batch": batch} | timed(llm, context, batch, task["tokens"], task["rounds"]))
            if batch == 1 and context == task["contexts"][0]:
                scored = [llm.score(TEXT) for _ in range(2)]
                drawn = [token.id for token in llm.generate(TEXT[:40], max_tokens=64, seed=1, ignore_eos=True).tokens]
                found = {"score": scored[0].total, "scored_tokens": scored[0].count, "score_repeats": scored[0] == scored[1]}
                write(found | {"drawn": drawn})
    if task.get("kill"):
        write({"killed": killing(llm)})
    llm.close()
    if cards:
        torch.cuda.empty_cache()
        write({"held_mib_after_close": [(a - torch.cuda.mem_get_info(i)[0]) >> 20 for i, a in enumerate(free)]})


def timed(llm: ex.LLM, context: int, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The best round, after one to warm up. Counted from where every sequence has begun until the first one ends.

    All prompts have the same `context` tokens, whose pages are computed once, and then one of their own.
    """
    shared = [5 + i % 190 for i in range(context)]
    prompts = [[*shared, 5 + number] for number in range(batch)]
    best, step, texts, prompt_s = 0.0, 0.0, list[tuple[int, ...]](), 0.0
    for turn in range(rounds + 1):
        called = time.perf_counter()
        start = last = 0.0
        count, ids, begun, ended = 0, list[int](), set[int](), False
        for event in llm.batch(prompts, max_tokens=tokens, temperature=0, ignore_eos=True):
            now = time.perf_counter()
            if event.id == 0:
                ids += [token.id for token in event.tokens]
            if start and not ended and not event.over:
                count, last = count + len(event.tokens), now
            begun.add(event.id)
            if len(begun) == batch and not start:
                start = now
                prompt_s = prompt_s or now - called  # of the first round: nothing is cached yet
            ended = ended or event.over
        texts.append(tuple(ids))
        if turn and count and (speed := count / max(last - start, 1e-9)) > best:
            best, step = speed, 1e3 * batch / speed
    found = {"tok_s": round(best, 1), "step_ms": round(step, 3), "prompt_s": round(prompt_s, 3)}
    found["cache_bytes"] = context * batch * llm.model.cache_spec(1).token_bytes
    return found | {"read_bytes": llm.model.bytes_per_token, "repeats": len(set(texts)) == 1, "ids": list(texts[0][:tokens])}


def killing(llm: Any) -> dict[str, Any]:
    """Seconds from the death of a rank to the error of the running request, and to the end of `close`."""
    at, said = 0.0, "nothing: the text was complete"
    try:
        for number, _ in enumerate(llm.stream(TEXT, max_tokens=90, ignore_eos=True)):
            if number == 10:
                at = time.perf_counter()
                os.kill(llm.model.processes[-1].pid, signal.SIGKILL)
    except ex.errors.GenerationError as error:
        said = str(error)
    took = time.perf_counter() - at
    llm.close()
    return {"seconds": round(took, 2), "closed_s": round(time.perf_counter() - at, 2), "said": said}


def killed(task: dict[str, Any], write: Any) -> None:
    """The same of a model that is loaded for it."""
    decode(task | {"contexts": [64], "batches": [1], "tokens": 16, "rounds": 0, "kill": True}, write)


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


def yardstick(task: dict[str, Any], write: Any) -> None:
    """Bandwidth of reading on the first device."""
    write({"read_bytes_s": bandwidth("cpu" if task["cpu"] else "cuda:0"), "name": "cpu" if task["cpu"] else torch.cuda.get_device_name(0)})


def making(task: dict[str, Any], write: Any) -> None:
    """Write the model."""
    begun = time.perf_counter()
    path = directory(Path(task["models"]), task["model"])
    write({"s": round(time.perf_counter() - begun, 1), "bytes": sum(file.stat().st_size for file in path.iterdir())})


def warming(task: dict[str, Any], write: Any) -> None:
    """Compile the kernels: two layers of the first model, run in every way, while the models are made."""
    name, _, bpw = task["model"].partition(":")
    small = f"{name.partition('/')[0]}/2:{bpw}"
    for way, gpus in task["runs"]:
        one = {"model": small, "way": way, "gpus": gpus, "contexts": [64], "tokens": 8, "rounds": 0}

        def note(found: dict[str, Any], way: str = way, gpus: int = gpus) -> None:
            if "step_ms" not in found:  # nothing that could be taken for the model's speed
                write({"way": way, "gpus": gpus} | found)

        try:
            decode(task | one, note)
        except (ex.errors.Exl2Error, RuntimeError) as error:
            write({"way": way, "gpus": gpus, "error": f"{type(error).__name__}: {error}"[:500]})


def serving(task: dict[str, Any], write: Any) -> None:
    """Tokens a second through HTTP: one server, then two, each with a device of its own; by Ray where that is installed."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        write({"skipped": "uvicorn and starlette are not installed"})
        return
    path = directory(Path(task["models"]), task["model"])
    device = "cpu" if task["cpu"] else "cuda"
    common = [sys.executable, "-m", "exl2nb", "serve", str(path), "--context", "1024", "--cache-tokens", "32768", "--max-sequences", "32"]
    base = dict(os.environ)
    lines = [[*common, "--device", device, "--port", str(PORT + i)] for i in range(2)]
    rooms = [base | ({} if task["cpu"] else {"CUDA_VISIBLE_DEVICES": str(i)}) for i in range(2)]
    by_ray = find_spec("ray") is not None
    if by_ray:
        lines, rooms = [[*common, "--on", "ray", "--replicas", "2", "--port", str(PORT)]], [base]
    servers = [subprocess.Popen(line, env=room) for line, room in zip(lines, rooms)]
    try:
        ports = [PORT + i for i in range(len(servers))]
        for port in ports:
            answering(port, servers)
        write({"router": "ray" if by_ray else "none: two servers, requests in turns"})
        for count in range(1, len(ports) + 1):
            asked(ports[:count], task["requests"] // 4, task["tokens"])  # warms up
            write({"servers": count, "requests": task["requests"]} | asked(ports[:count], task["requests"], task["tokens"]))
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(20)


def answering(port: int, servers: list[subprocess.Popen[bytes]]) -> None:
    while True:
        if any(server.poll() is not None for server in servers):
            raise RuntimeError("a server has ended")
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).read()
            return
        time.sleep(0.2)


def asked(ports: list[int], requests: int, tokens: int) -> dict[str, Any]:
    """So many requests at a time, shared among the ports."""
    written, wrong = list[int](), list[str]()

    def one(number: int) -> None:
        body = {"prompt": f"{number} " + TEXT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{ports[number % len(ports)]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            written.append(json.load(urllib.request.urlopen(request, timeout=60))["usage"]["completion_tokens"])
        except (OSError, ValueError, KeyError) as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(requests)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    return {"tok_s": round(sum(written) / took, 1), "s": round(took, 2), "failed": len(wrong), "first_failure": wrong[0] if wrong else ""}


PARTS = {
    "yardstick": yardstick, "make": making, "warm": warming, "exchange": exchange, "decode": decode, "long": decode, "killed": killed,
    "serve": serving,
}  # fmt: skip


# ---- running them


@dataclass
class Running:
    """A part's process. said: what it prints."""

    part: dict[str, Any]
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    mark: str
    begun: float

    def finish(self, out: Path, limit: float, stall: float) -> str:
        """Wait for its end; what went wrong, or nothing. stall: seconds from one line of its results to the next."""
        deadline = patience = self.begun + limit
        size, wrong = _size(out), ""
        while self.process.poll() is None and not wrong:
            now = time.perf_counter()
            if (found := _size(out)) != size:
                size, patience = found, now + stall
            if now > deadline:
                wrong = f"no end within {limit:.0f} s; "
            elif now > patience:
                wrong = f"no line for {stall:.0f} s; "
            time.sleep(0.1)
        end_marked(self.mark)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.said.seek(0)
        said = self.said.read().decode(errors="replace")[-1500:]
        self.said.close()
        return wrong + said if wrong else "" if self.process.returncode == 0 else said or f"exit code {self.process.returncode}"


def _size(out: Path) -> int:
    """Bytes of results."""
    return out.stat().st_size if out.exists() else 0


def end_marked(mark: str) -> None:
    """Kill every process of a part that is left: its own, its ranks, its servers."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def start(part: dict[str, Any], out: Path, gpu: int | None = None) -> Running:
    """gpu: the only one that the part sees; None: all."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = os.environ | {MARK: mark} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in finish; no pipe: what a part leaves behind would keep it open
    command = [sys.executable, __file__, "--out", str(out), "--part", json.dumps(part)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment)
    return Running(part, process, said, mark, time.perf_counter())


def plan_parts(args: argparse.Namespace, counts: list[int]) -> list[dict[str, Any]]:
    """What follows the making of the models, in order of value."""
    several = [count for count in counts if count > 1]
    sizes = {"batches": args.batches, "contexts": args.contexts, "tokens": args.tokens, "rounds": args.rounds}
    parts: list[dict[str, Any]] = []
    for number, model in enumerate(args.shapes):
        runs = [("one", 1)] if 1 in counts else []
        runs += [(way, count) for way in args.ways for count in several]
        for way, count in runs:
            parts.append({"part": "decode", "model": model, "way": way, "gpus": count, **sizes})
            parts[-1]["kill"] = way == "tensor" and count == several[-1] and number == 0
        if number == 0 and several:
            if "tensor" in args.ways:
                parts.append({"part": "killed", "model": args.shapes[-1], "way": "tensor", "gpus": several[-1]})
            parts += [{"part": "yardstick"}, *({"part": "exchange", "gpus": count, "port": 29400 + count} for count in several)]
    if args.long and several:
        sizes |= {"contexts": args.long, "batches": [batch for batch in args.batches if batch <= 8], "rounds": 1}
        runs = [(way, several[-1]) for way in args.ways] + ([("one", 1)] if 1 in counts else [])
        parts += [{"part": "long", "model": args.shapes[0], "way": way, "gpus": count, **sizes} for way, count in runs]
    if several:
        parts.append(
            {"part": "serve", "model": args.shapes[-1], "requests": 64 if not args.cpu else 8, "tokens": 128 if not args.cpu else 8}
        )
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["llama2-70b:2.55", "llama3-8b:4.0"], help="SHAPE:BPW, or SHAPE/LAYERS:BPW")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024])
    parser.add_argument("--long", nargs="*", type=int, default=[], help="contexts that are measured last, of the first shape")
    parser.add_argument("--ways", nargs="+", choices=("tensor", "layers"), default=["tensor", "layers"])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=100, help="seconds for a part")
    parser.add_argument("--stall", type=float, default=40, help="seconds for the next line of a part that has written one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for everything; parts that find no time are named")
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
    begun = time.perf_counter()
    seen = max(args.gpus) if args.cpu else torch.cuda.device_count()
    counts = sorted(count for count in args.gpus if count <= seen)
    common = {"cpu": args.cpu, "models": args.models, "out": str(args.out)}

    def ended(running: Running, limit: float, stall: float = args.stall) -> None:
        wrong = running.finish(args.out, limit, stall)
        part, took = running.part, time.perf_counter() - running.begun
        line = {key: part[key] for key in ("part", "model", "way", "gpus") if key in part} | {"took_s": round(took, 1), "wrong": wrong}
        note(args.out, line | {"at_s": round(time.perf_counter() - begun, 1)})

    def left() -> float:
        return args.seconds - (time.perf_counter() - begun)

    runs = [(way, count) for count in counts for way in (args.ways if count > 1 else ["one"])]
    first = [{"part": "make", "model": model} for model in args.shapes]
    first.append({"part": "warm", "model": args.shapes[0], "runs": runs, "batches": args.batches})
    together = [start(common | part, args.out, None if args.cpu or part["part"] == "warm" else seen - 1 - i % seen)
                for i, part in enumerate(first)]  # fmt: skip
    for running in together:
        ended(running, min(args.limit, left()), stall=float("inf"))  # they write to one file
    for part in plan_parts(args, counts):
        if part["part"] == "killed" and any("killed" in found for found in results(args.out)):
            continue
        if left() < 15:
            note(args.out, {key: part[key] for key in ("part", "model", "way", "gpus") if key in part} | {"left_out": "no time"})
            continue
        ended(start(common | part, args.out), min(args.limit, left()))
    for line in summary(results(args.out)):
        note(args.out, line)


def note(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def results(out: Path) -> list[dict[str, Any]]:
    found = []
    for line in out.read_text().splitlines() if out.exists() else ():
        with suppress(ValueError):  # of a part that was killed while it wrote
            found.append(json.loads(line))
    return found


def same(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every measurement on several devices beside one."""
    speed = next((line["read_bytes_s"] for line in lines if "read_bytes_s" in line), None)
    us = {(line["gpus"], line["rows"], line["kind"]): line["us"] for line in lines if "us" in line}
    timed = [line for line in lines if line.get("step_ms")]
    alone = {(line["model"], line["context"], line["batch"]): line for line in timed if line["gpus"] == 1}
    scores = {(line["model"], line["way"], line["gpus"]): line for line in lines if "score" in line}
    found = []
    for line in timed:
        of, (model, way, gpus) = alone.get((line["model"], line["context"], line["batch"])), (line["model"], line["way"], line["gpus"])
        layers = int(model.partition(":")[0].partition("/")[2] or SHAPES[model.partition(":")[0]].num_hidden_layers)
        exchanged = 0.0
        if way == "tensor" and (gpus, line["batch"], "sum") in us:
            exchanged = layers * sum(us.get((gpus, line["batch"], kind), 0.0) for kind in ("sum", "gather")) / 1e3
        row = {"part": "summary", "model": model, "way": way, "gpus": gpus, "context": line["context"], "batch": line["batch"]}
        row |= {"tok_s": line["tok_s"], "step_ms": line["step_ms"], "repeats": line["repeats"]}
        if speed is not None:
            row["floor_ms"] = round(1e3 * (line["read_bytes"] + line["cache_bytes"]) / speed + exchanged, 3)
        if exchanged:
            row["share_in_exchanges"] = round(exchanged / line["step_ms"], 3)
        if of is not None and gpus > 1:
            row |= {
                "speedup": round(of["step_ms"] / line["step_ms"], 3),
                "same_tokens": same(of["ids"], line["ids"]),
                "of_tokens": len(line["ids"]),
            }
        one, mine = scores.get((model, "one", 1)), scores.get((model, way, gpus))
        if one and mine and gpus > 1:
            row["nats_a_token_apart"] = round(abs(one["score"] - mine["score"]) / mine["scored_tokens"], 6)
            row["same_drawn"] = same(one["drawn"], mine["drawn"])
        found.append(row)
    return found


if __name__ == "__main__":
    main()
