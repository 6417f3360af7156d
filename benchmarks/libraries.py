"""Our safetensors reader, detokenizer and template sandbox against the libraries': speed, and what each does with the hard cases.

    python benchmarks/libraries.py

Hard cases run in child processes: some of them end the process or fill the memory. The docstrings of the modules cite the figures.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import safetensors
import safetensors.torch
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

import exl2nb
from exl2nb.io.safetensors import SafetensorsFile
from exl2nb.tokenizer.detokenize import Detokenizer
from exl2nb.tokenizer.template import render
from exl2nb.tokenizer.tokenizer import Tokenizer
from tests.tokenizer import makers

DEMO = Path(exl2nb.__file__).parent / "demo_model"
CHAT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}</s>\n{% endfor %}<|assistant|>\n"
TALK = [{"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(1000)]
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "repeated text": "{{ 'a' * 10**10 }}",
    "power": "{{ 10**10**10 }}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "doubled text": "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
}
LIMIT_S, LIMIT_BYTES = 30, 3 << 30


class Deadline(ImmutableSandboxedEnvironment):
    """The library's environment with a deadline that every loop turn and call checks."""

    end = float("inf")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro)):
            call = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(call).set_lineno(loop.lineno).set_environment(self))
        return tree

    def tick(self) -> None:
        """Raise TimeoutError after the deadline."""
        if time.monotonic() > self.end:
            raise TimeoutError

    def run(self, template: str, seconds: float = 2.0) -> str:
        """Render within `seconds`."""
        self.end = time.monotonic() + seconds
        return self.from_string(template).render(messages=TALK)


def best(run: Callable[[], object], repeat: int = 7) -> float:
    """Seconds of the quickest of several runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def row(what: str, ours: object, library: object) -> None:
    """One line of the table."""
    print(f"| {what} | {ours} | {library} |", flush=True)


def child(which: str, case: str) -> str:
    """How a hard case ends in a process of its own."""
    try:
        done = subprocess.run([sys.executable, __file__, which, case], capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"still running after {LIMIT_S} s"
    return done.stdout.strip() or f"process ended with {done.returncode}"


def hard_case(which: str, case: str) -> None:
    """Run one in this process and print how it ended."""
    ours, start = which == "ours", time.perf_counter()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    try:
        if case in HOSTILE:
            render(TALK, HOSTILE[case]) if ours else Deadline().run(HOSTILE[case])
        else:
            broken_file(case, ours)
        said = "no error"
    except BaseException as error:
        said = type(error).__name__
    print(f"{said}, {time.perf_counter() - start:.1f} s, peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")


def broken_file(case: str, ours: bool) -> None:
    """Read a file with something wrong in it."""
    path = Path(tempfile.mkdtemp()) / "m.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1 << 20)}, path)
    raw = path.read_bytes()
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    if case == "name twice":
        header = ("{" + entry + "," + entry + "}").encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    opened = SafetensorsFile(path) if ours else safetensors.safe_open(path, "pt")
    if case == "cut short while open":
        with path.open("r+b") as file:
            file.truncate(len(raw) // 2)
    tensor = opened.read("a") if isinstance(opened, SafetensorsFile) else opened.get_tensor("a")
    tensor.sum()


def reading() -> None:
    """Every tensor of the demo model; page cache warm."""
    paths = sorted(DEMO.glob("*.safetensors"))

    def ours() -> None:
        for path in paths:
            with SafetensorsFile(path) as file:
                for name in file.names():
                    file.read(name).view(-1).view(torch.uint8).max()

    def library() -> None:
        for path in paths:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name).view(-1).view(torch.uint8).max()

    row("read the demo model (23 MB)", f"{1e3 * best(ours):.1f} ms", f"{1e3 * best(library):.1f} ms")
    for case in ("cut short while open", "name twice"):
        row(f"file: {case}", child("ours", case), child("library", case))


def streaming() -> None:
    """Ids to text, one at a time."""
    demo = Tokenizer.load(DEMO)
    ids = demo.encode((DEMO / "evaluation.txt").read_text()[:40_000], add_special=False)

    def ours(tokenizer: Tokenizer = demo, ids: list[int] = ids) -> str:
        stream = Detokenizer(tokenizer)
        return "".join(map(stream.feed, ids)) + stream.flush()

    def library(tokenizer: Tokenizer = demo, ids: list[int] = ids) -> str:
        stream = DecodeStream(skip_special_tokens=True)
        return "".join(stream.step(tokenizer.backend, i) or "" for i in ids)

    row("detokenize", f"{1e6 * best(ours) / len(ids):.2f} us a token", f"{1e6 * best(library) / len(ids):.2f} us a token")
    rng = random.Random(0)
    for kind in ("byte_level", "sentencepiece"):
        tokenizer = Tokenizer(getattr(makers, kind)())
        texts = [[rng.randrange(tokenizer.vocab_size) for _ in range(12)] for _ in range(1000)]
        counts = []
        for run in (ours, library):
            same = 0
            for one in texts:
                try:
                    same += run(tokenizer, one) == tokenizer.decode(one)
                except Exception:  # the library gives up on some sequences
                    continue
            counts.append(f"{same} of {len(texts)}")
        row(f"random ids ({kind}) end in what decode says", *counts)
    try:
        copy.deepcopy(DecodeStream(skip_special_tokens=True))
        copies = "deepcopy"
    except Exception as error:
        copies = type(error).__name__
    row("back to an earlier place (banned strings)", "save, load", copies)


def templates() -> None:
    """A conversation of 1000 messages, then templates that mean harm."""
    plain = Deadline(trim_blocks=True, lstrip_blocks=True)
    row("render 1000 messages", f"{1e3 * best(lambda: render(TALK, CHAT)):.1f} ms", f"{1e3 * best(lambda: plain.run(CHAT)):.1f} ms")
    for case in HOSTILE:
        row(f"template: {case}", child("ours", case), child("library", case))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        hard_case(*sys.argv[1:])
    else:
        print(json.dumps({"safetensors": safetensors.__version__, "jinja2": jinja2.__version__, "torch": torch.__version__}))
        row("what", "exl2nb", "library")
        reading()
        streaming()
        templates()
