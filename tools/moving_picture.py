"""Make docs/pictures/widgets.webp, the moving picture of the README: real widgets in Chromium, driven by answers of the demo model.

    python tools/moving_picture.py [--frames FOLDER]      # needs Pillow, playwright and Chromium

Three scenes: the Playground streams an answer, the SamplerMicroscope follows two sliders, the BitrateExplorer follows its slider. The page
has the bundles that JupyterLab gets; this script takes the kernel's part, frame by frame, so that a slow machine makes the same picture.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "ui"))
from mock_host import MockHost, state_of  # noqa: E402

import exl2nb as ex  # noqa: E402

WIDTH, HEIGHT = 860, 588
TARGET = ROOT / "docs" / "pictures" / "widgets.webp"
PROMPT = "It was a dark night, and the old man"
Frame = tuple[Image.Image, int]
"""A picture and how long it stays, in ms."""


def shot(page: Page, ms: int) -> Frame:
    """The page as it is now."""
    data = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT})
    return Image.open(io.BytesIO(data)).convert("RGB"), ms


def playground(page: Page, llm: ex.LLM) -> Iterator[Frame]:
    """An answer of 60 tokens, one token a frame."""
    widget = ex.widgets.Playground(llm, prompt=PROMPT, max_tokens=60, seed=7)
    host = MockHost(page, "playground", state_of(widget, _has_model=True))
    yield shot(page, 700)
    done = llm.generate(PROMPT, max_tokens=60, temperature=0.8, top_p=0.95, seed=7, top_logprobs=3)
    host.put(status="running")
    nothing = {"n": 0, "tps": 0.0, "ttft_s": None}
    host.deliver({"type": "snapshot", "run": 1, "seq": -1, "prompt": PROMPT, "items": [], "stats": nothing})
    speed = done.timings.new_tokens / done.timings.decode_s
    stats = nothing
    for i, token in enumerate(done.tokens):
        top = [[each.text, each.prob] for each in token.top]
        stats = {"n": i + 1, "tps": speed, "ttft_s": done.timings.first_token_s}
        host.deliver({"type": "delta", "run": 1, "seq": i, "items": [[token.text, token.id, token.prob, token.rank, top]], "stats": stats})
        yield shot(page, 60)
    host.deliver({"type": "done", "run": 1, "seq": len(done.tokens) - 1, "reason": done.finish_reason, "stats": stats})
    host.put(status="done")
    yield shot(page, 1800)


def microscope(page: Page, llm: ex.LLM) -> Iterator[Frame]:
    """Temperature rises, then top-p falls; the table follows."""
    widget = ex.widgets.SamplerMicroscope(llm, PROMPT, max_tokens=12, temperature=0.8, top_p=0.95, seed=7)
    host = MockHost(page, "microscope", state_of(widget))
    yield shot(page, 1000)
    for name, label, values in (
        ("temperature", "Temperature", [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),
        ("top_p", "Top-p", [0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6]),
    ):
        for value in values:
            page.get_by_role("slider", name=f"{label}, slider").fill(str(value))
            widget.set(**{name: value})
            host.put(**state_of(widget))
            yield shot(page, 160)
    yield shot(page, 1500)


def explorer(page: Page, llm: ex.LLM) -> Iterator[Frame]:
    """The slider goes from 6 to 2.5 bits and back to 4."""
    widget = ex.widgets.BitrateExplorer(ex.demo_measurement(), llm, bpw=6.0)
    host = MockHost(page, "explorer", state_of(widget, _can_make=True))
    yield shot(page, 1000)
    down = [6 - 0.25 * i for i in range(1, 15)]
    for bpw in [*down, *(2.5 + 0.25 * i for i in range(1, 7))]:
        page.get_by_role("slider", name="Bits per weight").fill(str(bpw))
        widget.solve(bpw)
        host.put(**{name: getattr(widget, name) for name in ("bpw", "solved", "nbytes", "predicted_kl", "solve_ms", "_cells")})
        yield shot(page, 140)
    yield shot(page, 1800)


def main() -> None:
    """Take the frames and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=Path, help="also write every tenth frame here as PNG")
    args = parser.parse_args()
    browser_path = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    with ex.demo(progress=None) as llm, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        frames = [frame for scene in (playground, microscope, explorer) for frame in scene(page, llm)]
        browser.close()
    pictures, times = [picture for picture, _ in frames], [ms for _, ms in frames]
    pictures[0].save(TARGET, save_all=True, append_images=pictures[1:], duration=times, loop=0, quality=70, method=4)
    if args.frames:
        args.frames.mkdir(parents=True, exist_ok=True)
        for i in range(0, len(pictures), 10):
            pictures[i].save(args.frames / f"{i:03}.png")
    print(f"{TARGET}: {len(frames)} frames, {sum(times) / 1000:.1f} s, {TARGET.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
