"""Load on `exl2nb serve`: throughput, time to the first token and per token at 1, 8, 32 and 128 clients, beside `llm.batch`.

    python benchmarks/serve.py                        # the demo model on this machine
    python benchmarks/serve.py MODEL --device cuda --clients 1,8,32,128 --tokens 128 --max-sequences 128
    python benchmarks/serve.py --llamacpp MODEL.gguf  # the same load on llama-cpp-python's server, where it is installed
    python benchmarks/serve.py --disconnects 10000    # requests of which half are dropped; no page may be lost
    python benchmarks/serve.py --idle 10              # CPU time of a server without requests, and seconds from start to the first token

Server, clients and `llm.batch` each run in a process of their own, one after the other; the clients share the machine with the server.
Needs aiohttp, or httpx, for the clients and nothing else. Every request streams, has a prompt of its own and never ends early, so both
sides generate the same number of tokens. `llm.batch` runs the same requests before and after the server, with as many in flight as there
are clients; the mean of the two counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

TEXT = "the old man went home and said that it was a dark night near the river where they had seen her before"


def prompts(count: int, words: int, seed: int) -> list[str]:
    draw, known = random.Random(seed), TEXT.split()
    return [" ".join(draw.choice(known) for _ in range(words)).capitalize() for _ in range(count)]


def bodies(args, count: int) -> list[dict]:
    return [
        {"prompt": text, "max_tokens": args.tokens, "temperature": 0.8, "seed": seed}
        for seed, text in enumerate(prompts(count, args.words, args.seed))
    ]


# ---- llm.batch


def batch_main(args) -> None:
    """In a process of its own: the same requests through `llm.batch`."""
    import exl2nb as ex
    from exl2nb.cli.models import locate

    counts = json.loads(args.counts)
    with ex.load(locate(args.model), progress=None, **loading(args)) as llm:
        llm.batch([one["prompt"] for one in bodies(args, 8)], max_tokens=8).run()  # warm
        rates = {}
        for clients, count in counts.items():
            waiting = [{**one, "ignore_eos": True} for one in reversed(bodies(args, count))]
            begun, tokens = time.perf_counter(), 0
            job = llm.batch([waiting.pop() for _ in range(int(clients))])
            for event in job:
                if event.over:
                    tokens += len(event.completion.tokens)
                    if waiting:  # as many in flight as there are clients
                        job.add(**waiting.pop())
            rates[clients] = tokens / (time.perf_counter() - begun)
    print(json.dumps(rates))


def loading(args) -> dict:
    given = {"max_sequences": args.max_sequences, "cache_tokens": args.cache_tokens, "context": args.context, "device": args.device}
    return {name: value for name, value in given.items() if value is not None}


def batch(args, counts: dict[int, int]) -> dict[int, float]:
    command = [sys.executable, __file__, args.model, "--batch-child", "--counts", json.dumps(counts), *same(args)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return {int(clients): rate for clients, rate in json.loads(out.stdout.splitlines()[-1]).items()}


def same(args) -> list[str]:
    more = [part for name, value in loading(args).items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [*more, "--tokens", str(args.tokens), "--words", str(args.words), "--seed", str(args.seed)]


# ---- servers


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Process:
    """A server in a process of its own."""

    def __init__(self, command: list[str], port: int, ready: str) -> None:
        self.begun, self.url = time.perf_counter(), f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not answers(self.url + ready):
            assert self.process.poll() is None, self.process.stderr.read().decode()[-2000:]
            time.sleep(0.02)
        self.ready_s = time.perf_counter() - self.begun

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()


def answers(url: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except (OSError, urllib.error.URLError):
        return False


def ours(args) -> Process:
    port = free_port()
    options = [part for name, value in loading(args).items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return Process(
        [sys.executable, "-m", "exl2nb.cli", "serve", args.model, "--port", str(port), "--max-queue", "4096", "--quiet", *options],
        port,
        "/health",
    )


def llamacpp(args) -> Process:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "llama_cpp.server",
        "--model",
        args.llamacpp,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--n_ctx",
        "1024",
    ]
    return Process([*command, "--n_threads", str(os.cpu_count()), "--n_threads_batch", str(os.cpu_count())], port, "/v1/models")


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


async def one_request(client: Client, url: str, body: dict, drop_after: float | None = None) -> tuple[float, float, int] | None:
    """Seconds to the first token, seconds from there to the last, tokens."""
    begun, first, last, tokens = time.perf_counter(), 0.0, 0.0, 0
    lines = client.lines(url + "/v1/completions", body)
    try:
        async for line in lines:
            if drop_after is not None and time.perf_counter() - begun > drop_after:
                return None
            if not line.startswith(b"data: {"):
                continue
            if b'"usage"' in line and (usage := json.loads(line[6:]).get("usage")):
                tokens = usage["completion_tokens"]
                continue
            last = time.perf_counter()
            first = first or last
        return first - begun, last - first, tokens
    finally:
        await lines.aclose()


async def load(url: str, clients: int, requests: list[dict], usage: bool) -> dict:
    queue, found = list(reversed(requests)), []

    async def one(client: Client) -> None:
        while queue:
            body = {**queue.pop(), "stream": True}
            if usage:
                body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
            found.append(await one_request(client, url, body))
            if not usage:  # llama-cpp-python tells none in a stream
                found[-1] = (*found[-1][:2], body["max_tokens"])

    async with Client() as client:
        begun = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(clients)))
        wall = time.perf_counter() - begun
    ttft = sorted(one[0] for one in found)
    per_token = [one[1] / (one[2] - 1) for one in found if one[2] > 1]
    return {
        "tok_s": sum(one[2] for one in found) / wall,
        "ttft_p50_ms": 1000 * statistics.median(ttft),
        "ttft_p99_ms": 1000 * ttft[min(len(ttft) - 1, len(ttft) * 99 // 100)],
        "token_ms": 1000 * statistics.median(per_token),
    }


async def disconnects(args, url: str, count: int) -> dict:
    """Requests of which about half are dropped at a random moment."""
    draw, requests = random.Random(1), list(reversed(bodies(args, count)))
    ended = {"whole": 0, "dropped": 0}

    async def one(client: Client) -> None:
        while requests:
            body = {**requests.pop(), "max_tokens": draw.randint(1, args.tokens), "ignore_eos": True, "stream": draw.random() < 0.7}
            wait = draw.uniform(0, 0.1) if draw.random() < 0.5 else None
            task = asyncio.ensure_future(one_request(client, url, body, wait))
            try:
                whole = await (asyncio.wait_for(task, wait + 0.05) if wait is not None else task)
            except asyncio.TimeoutError:
                whole = None
            ended["whole" if whole else "dropped"] += 1

    async with Client() as client:
        await asyncio.gather(*(one(client) for _ in range(32)))
    return ended


def gauges(url: str) -> dict[str, float]:
    import urllib.request

    lines = urllib.request.urlopen(url + "/metrics").read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("exl2nb_") and "{" not in line}


# ---- what is measured


def measure_load(args) -> dict:
    clients = [int(part) for part in args.clients.split(",")]
    counts = {one: max(args.requests, one * args.each) for one in clients}
    before = batch(args, counts)
    rows = {}
    with ours(args) as server:
        asyncio.run(load(server.url, 4, bodies(args, 8), True))  # warm
        for one in clients:
            rows[one] = asyncio.run(load(server.url, one, bodies(args, counts[one]), True))
        state = gauges(server.url)
        assert state["exl2nb_cache_pages_free"] == state["exl2nb_cache_pages"], state
    after = batch(args, counts)
    for one in clients:
        rows[one]["batch_tok_s"] = (before[one] + after[one]) / 2
        rows[one]["share"] = rows[one]["tok_s"] / rows[one]["batch_tok_s"]
        rows[one]["requests"] = counts[one]
    if args.llamacpp:
        with llamacpp(args) as server:
            asyncio.run(load(server.url, 1, bodies(args, 2), False))
            for one in clients:
                theirs = asyncio.run(load(server.url, one, bodies(args, min(counts[one], args.llamacpp_requests)), False))
                rows[one] |= {f"llamacpp_{name}": value for name, value in theirs.items()}
    return rows


def measure_disconnects(args) -> dict:
    with ours(args) as server:
        asyncio.run(disconnects(args, server.url, min(500, args.disconnects)))
        rss = server.rss_mib()
        ended = asyncio.run(disconnects(args, server.url, args.disconnects))
        deadline = time.monotonic() + 20
        while (state := gauges(server.url))["exl2nb_requests_active"] and time.monotonic() < deadline:
            time.sleep(0.1)
        kept = state["exl2nb_cache_pages"] - state["exl2nb_cache_pages_free"]
        return {
            **ended,
            "pages_kept": kept,
            "active": state["exl2nb_requests_active"],
            "rss_mib": [round(rss, 1), round(server.rss_mib(), 1)],
        }


def measure_idle(args) -> dict:
    with ours(args) as server:
        asyncio.run(load(server.url, 1, bodies(args, 1), True))
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
    parser.add_argument("--requests", type=int, default=32, help="at least so many requests for each number of clients")
    parser.add_argument("--each", type=int, default=2, help="and so many for each client")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=40, help="of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--context", type=int)
    parser.add_argument("--cache-tokens", type=int, default=16384)
    parser.add_argument("--max-sequences", type=int, default=32)
    parser.add_argument("--llamacpp", metavar="GGUF")
    parser.add_argument("--llamacpp-requests", type=int, default=32)
    parser.add_argument("--disconnects", type=int)
    parser.add_argument("--idle", type=float)
    parser.add_argument("--batch-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--counts", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.batch_child:
        return batch_main(args)
    if args.disconnects:
        print(json.dumps(measure_disconnects(args)))
    elif args.idle:
        print(json.dumps(measure_idle(args)))
    else:
        for clients, row in measure_load(args).items():
            print(json.dumps({"clients": clients, **{name: round(value, 3) for name, value in row.items()}}))


if __name__ == "__main__":
    main()
