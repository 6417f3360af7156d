"""Drive one engine for hours: random requests, interrupts, cancels, cache pressure, speculation, LoRA, widgets; invariants at every step.

    python tools/soak.py [--minutes 60] [--device cpu] [--callers 6] [--seed 0] [--model FOLDER] [--only ACTION ...]
    setsid python tools/soak.py --minutes 20 --device cuda >soak.out 2>&1 &    # on a GPU, however long a command may take there

Callers on threads of their own each do one thing after another, chosen at random: whole answers with any options, streams that are cut off,
dropped or cancelled, event loops whose tasks are cancelled, beams, guidance, structures, chats, jobs, scores, wrong options, hooks that
raise, cache files. Requests name one of two adapters or a blend of them; others are loaded, and unloaded while an answer runs. The main
thread does the same and is interrupted (SIGINT) at random moments. Widgets are started, stopped and asked what the page asks. The cache
holds a third of what the callers want, so pages are evicted and requests preempted all the time.

After every step: each page's reference count equals its references, free, cached and used pages are disjoint and complete, a published
page's key is the hash of its tokens. From time to time a text that is known is asked for again and must be the same to the letter. Every
`--quiet` seconds the callers pause until nothing runs; then no page is held, and threads, file descriptors and resident memory are those
after the warm-up, memory within 2 %; on a GPU also what torch has allocated there, and what is used of it as the driver says. Prints a JSON
line at each pause and one at the end; ends with 1 where anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import exl2nb as ex
from exl2nb.cache.pages import chain_key
from exl2nb.core.errors import Exl2Error, OptionError
from exl2nb.generator.scheduler import Scheduler
from exl2nb.model.layout import layer_linears
from exl2nb.model.lora import save_lora

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "data" / "demo-exl2-4.0bpw"
WARM_SHARE = 1 / 3  # of the time is warm-up: allocators grow, and kernels are loaded, until every kind of request has met every other
MEMORY_SHARE = 0.02
LEAVE_S = 120.0  # what a caller may take to come to a pause
WORDS = (
    "the",
    "old",
    "town",
    "river",
    "house",
    "rain",
    "night",
    "light",
    "stone",
    "door",
    "wind",
    "market",
    "ship",
    "road",
    "winter",
    "child",
    "song",
    "bread",
    "letter",
    "garden",
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MOST_PROBLEMS = 10
LORAS: tuple[Any, ...] = (None, "first", "second", {"first": 0.7, "second": 0.3}, {"second": -0.5})
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}}, "required": ["name", "n"]}


class Hooked(Exception):
    """Raised by a hook of ours inside a step."""


class _Soak:
    """One engine, its callers, and what is counted."""

    def __init__(self, model: Path, device: str, callers: int, seed: int) -> None:
        exact: dict[str, Any] = {"deterministic": True} if device != "cpu" else {}
        self.llm: Any = ex.load(
            model, device=device, context=1024, cache_tokens=4096, draft=ex.demo(device=device, progress=None), progress=None, **exact
        )
        self.engine = self.llm.engine
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.over, self.pause = threading.Event(), threading.Event()
        self.callers, self.seed, self.doing = callers, seed, ["" for _ in range(callers + 2)]
        self.paused = [threading.Event() for _ in range(callers + 2)]
        self.folder = tempfile.TemporaryDirectory(prefix="exl2nb-soak-")
        self.beginnings = [" ".join(random.Random(i).choices(WORDS, k=60 + 100 * i)) for i in range(5)]
        for seed, name in enumerate(("first", "second")):
            self.llm.loras.load(self.write_lora(name, seed), progress=None)
        self.known = self.known_texts()
        self.chat(random.Random(0))  # the helper process of templates, and its pipes, are there from the start
        self.step, self.engine.loop.step = self.engine.loop.step, self.checked_step
        self.actions: list[Callable[[random.Random], None]] = [
            *[self.answer, self.cut_off] * 4, *[self.known_again, self.tasks, self.speculate] * 2, self.several, self.beams,
            self.guided, self.structured, self.chat, self.job, self.read, self.wrong, self.hook, self.cache_file, self.cache_ask,
            self.late, self.adapters,
        ]  # fmt: skip

    # ---- invariants

    def checked_step(self) -> None:
        """A step, then what must hold between steps; runs on the engine thread."""
        self.step()
        self.counts["steps"] += 1
        try:
            self.check_pages(self.engine.loop.scheduler, self.counts["steps"])
        except AssertionError:
            self.fail("after a step")

    def check_pages(self, scheduler: Scheduler, at: int) -> None:
        table, pager = self.engine.pager.table, self.engine.pager
        held = Counter(page for sequence in (*scheduler.running, *scheduler.waiting) for page in sequence.pages)
        for page in range(table.num_pages):
            assert table.count(page) == held[page], f"page {page} has {table.count(page)} references, {held[page]} are known"
        assert table.num_free == table.num_pages - len(held)
        assert sorted([*table._free, *table._cached]) == sorted(set(range(table.num_pages)) - set(held))
        page = at % table.num_pages  # one page a step is looked at closely
        entry = pager.index.entry(page)
        assert (entry is not None) == bool(table._kept[page])
        if entry is not None and entry.key is not None:
            assert entry.key == chain_key(entry.parent, entry.tokens)
        self.counts["preemptions"] = scheduler.preemptions

    def check_quiet(self) -> dict[str, int]:
        """With nothing running: all pages free; figures of the process."""
        if not self.engine.wait_idle(LEAVE_S):
            raise AssertionError(f"the engine is not idle after {LEAVE_S:.0f} s without callers")
        self.llm.loras.load(Path(self.folder.name) / "first", name="pause", progress=None)
        self.llm.loras.unload("pause")  # drops the blends of requests that are through
        self.engine.call(lambda: self.check_pages(self.engine.loop.scheduler, 0))
        table = self.engine.pager.table
        assert table.num_free == table.num_pages, f"{table.num_pages - table.num_free} pages are held by nobody"
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        time.sleep(6.0)  # idle threads of the engine end after 5 s
        figures = {
            "threads": threading.active_count(),
            "system_threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        }
        if self.engine.cache.device != "cpu":
            import torch

            self.engine.call(torch.cuda.empty_cache)  # what torch keeps for later says nothing about leaks
            figures |= {"gpu_allocated_bytes": torch.cuda.memory_allocated(), "gpu_used_bytes": gpu_used_bytes()}
        return figures

    def fail(self, where: str) -> None:
        self.problems.append(f"{where}: {traceback.format_exc(limit=-6)}")
        print(json.dumps({"problem": self.problems[-1]}), flush=True)
        if len(self.problems) >= MOST_PROBLEMS:
            self.over.set()

    # ---- what callers do

    def idle(self, _: random.Random) -> None:
        time.sleep(0.1)

    def prompt(self, rng: random.Random) -> str:
        text = rng.choice(self.beginnings)
        cut = text[: rng.randrange(20, len(text))] if rng.random() < 0.4 else text
        return cut + " " + " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))

    def options(self, rng: random.Random) -> dict[str, Any]:
        found: dict[str, Any] = {"max_tokens": rng.choice((1, 5, 20, 60, 200)), "seed": rng.randrange(1000)}
        every = {
            "temperature": lambda: rng.uniform(0, 1.5),
            "top_k": lambda: rng.randrange(1, 80),
            "top_p": lambda: rng.uniform(0.3, 1),
            "min_p": lambda: rng.uniform(0, 0.2),
            "typical_p": lambda: rng.uniform(0.3, 1),
            "mirostat": lambda: True,
            "xtc_probability": lambda: 0.5,
            "repetition_penalty": lambda: rng.uniform(1, 1.5),
            "frequency_penalty": lambda: 0.5,
            "dry_multiplier": lambda: 0.8,
            "logit_bias": lambda: {rng.randrange(200): rng.uniform(-5, 5)},
            "stop": lambda: rng.choice((".", ["the ", " a"])),
            "banned_strings": lambda: rng.sample(WORDS, 2),
            "token_healing": lambda: True,
            "top_logprobs": lambda: rng.randrange(1, 8),
            "ignore_eos": lambda: True,
            "priority": lambda: rng.randrange(-3, 4),
            "speculation": lambda: rng.choice(("ngram", "draft", "off")),
            "lora": lambda: rng.choice(LORAS),
        }
        for name in rng.sample(sorted(every), rng.randrange(6)):
            found[name] = every[name]()
        return found

    def answer(self, rng: random.Random) -> None:
        with suppress(Exl2Error):  # some options exclude each other
            self.counts["tokens"] += len(self.llm.generate(self.prompt(rng), **self.options(rng)).tokens)

    def several(self, rng: random.Random) -> None:
        options = {"max_tokens": 30, "temperature": 0.9, "seed": rng.randrange(1000)}
        self.llm.generate(self.prompt(rng), n=rng.randrange(2, 5), **options)
        self.llm.generate([self.prompt(rng) for _ in range(rng.randrange(1, 6))], **options)

    def cut_off(self, rng: random.Random) -> None:
        """A stream that ends early, in every way that there is."""
        with suppress(Exl2Error, ZeroDivisionError):
            handle = self.llm.stream(self.prompt(rng), **{**self.options(rng), "max_tokens": 400})
            for at, _ in enumerate(handle):
                if at >= rng.randrange(12):
                    break
            way = rng.randrange(5)
            if way == 0:
                handle.cancel()
            elif way == 1:
                handle.close()
            elif way == 2:
                for _ in handle:
                    _ = 1 / 0  # an exception in the loop of a cell
            elif way == 3:
                handle.cancel()
                handle.result()
            # else it is dropped

    def late(self, rng: random.Random) -> None:
        self.llm.generate(self.prompt(rng), max_tokens=1000, ignore_eos=True, timeout_s=rng.uniform(0.001, 0.5))

    def tasks(self, rng: random.Random) -> None:
        """Tasks of an event loop, half of them cancelled."""

        async def one(cut: bool) -> None:
            task = asyncio.ensure_future(self.llm.agenerate(self.prompt(rng), max_tokens=60, speculation=rng.choice(("off", "ngram"))))
            if cut:
                await asyncio.sleep(rng.uniform(0, 0.2))
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        async def all_of_them() -> None:
            await asyncio.gather(*[one(rng.random() < 0.5) for _ in range(rng.randrange(1, 6))])

        asyncio.run(all_of_them())

    def job(self, rng: random.Random) -> None:
        job = self.llm.batch({i: self.prompt(rng) for i in range(rng.randrange(1, 9))}, max_tokens=40, seed=1)
        stop_at = rng.choice((3, 20, 10**6))
        for at, _ in enumerate(job):
            if at == stop_at:
                job.cancel()
                break

    def beams(self, rng: random.Random) -> None:
        self.llm.generate(self.prompt(rng), beams=rng.randrange(2, 6), max_tokens=rng.randrange(1, 30))

    def guided(self, rng: random.Random) -> None:
        self.llm.generate(self.prompt(rng), negative_prompt=self.prompt(rng), cfg_scale=rng.uniform(0.5, 3), max_tokens=30, seed=1)

    def structured(self, rng: random.Random) -> None:
        way = rng.choice(({"schema": SCHEMA}, {"regex": "[a-z]{3,9}( [0-9]+)?"}, {"choice": ["yes", "no", "maybe"]}))
        self.llm.generate(self.prompt(rng), max_tokens=60, seed=rng.randrange(99), **way)

    def chat(self, rng: random.Random) -> None:
        turns: list[Any] = [{"role": "user", "content": self.prompt(rng)[:300]}]
        for _ in range(rng.randrange(1, 4)):
            said = self.llm.chat(turns, max_tokens=24, seed=2, template=TEMPLATE)
            turns += [{"role": "assistant", "content": said.text}, {"role": "user", "content": rng.choice(WORDS)}]

    def speculate(self, rng: random.Random) -> None:
        """The same text with and without draft tokens."""
        prompt, seed = self.prompt(rng), rng.randrange(1000)
        options = {"max_tokens": 40, "seed": seed, "temperature": 0.7, "lora": rng.choice(LORAS)}
        texts = {kind: self.llm.generate(prompt, speculation=kind, **options).text for kind in ("off", rng.choice(("ngram", "draft")))}
        assert len(set(texts.values())) == 1, f"speculation changed a text: {texts}"
        self.counts["compared"] += 1

    def known_texts(self) -> list[tuple[str, dict[str, Any], str]]:
        rng, found = random.Random(99), []
        for seed in range(8):
            prompt = self.prompt(rng)
            options = {"max_tokens": 40, "temperature": 0.8 * (seed % 2), "seed": seed, "lora": LORAS[seed % len(LORAS)]}
            found.append((prompt, options, self.llm.generate(prompt, **options).text))
        return found

    def known_again(self, rng: random.Random) -> None:
        prompt, options, text = rng.choice(self.known)
        again = self.llm.generate(prompt, **options).text
        assert again == text, f"a text has changed: {again!r}, before {text!r}"
        self.counts["compared"] += 1

    def write_lora(self, name: str, seed: int) -> Path:
        """A random adapter of every matrix."""
        import torch

        rng, config, rank, pairs = torch.Generator().manual_seed(seed), self.llm.config, 4, {}
        for layer in range(config.num_layers):
            for linear in layer_linears(config, layer).values():
                n, k = linear.shape
                pairs[linear.key] = (torch.randn(rank, k, generator=rng) * k**-0.5, 0.2 * torch.randn(n, rank, generator=rng))
        return save_lora(Path(self.folder.name) / name, pairs, alpha=rank)

    def adapters(self, rng: random.Random) -> None:
        """An adapter is loaded, and unloaded while an answer runs that names it: the text is that of the same adapter of another name."""
        name, of = f"own-{threading.get_ident()}", rng.choice(("first", "second"))
        prompt, options = self.prompt(rng), {"max_tokens": 30, "temperature": 0.7, "seed": rng.randrange(1000)}
        self.llm.loras.load(Path(self.folder.name) / of, name=name, progress=None)
        try:
            handle = self.llm.stream(prompt, lora=name, **options)
            next(iter(handle))
        finally:
            self.llm.loras.unload(name)
        text, other = handle.result().text, self.llm.generate(prompt, lora=of, **options).text
        assert text == other, f"an adapter that was loaded again: {text!r}, before {other!r}"
        self.counts["compared"] += 1

    def read(self, rng: random.Random) -> None:
        prompt = self.prompt(rng)
        way = rng.randrange(4)
        if way == 0:
            self.llm.score(prompt)
        elif way == 1:
            self.llm.choose(prompt, rng.sample(WORDS, 3))
        elif way == 2:
            self.llm.hidden(prompt[:200], "layers.*.output")
        else:
            self.llm.explain(prompt, at=rng.randrange(3), temperature=0.7, top_k=20, seed=1)

    def wrong(self, rng: random.Random) -> None:
        """Refused requests leave nothing behind."""
        wrongs: list[dict[str, Any]] = [{"temperature": -1}, {"max_tokens": 0}, {"schema": {"type": 3}}, {"regex": "("}, {"nonsense": 1}]
        for wrong in rng.sample(wrongs, 2):
            try:
                self.llm.generate("x", **wrong)
            except Exl2Error:
                continue
            raise AssertionError(f"{wrong} was accepted")

    def hook(self, rng: random.Random) -> None:
        """A hook that raises in the middle of a step ends its own request alone."""
        left = rng.randrange(5)

        def look(_: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Hooked

        with suppress(Exl2Error, Hooked):
            self.llm.generate(self.prompt(rng), max_tokens=12, post_sampling=look)

    def cache_file(self, rng: random.Random) -> None:
        path = Path(self.folder.name) / f"{threading.get_ident()}.safetensors"
        with suppress(OptionError):  # nothing is cached
            self.llm.cache.save(path)
            if rng.random() < 0.5:
                self.llm.cache.clear()
            self.llm.cache.load(path)

    def cache_ask(self, rng: random.Random) -> None:
        snapshot = self.llm.cache.snapshot()
        assert len(snapshot.pages) == self.engine.pager.table.num_pages
        if rng.random() < 0.1:
            self.llm.cache.clear()

    # ---- threads

    def caller(self, number: int) -> None:
        _own_team()
        rng = random.Random(f"{self.seed} {number}")
        while not self.over.is_set():
            if self.pause.is_set():
                self.rest(number)
                continue
            action = rng.choice(self.actions)
            self.doing[number] = action.__name__
            try:
                action(rng)
            except BaseException:
                self.fail(f"caller {number}, {action.__name__}")
            self.counts[action.__name__] += 1
        self.paused[number].set()

    def rest(self, number: int) -> None:
        self.doing[number] = ""
        self.paused[number].set()
        while self.pause.is_set() and not self.over.is_set():
            time.sleep(0.05)
        self.paused[number].clear()

    def widgets(self, number: int) -> None:
        """What the browser's half of widgets sends, much faster than anybody clicks."""
        from exl2nb.widgets.pagetable import PageTable
        from exl2nb.widgets.playground import Playground

        _own_team()
        rng = random.Random(f"{self.seed} widgets")
        while not self.over.is_set():
            if self.pause.is_set():
                self.rest(number)
                continue
            self.doing[number] = "widgets"
            try:
                playground, table = Playground(self.llm), PageTable(self.llm, period_s=0.05)
                playground.max_tokens = 80
                table.start()
                for _ in range(rng.randrange(20, 120)):
                    kind = rng.choice(
                        ("generate", "generate", "stop", "look_at", "look_into", "resync", "ping", "frame", "nonsense", "generate")
                    )
                    message: dict[str, Any] = {
                        "type": kind,
                        "run": rng.randrange(9),
                        "at": rng.randrange(-2, 90),
                        "prompt": self.prompt(rng),
                    }
                    message["settings"] = {"temperature": rng.uniform(0, 2)} if rng.random() < 0.9 else {"temperature": "x"}
                    rng.choice((playground, table))._dispatch(None, message, [])
                    time.sleep(rng.choice((0, 0, 0.01, 0.1)))
                playground.stop()
                with suppress(Exl2Error):
                    playground.wait(30)
                table.stop()
                with suppress(Exl2Error):
                    table.wait(30)
                playground.close()
                table.close()
            except BaseException:
                self.fail("widgets")
            self.counts["widgets"] += 1
        self.paused[number].set()

    def interrupted(self, number: int, rng: random.Random) -> None:
        """The main thread's part: an action, and SIGINT at a random moment of it."""
        action = rng.choice([self.answer, self.cut_off, self.several, self.beams, self.read, self.chat, self.cache_ask, self.structured])
        self.doing[number] = "interrupted " + action.__name__
        timer = threading.Timer(rng.uniform(0, 0.6), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            action(rng)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        except BaseException:
            self.fail(f"main thread, {action.__name__}")
        finally:
            for _ in range(3):
                with suppress(KeyboardInterrupt):
                    timer.cancel()
                    timer.join()
                    break

    def run(self, minutes: float, quiet_s: float, only: set[str]) -> dict[str, Any]:
        """Drive it; the figures of the end. only: some actions, all where empty."""
        self.actions = [action for action in self.actions if not only or action.__name__ in only] or [self.idle]
        threads = [threading.Thread(target=self.caller, args=(i,), name=f"soak-{i}", daemon=True) for i in range(self.callers)]
        second = self.widgets if not only or "widgets" in only else self.caller
        threads.append(threading.Thread(target=second, args=(self.callers,), name="soak-widgets", daemon=True))
        _own_team()
        for thread in threads:
            thread.start()
        rng, start, pauses, warm, last = random.Random(self.seed), time.monotonic(), 0, {}, {}
        while time.monotonic() - start < minutes * 60 and not self.over.is_set():
            next_pause = time.monotonic() + quiet_s
            while time.monotonic() < min(next_pause, start + minutes * 60) and not self.over.is_set():
                if only and "interrupted" not in only:
                    time.sleep(0.5)
                else:
                    self.interrupted(self.callers + 1, rng)
            self.doing[-1] = ""
            self.pause.set()
            for number in range(self.callers + 1):
                if not self.paused[number].wait(LEAVE_S):
                    self.problems.append(f"{self.doing[number]} did not end within {LEAVE_S:.0f} s")
                    self.over.set()
            try:
                last = self.check_quiet()
                pauses += 1
                if not warm and time.monotonic() - start > minutes * 60 * WARM_SHARE:
                    warm = last
                for name, value in last.items() if warm else ():
                    bound = warm[name] * (1 + MEMORY_SHARE) if name.endswith("bytes") else warm[name]
                    assert value <= bound, f"{name} is {value}, after the warm-up it was {warm[name]}"
            except AssertionError:
                self.fail("pause")
            print(json.dumps({"minute": round((time.monotonic() - start) / 60, 1), **last, **self.counts}), flush=True)
            self.pause.clear()
        self.over.set()
        for thread in threads:
            thread.join(LEAVE_S)
        self.llm.close()
        self.folder.cleanup()
        minutes = round((time.monotonic() - start) / 60, 1)
        return {"minutes": minutes, "pauses": pauses, "after_warm_up": warm, "at_the_end": last, **self.counts, "problems": self.problems}


def _own_team() -> None:
    """Let OpenMP make the threads that it keeps for every thread whose tensors are large, and not whenever the first large one comes."""
    import torch

    torch.ones(1 << 20).add_(1)


def gpu_used_bytes() -> int:
    """Of this process, as the driver says; of the whole GPU where the driver does not tell processes apart."""
    import torch

    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        mine = [int(mib) << 20 for pid, mib in (line.split(",") for line in lines if line) if int(pid) == os.getpid()]
        if mine:
            return sum(mine)
    free, total = torch.cuda.mem_get_info()
    return total - free


def _pin_allocator() -> None:
    """One arena, large blocks from the system: resident memory then follows what is held, not what threads have left behind in arenas.

    With the usual sixteen arenas it wanders by 3 % up and down for hours, on the same work.
    """
    libc = ctypes.CDLL(None)
    for option, value in ((-8, 1), (-3, 1 << 16), (-1, 1 << 17)):  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
        libc.mallopt(option, value)


def main() -> int:
    """Parse the command line, soak, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", type=float, default=60, help="seconds between pauses")
    parser.add_argument("--only", nargs="+", help="these actions alone, such as beams widgets interrupted: to find which one leaks")
    parser.add_argument("--model", type=Path, default=MODEL if MODEL.is_dir() else Path(ex.__file__).parent / "demo_model")
    args = parser.parse_args()
    _pin_allocator()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
    soak = _Soak(args.model, args.device, args.callers, args.seed)
    found = soak.run(args.minutes, args.quiet, set(args.only or ()))
    print(json.dumps(found), flush=True)
    return bool(found["problems"])


if __name__ == "__main__":
    sys.exit(main())
