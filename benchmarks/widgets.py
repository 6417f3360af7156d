"""What the widgets cost, in a real JupyterLab with headless Chromium: sizes, streaming, the slider, the large map.

    python benchmarks/widgets.py [--only streaming slider ...] [--seconds 4] [--rounds 5]

Prints one JSON object per line. Latency is the browser's clock at the moment a token is put into the page minus the kernel's clock when the
token was made; both run on one machine. `decode` runs the demo model in turns into a loop and into a Playground on show, `kernel` without
a page on the machine; `ledger` counts the processor time of every thread that has to do with it, which other work hardly disturbs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "ui"))

CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
STATIC = ROOT / "exl2nb" / "static"

FAKE = """
import time
from types import SimpleNamespace as Row
import exl2nb.widgets as w

class Model:
    name = "2,000 tokens a second"
    def stream(self, prompt, *, max_tokens, **settings):
        begin = time.perf_counter()
        for i in range(max_tokens):
            while (ahead := begin + i / {rate} - time.perf_counter()) > 0:
                time.sleep(ahead if ahead > 0.0005 else 0)
            word = f" {{int(1000 * time.time())}}" + ("\\n" if i % 60 == 59 else "")
            yield Row(text=word, tokens=[Row(id=i, text=word, prob=0.5, rank=1, top=[(word, 0.5), (" other", 0.2)])])

