"""Load on `exl2nb serve`: throughput, time to the first token and per token at 1, 8, 32 and 128 clients, beside `llm.batch`.

    python benchmarks/serve.py                        # the demo model on this machine
    python benchmarks/serve.py --llama-server BINARY --llama-python PYTHON --table  # llama.cpp's server in the same turns
    python benchmarks/serve.py MODEL --device cuda --cache-tokens 65536 --max-sequences 128 --tokens 128
    python benchmarks/serve.py --disconnects 10000    # requests of which half are dropped; no page may be lost
    python benchmarks/serve.py --minutes 30           # such requests for so long; memory must not grow
    python benchmarks/serve.py --idle 10              # CPU time of a server without requests, and seconds from start to the first token

`llm.batch`, our server and llama.cpp's each keep a process of their own and take turns, `--rounds` times for each number of clients; what
is not its turn sleeps. Every round has new prompts. A request streams, has a prompt of its own and never ends early, so all sides generate
the same number of tokens; `llm.batch` has as many in flight as there are clients. The load comes from `load_client.cpp`, compiled here: one
thread on the same machine, whose processor time is reported. llama.cpp runs the demo model itself, as an F16 GGUF with the same tokenizer.
Its server is built from the sources in llama-cpp-python's source distribution:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_UI=OFF && cmake --build build --target llama-server

with -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 for a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TEXT = "the old man went home and said that it was a dark night near the river where they had seen her before"


def bodies(args, count: int, seed: int) -> list[dict]:
    """Requests with prompts of their own; what is no sampler of all three sides is neutral."""
    draw, known = random.Random(seed), TEXT.split()
    texts = [" ".join(draw.choice(known) for _ in range(args.words)).capitalize() for _ in range(count)]
    return [
        {"prompt": text, "max_tokens": args.tokens, "temperature": 0.8, "seed": number, "ignore_eos": True}
        for number, text in enumerate(texts)
    ]


def loading(args) -> dict:
    given = {"max_sequences": args.max_sequences, "cache_tokens": args.cache_tokens, "context": args.context, "device": args.device}
    return {name: value for name, value in given.items() if value is not None}


# ---- the sides: each measures (clients, requests) -> tokens per second, processor seconds of its process per token


class Batch:
    """`llm.batch`, in a process of its own."""

    def __init__(self, args) -> None:
        command = [sys.executable, __file__, args.model, "--batch-child", "--options", json.dumps(loading(args))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, clients: int, requests: list[dict]) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([clients, requests]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"llm.batch ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def batch_main(args) -> None:
    """The child: a line of [clients, requests] in, a line of figures out."""
    import exl2nb as ex
    from exl2nb.cli.models import locate

    with ex.load(locate(args.model), progress=None, **json.loads(args.options)) as llm:
        for line in sys.stdin:
            clients, waiting = json.loads(line)
            waiting.reverse()
            begun, cpu, tokens = time.perf_counter(), own_cpu_s(), 0
            job = llm.batch([waiting.pop() for _ in range(min(clients, len(waiting)))])
            for event in job:
                if event.over:
                    assert event.completion is not None, event.error
                    tokens += len(event.completion.tokens)
                    if waiting:  # as many in flight as there are clients
                        job.add(**waiting.pop())
            wall = time.perf_counter() - begun
            print(json.dumps({"tok_s": tokens / wall, "cpu_us": 1e6 * (own_cpu_s() - cpu) / tokens}), flush=True)


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """A server of OpenAI's API in a process of its own."""

    def __init__(self, command: list[str], port: int) -> None:
        self.begun, self.port, self.url = time.perf_counter(), port, f"http://127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.log)
        while not answers(self.url + "/health"):
            if self.process.poll() is not None:
                self.log.seek(0)
                raise SystemExit(f"{command[0]} ended: {self.log.read().decode()[-2000:]}")
            time.sleep(0.02)
        self.ready_s = time.perf_counter() - self.begun

    def measure(self, clients: int, requests: list[dict]) -> dict:
        cpu = self.cpu_s()
        lines = "".join(json.dumps({**one, "stream": True, "stream_options": {"include_usage": True}}) + "\n" for one in requests)
        command = [str(load_client()), "127.0.0.1", str(self.port), "/v1/completions", str(clients)]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        tokens = sum(one[2] for one in found["requests"])
        ttft = sorted(one[0] for one in found["requests"])
        return {
            "tok_s": tokens / found["wall_s"],
            "cpu_us": 1e6 * (self.cpu_s() - cpu) / tokens,
            "client_cpu_us": 1e6 * found["cpu_s"] / tokens,
            "ttft_p50_ms": 1000 * statistics.median(ttft),
            "ttft_p99_ms": 1000 * ttft[min(len(ttft) - 1, len(ttft) * 99 // 100)],
            "token_ms": 1000 * statistics.median(one[1] / max(1, one[2] - 1) for one in found["requests"]),
            "event_tokens": tokens / sum(one[3] for one in found["requests"]),
            "gap_p99_ms": 1000 * sorted(one[4] for one in found["requests"])[len(ttft) * 99 // 100],
        }

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers(url: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except (OSError, urllib.error.URLError):
        return False


def ours(args) -> Server:
    port = free_port()
    options = [part for name, value in loading(args).items() for part in (f"--{name.replace('_', '-')}", str(value))]
    if args.stream_interval_ms is not None:
        options += ["--stream-interval-ms", str(args.stream_interval_ms)]
    command = [sys.executable, "-m", "exl2nb.cli", "serve", args.model, "--port", str(port), "--max-queue", "4096", "--quiet", *options]
    return Server(command, port)


def llama_server(args) -> Server:
    """llama.cpp's, with as many slots and as much cache; its samplers are those that the requests name."""
    port, threads = free_port(), str(os.cpu_count())
    gguf = args.gguf or args.models / "demo-f16.gguf"
    if not gguf.exists():
        from exl2nb.cli.models import locate

        gguf.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([args.llama_python, str(HERE / "peer_llamacpp.py"), "convert", str(locate(args.model)), str(gguf)], check=True)
    command = [args.llama_server, "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--threads", threads]
    command += ["--threads-batch", threads, "--parallel", str(args.max_sequences), "--ctx-size", str(args.cache_tokens)]
    if args.device == "cuda":
        command += ["--n-gpu-layers", "999"]
    return Server([*command, "--samplers", "temperature", "--log-disable"], port)


def load_client() -> Path:
    """The compiled load client; compiled again when its source is newer."""
    source, made = HERE / "load_client.cpp", Path("build/bench/load_client")
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        assert compiler, "load_client.cpp needs a C++ compiler"
        made.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-O2", "-std=c++20", str(source), "-o", str(made)], check=True)
    return made.resolve()


# ---- clients


class Client:
    """Streams completions; aiohttp, or httpx where that is missing."""

    async def __aenter__(self) -> Client:
        try:
            import aiohttp

            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
            self.lines = self._aiohttp
        except ImportError:
            import httpx

            self._session = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
            self.lines = self._httpx
        return self

    async def __aexit__(self, *_: object) -> None:
        await (self._session.close() if hasattr(self._session, "close") else self._session.aclose())

    async def _aiohttp(self, url: str, body: dict):
        async with self._session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                yield line

    async def _httpx(self, url: str, body: dict):
        async with self._session.stream("POST", url, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                yield line.encode()


async def one_request(client: Client, url: str, body: dict, drop_after: float | None) -> bool:
    """Whether the answer came to its end; it is dropped after `drop_after` seconds."""
    begun = time.perf_counter()
    lines = client.lines(url + "/v1/completions", body)
    try:
        async for _ in lines:
            if drop_after is not None and time.perf_counter() - begun > drop_after:
                return False
        return True
    finally:
        await lines.aclose()


async def disconnects(args, url: str, count: int, seconds: float = float("inf")) -> dict:
    """Requests of which about half are dropped at a random moment: `count` of them, or as many as `seconds` allow."""
    draw, deadline = random.Random(1), time.monotonic() + seconds
    ended = {"whole": 0, "dropped": 0}
    made = 0

    async def one(client: Client) -> None:
        nonlocal made
        while made < count and time.monotonic() < deadline:
            made += 1
            (body,) = bodies(args, 1, made)
            body |= {"max_tokens": draw.randint(1, args.tokens), "stream": draw.random() < 0.7}
            wait = draw.uniform(0, 0.1) if draw.random() < 0.5 else None
            task = asyncio.ensure_future(one_request(client, url, body, wait))
            try:
                whole = await (asyncio.wait_for(task, wait + 0.05) if wait is not None else task)
            except asyncio.TimeoutError:
                whole = False
            ended["whole" if whole else "dropped"] += 1

    async with Client() as client:
        await asyncio.gather(*(one(client) for _ in range(32)))
    return ended


def gauges(url: str) -> dict[str, float]:
    import urllib.request

    lines = urllib.request.urlopen(url + "/metrics").read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("exl2nb_") and "{" not in line}


# ---- what is measured


def measure_load(args) -> dict[int, dict]:
    """By number of clients: medians over the rounds; a share is the median of the rounds' own."""
    clients = [int(part) for part in args.clients.split(",")]
    sides: dict = {"batch": Batch(args), "server": ours(args)}
    if args.llama_server:
        sides["llamacpp"] = llama_server(args)
    rows: dict[int, dict] = {}
    try:
        for side in sides.values():
            side.measure(4, bodies(args, 8, 999))  # warm
        for one in clients:
            count, found = max(args.requests, one * args.each), {name: [] for name in sides}
            for turn in range(args.rounds):
                requests = bodies(args, count, 1000 * one + turn)
                for name, side in sides.items():
                    found[name].append(side.measure(one, requests))
            row = rows[one] = {"requests": count}
            for name, turns in found.items():
                row |= {f"{name}_{key}": statistics.median(turn[key] for turn in turns) for key in turns[0]}
            for name in list(sides)[1:]:
                shares = [theirs["tok_s"] / mine["tok_s"] for theirs, mine in zip(found[name], found["batch"])]
                row |= {f"{name}_share": statistics.median(shares), f"{name}_share_worst": min(shares), f"{name}_share_best": max(shares)}
        state = gauges(sides["server"].url)
        assert state["exl2nb_cache_pages_free"] == state["exl2nb_cache_pages"], state
    finally:
        for side in sides.values():
            side.close()
    return rows


def table(rows: dict[int, dict]) -> str:
    """As it stands in a log."""
    names = [name for name in ("server", "llamacpp") if any(f"{name}_tok_s" in row for row in rows.values())]
    lines = [
        "| clients | side | tok/s | share of `llm.batch`, median (worst, best) | first token, median; 99 %, ms | per token, ms | "
        "tokens per event | longest gap, 99 %, ms | CPU per token: process, client, us |",
        "|" + "---|" * 9,
    ]
    for clients, row in rows.items():
        lines.append(f"| {clients} | `llm.batch` | {row['batch_tok_s']:.0f} | | | | | | {row['batch_cpu_us']:.0f} |")
        for name in names:
            one = {key.removeprefix(name + "_"): value for key, value in row.items() if key.startswith(name + "_")}
            lines.append(
                f"| {clients} | {name} | {one['tok_s']:.0f} | {one['share']:.2f} ({one['share_worst']:.2f}, {one['share_best']:.2f}) | "
                f"{one['ttft_p50_ms']:.1f}; {one['ttft_p99_ms']:.1f} | {one['token_ms']:.2f} | {one['event_tokens']:.1f} | "
                f"{one['gap_p99_ms']:.0f} | {one['cpu_us']:.0f}, {one['client_cpu_us']:.1f} |"
            )
    return "\n".join(lines)


def measure_disconnects(args) -> dict:
    with ours(args) as server:
        asyncio.run(disconnects(args, server.url, min(500, args.disconnects or 500)))
        resident, totals = [server.rss_mib()], {"whole": 0, "dropped": 0}
        parts = [(args.disconnects, float("inf"))] if args.disconnects else [(1 << 40, 60.0)] * args.minutes
        for count, seconds in parts:
            for name, value in asyncio.run(disconnects(args, server.url, count, seconds)).items():
                totals[name] += value
            resident.append(server.rss_mib())
        deadline = time.monotonic() + 20
        while (state := gauges(server.url))["exl2nb_requests_active"] and time.monotonic() < deadline:
            time.sleep(0.1)
        kept = state["exl2nb_cache_pages"] - state["exl2nb_cache_pages_free"]
        rss = [round(value, 1) for value in resident]
        return {**totals, "pages_kept": kept, "active": state["exl2nb_requests_active"], "rss_mib": rss}


def measure_idle(args) -> dict:
    with ours(args) as server:
        server.measure(1, bodies(args, 1, 0))
        first_s = time.perf_counter() - server.begun
        time.sleep(6)  # the engine's thread ends after 5 s without work
        cpu, begun = server.cpu_s(), time.perf_counter()
        time.sleep(args.idle)
        share = (server.cpu_s() - cpu) / (time.perf_counter() - begun)
        return {"start_to_answer_s": round(first_s, 2), "ready_s": round(server.ready_s, 2), "idle_cpu_percent": round(100 * share, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--clients", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="at least so many requests for each number of clients")
    parser.add_argument("--each", type=int, default=2, help="and so many for each client")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=40, help="of a prompt")
    parser.add_argument("--device")
    parser.add_argument("--context", type=int)
    parser.add_argument("--cache-tokens", type=int, default=16384)
    parser.add_argument("--max-sequences", type=int, default=32)
    parser.add_argument("--stream-interval-ms", type=float)
    parser.add_argument("--llama-server", help="the binary")
    parser.add_argument("--llama-python", default=".venv-peer/bin/python", help="with the package gguf, where the GGUF has to be made")
    parser.add_argument("--gguf", type=Path, help="of the same shape; none: the demo model's is made")
    parser.add_argument("--models", type=Path, default=Path("build/bench"))
    parser.add_argument("--table", action="store_true", help="as Markdown")
    parser.add_argument("--disconnects", type=int)
    parser.add_argument("--minutes", type=int)
    parser.add_argument("--idle", type=float)
    parser.add_argument("--batch-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.batch_child:
        batch_main(args)
    elif args.disconnects or args.minutes:
        print(json.dumps(measure_disconnects(args)))
    elif args.idle:
        print(json.dumps(measure_idle(args)))
    else:
        rows = measure_load(args)
        for clients, row in rows.items():
            print(json.dumps({"clients": clients, **{name: round(value, 3) for name, value in row.items()}}))
        if args.table:
            print(table(rows))


if __name__ == "__main__":
    main()