play = w.Playground(Model(), prompt="p", max_tokens={tokens})
"""

WATCH = """() => {
  window.seen = []; window.frames = [];
  let from = 0;
  const text = document.querySelector('.exl2nb-text');
  new MutationObserver(() => {
    const now = Date.now(), spans = text.querySelectorAll('.exl2nb-token');
    for (; from < spans.length; from++) window.seen.push([now, Number(spans[from].textContent)]);
  }).observe(text, {childList: true});
  const tick = (t) => { window.frames.push(t); requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
}"""

SLIDER = """async (values) => {
  const slider = document.querySelector('.exl2nb-explorer input[type=range]'), times = [];
  const cells = () => [...document.querySelectorAll('.exl2nb-explorer [role=gridcell]')].map((c) => c.style.background).join();
  const figures = document.querySelector('.exl2nb-explorer .exl2nb-figures');
  for (const value of values) {
    const before = cells(), begin = performance.now();
    let first = 0;
    slider.value = value;
    slider.dispatchEvent(new Event('input', {bubbles: true}));
    do {
      await new Promise(requestAnimationFrame);
      if (!first && cells() !== before) first = performance.now() - begin;
    } while ((!first || figures.textContent.startsWith('about')) && performance.now() - begin < 3000);
    times.push([first, performance.now() - begin]);
    await new Promise((done) => setTimeout(done, 150));
  }
  return times;
}"""

LOST = """
import threading, time
import exl2nb as ex
llm = ex.demo(progress=None)
options = dict(max_tokens=600, temperature=0.8, top_k=0, top_p=0.95, min_p=0.0, repetition_penalty=1.0, seed=1, ignore_eos=True)
play = ex.widgets.Playground(llm, prompt="It was a dark night", **{k: v for k, v in options.items() if k != "ignore_eos"})
original = llm.stream
llm.stream = lambda prompt, **settings: original(prompt, **{**settings, "ignore_eos": True})

def read():
    for chunk in original("It was a dark night", **options):
        pass

def bare():
    thread = threading.Thread(target=read)
    begin = time.perf_counter()
    thread.start(); thread.join()
    return 600 / (time.perf_counter() - begin)

def shown():
    begin = time.perf_counter()
    play.start()
    play._background._over.wait()
    return 600 / (time.perf_counter() - begin)
"""

LEDGER = """
import time
from collections.abc import Sequence
import exl2nb.widgets as w
from exl2nb.generator.request import Alternative, Chunk, Token
from exl2nb.widgets import feed

top = tuple(Alternative(i, f" other{i}", -1.234567, 0.28504319443) for i in range(6))
made = [Token(i, " word", -1.234567, 0.28504319443, 1, top) for i in range(%d)]
feed.FLUSH_S = 0.0  # every chunk is a frame

class Frames:
    def stream(self, prompt, **settings):
        self.left = iter([Chunk(text=" word" * 66, tokens=tuple(made[at : at + 66])) for at in range(0, len(made), 66)])
        return self
    def __iter__(self):
        return self.left
    def poll(self):
        pass

play = w.Playground(Frames(), prompt="p")
work, spent = play._generate, []
def timed(*args):
    begin = time.thread_time()
    work(*args)
    spent.append(time.thread_time() - begin)
play._generate = timed
sender = get_ipython().kernel.iopub_thread.thread
sent = lambda: time.clock_gettime(time.pthread_getcpuclockid(sender.ident))
for _ in range(%d):
    before = sent()
    play.start().wait()
    time.sleep(0.3)
    print(1e6 * spent[-1] / len(made), 1e6 * (sent() - before) / len(made))
"""


def show(**values: Any) -> None:
    print(json.dumps(values), flush=True)


@contextmanager
def chromium():
    import shutil

    from playwright.sync_api import sync_playwright

    path = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        yield browser
        browser.close()


def sizes() -> None:
    """Bundles, and exports of widgets in a usual state."""
    for script in sorted(STATIC.glob("*.js")):
        style = script.with_suffix(".css")
        show(bundle=script.stem, js_kb=script.stat().st_size / 1000, css_kb=style.stat().st_size / 1000 if style.exists() else 0)


def exports(browser: Any, folder: Path) -> None:
    """Size of every export, and that it opens with the network off."""
    import exl2nb as ex

    measurement = ex.demo_measurement()
    prompt = "It was a dark night, and the old man"
    with ex.demo(progress=None) as llm:
        widgets = {
            "playground": ex.widgets.Playground(llm, prompt=prompt, max_tokens=128, seed=1),
            "caches": ex.widgets.CacheExplorer(llm, prompt=prompt, needle={"sentences": 8}),
            "compare": ex.widgets.Compare({"a": llm, "b": (llm, {"temperature": 1.0})}),
        }
        for widget in widgets.values():
            widget.start()
            widget.wait()
        widgets["caches"].hide_needle().wait()
        widgets["explorer"] = ex.widgets.BitrateExplorer(measurement)
        widgets["bitmap"] = ex.widgets.BitMap(measurement.solve(bpw=3.5), other=measurement.solve(bpw=5))
        for name, widget in widgets.items():
            path = folder / f"{name}.html"
            widget.to_html(path)
            page = browser.new_context(offline=True).new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            page.goto(path.as_uri())
            page.locator(".exl2nb-card").wait_for(timeout=20_000)
            show(export=name, kb=path.stat().st_size / 1000, opens_offline=not errors)
            page.context.close()


def large_map(browser: Any, rounds: int) -> None:
    """An 80-layer model's BitMap, from the script's start to the drawn frame, and a change of metric."""
    from mock_host import MockHost

    from exl2nb.widgets import BitMap

    roles = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    entries = [{"key": f"model.layers.{i}.{role}", "bpw": 2 + (i * 7 + j) % 60 / 10} for i in range(80) for j, role in enumerate(roles)]
    state = {k: v for k, v in BitMap(entries).get_state().items() if isinstance(v, (str, int, float, list, type(None)))}
    state = {k: v for k, v in state.items() if k not in ("_esm", "_css")}
    page = browser.new_page()
    MockHost(page, "bitmap", state)
    code = """async () => {
      window.closeView();
      const begin = performance.now();
      window.closeView = await window.view('first');
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      return performance.now() - begin;
    }"""
    found = [page.evaluate(code) for _ in range(2 * rounds)]
    show(map="80 layers x 7", draw_ms_best=min(found), draw_ms_median=statistics.median(found), draw_ms_worst=max(found))
    page.close()


def in_lab(browser: Any, home: Path, parts: list[str], seconds: float, rounds: int) -> None:
    from lab import Lab, Notebook

    lab = Lab(home)
    try:
        if "streaming" in parts:
            streaming(browser, lab, Notebook, seconds)
        if "slider" in parts:
            slider(browser, lab, Notebook)
        if "decode" in parts:
            decode_lost(browser, lab, Notebook, rounds)
    finally:
        lab.close()


def streaming(browser: Any, lab: Any, notebook: Any, seconds: float, rate: int = 2000) -> None:
    page = browser.new_page()
    setup = FAKE.format(rate=rate, tokens=int(seconds * rate))
    book = notebook(lab, page, [setup, "play", "play.start();", "play.wait(); print(play.tokens_per_second)"])
    book.run(0)
    book.run(1)
    page.locator(".exl2nb-text").wait_for(state="attached")
    page.evaluate(WATCH)
    book.run(2)
    made = float(book.run(3, timeout_s=120))
    page.locator(".exl2nb-headline", has_text="Done").wait_for(timeout=60_000)
    seen = page.evaluate("() => window.seen")
    shown = sorted({at for at, _ in seen})
    delays = sorted(at - born for at, born in seen)
    span = (shown[-1] - shown[0]) / 1000
    frames = page.evaluate("() => window.frames")
    inside = [b - a for a, b in pairwise(frames)]
    show(
        streaming="Playground in JupyterLab",
        tokens=len(seen),
        made_per_s=made,
        drawings_per_s=len(shown) / span,
        latency_ms_p50=delays[len(delays) // 2],
        latency_ms_p95=delays[int(0.95 * len(delays))],
        page_frame_ms_p50=statistics.median(inside),
        page_frame_ms_p95=sorted(inside)[int(0.95 * len(inside))],
    )
    page.close()


def slider(browser: Any, lab: Any, notebook: Any) -> None:
    page = browser.new_page()
    book = notebook(lab, page, ["import exl2nb as ex\nx = ex.widgets.BitrateExplorer(bpw=4.0)", "x"])
    book.run(0)
    book.run(1)
    page.locator(".exl2nb-explorer [role=gridcell]").first.wait_for()
    found = page.evaluate(SLIDER, [str(2.5 + 0.25 * i) for i in range(20)])
    for what, times in zip(("to recolour, from the curve", "to the kernel's allocation"), zip(*found)):
        show(slider=what, moves=len(times), ms_best=min(times), ms_median=statistics.median(times), ms_worst=max(times))
    page.close()


def _show_lost(what: str, rows: Sequence[Sequence[float]]) -> None:
    """rows: tokens per second of a loop and of the widget, a pair per round."""
    lost = [100 * (1 - shown / bare) for bare, shown in rows]
    show(
        decode=what,
        tok_s_loop=statistics.median(row[0] for row in rows),
        tok_s_widget=statistics.median(row[1] for row in rows),
        lost_percent_median=statistics.median(lost),
        lost_percent_all=[round(one, 1) for one in lost],
    )


def decode_lost(browser: Any, lab: Any, notebook: Any, rounds: int) -> None:
    page = browser.new_page()
    book = notebook(lab, page, [LOST, "play", f"for _ in range({rounds + 1}): print(bare(), shown())"])
    book.run(0)
    book.run(1)
    rows = [tuple(map(float, line.split())) for line in book.run(2, timeout_s=170).splitlines() if line.strip()][1:]
    _show_lost("demo model", rows)
    page.close()


def in_kernel(code: str) -> list[list[float]]:
    """The rows of numbers that code prints in a kernel which no page is connected to; its messages are made and sent all the same."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    printed: list[str] = []
    try:
        hook = lambda message: message["msg_type"] == "stream" and printed.append(message["content"]["text"])  # noqa: E731
        reply = client.execute_interactive(code, timeout=170, output_hook=hook)
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return [list(map(float, line.split())) for line in "".join(printed).splitlines() if line[:1].isdigit()]


def decode_lost_alone(rounds: int) -> None:
    """The same without a browser: what the widget takes in the kernel, where the page is drawn on another machine."""
    code = f"{LOST}\nplay._repr_mimebundle_()\nfor _ in range({rounds + 1}): print(bare(), shown())"
    rows = in_kernel(code)[1:]
    _show_lost("demo model, no page on this machine", rows)


def ledger(rounds: int, tokens: int = 6600) -> None:
    """Processor time per token at 2,000 a second: of the thread that reads and the one that sends, in a real kernel, and of the engine's.

    Frames of 66 tokens, as they are then, one after the other; so neither the model nor what else the machine does has a say but in noise.
    Sums are of all that the widget takes, whether or not another core had it to spare: decoding cannot lose more.
    """
    rows = in_kernel(LEDGER % (tokens, rounds + 1))[1:]
    engine = _engine_work(rounds)
    for name, pick in (("medians", statistics.median), ("least", min)):
        read, send, bare, asked = (pick(column) for column in (*zip(*rows), *zip(*engine)))
        whole = read + send + asked - bare
        parts = {"widget_thread": read, "sending_thread": send, "engine_more": asked - bare, "engine_draws_and_hands_over": bare}
        show(ledger=f"microseconds per token, {name}", **parts, in_all=whole, percent_of_2000_tok_s=100 * whole * 2000 / 1e6)


def _engine_work(rounds: int, tokens: int = 200) -> list[tuple[float, float]]:
    """Microseconds of the engine's thread per token, to draw and to hand over: without alternatives, and with a Playground's."""
    import torch

    import exl2nb as ex
    from exl2nb.generator.output import Output
    from exl2nb.sampling import SamplingParams
    from exl2nb.sampling.chain import draw_batch
    from exl2nb.sampling.sampler_state import SamplerState
    from exl2nb.widgets.playground import TOP_TOKENS

    prompt, settings, found = "It was", {"temperature": 0.8, "top_p": 0.95, "seed": 1}, []
    with ex.demo(progress=None) as llm:
        ids = llm.tokenizer.encode(prompt)
        rows = torch.from_numpy(llm.generate(prompt, max_tokens=tokens, ignore_eos=True, return_logits=True, **settings).logits)
        for _ in range(4 * rounds):
            pair = []
            for top in (0, TOP_TOKENS):
                state, output = (
                    SamplerState(SamplingParams(**settings), ids, tokenizer=llm.tokenizer, end_ids=[]),
                    Output(llm.tokenizer, ids),
                )
                begin = time.thread_time()
                for number in range(tokens):
                    (chosen,) = draw_batch(rows[number : number + 1], [(state, number, top)])
                    if isinstance(chosen, tuple):
                        output.push(chosen)
                pair.append(1e6 * (time.thread_time() - begin) / tokens)
            found.append(tuple(pair))
    return found[1:]


def work_per_token(tokens: int = 20_000) -> None:
    """What the widget does with a token on its thread, without a page."""
    from exl2nb.generator.request import Chunk, Token, TokenAlternative
    from exl2nb.widgets.feed import Feed
    from exl2nb.widgets.tokens import brief_rows, raw_items

    top = tuple(TokenAlternative(i, f" other{i}", -1.234567, 0.28504319443) for i in range(6))
    made = [Token(i, " word", -1.234567, 0.28504319443, 1, top) for i in range(tokens)]
    frames = [Chunk(text=" word" * 66, tokens=tuple(made[at : at + 66])) for at in range(0, tokens, 66)]  # 1/30 s at 2,000 a second
    feed = Feed(lambda message: json.dumps(message) and None, brief=brief_rows)
    feed.begin("p")
    begin = time.process_time()  # not the clock on the wall: others may be at work
    for chunk in frames:
        feed.add(raw_items(chunk))
    feed.snapshot()
    spent = (time.process_time() - begin) / tokens
    show(work="per token", cpu_microseconds=1e6 * spent, percent_of_2000_tok_s=100 * spent * 2000)


PARTS = ["sizes", "work", "ledger", "kernel", "exports", "map", "streaming", "slider", "decode"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=4.0, help="of streaming")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "sizes" in args.only:
        sizes()
    if "work" in args.only:
        work_per_token()
    if "ledger" in args.only:
        ledger(args.rounds)
    if "kernel" in args.only:
        decode_lost_alone(args.rounds)
    with tempfile.TemporaryDirectory(prefix="exl2nb-") as folder, chromium() as browser:
        if "exports" in args.only:
            exports(browser, Path(folder))
        if "map" in args.only:
            large_map(browser, args.rounds)
        if {"streaming", "slider", "decode"} & set(args.only):
            (Path(folder) / "lab").mkdir()
            in_lab(browser, Path(folder) / "lab", args.only, args.seconds, args.rounds)


if __name__ == "__main__":
    main()
