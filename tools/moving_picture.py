"""Make the moving pictures: real widgets in Chromium, driven by answers of the demo model.

    python tools/moving_picture.py [--frames FOLDER]      # needs Pillow, playwright and Chromium

docs/pictures/widgets.webp is the README's. loop-light.webm and loop-dark.webm are the landing page's, with a still each; Chromium encodes
them.

Three scenes: the Playground streams an answer, the SamplerMicroscope follows two sliders, the BitrateExplorer follows its slider. The page
has the bundles that JupyterLab gets; this script takes the kernel's part, frame by frame, so that a slow machine makes the same picture.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import struct
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
PICTURES = ROOT / "docs" / "pictures"
BITS_PER_S = 220_000
MOST_S = 15
PROMPT = "It was a dark night, and the old man"
Frame = tuple[Image.Image, int]
"""A picture and how long it stays, in ms."""


def shot(page: Page, ms: int) -> Frame:
    """The page as it is now."""
    data = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT})
    return Image.open(io.BytesIO(data)).convert("RGB"), ms


def playground(page: Page, llm: ex.LLM, theme: str) -> Iterator[Frame]:
    """An answer of 60 tokens, one token a frame."""
    widget = ex.widgets.Playground(llm, prompt=PROMPT, max_tokens=60, temperature=0.8, top_p=0.95, seed=7)
    host = MockHost(page, "playground", state_of(widget, _has_model=True), theme=theme)
    yield shot(page, 500)
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
    yield shot(page, 1200)


def microscope(page: Page, llm: ex.LLM, theme: str) -> Iterator[Frame]:
    """Temperature rises, then top-p falls; the table follows."""
    widget = ex.widgets.SamplerMicroscope(llm, PROMPT, max_tokens=12, temperature=0.8, top_p=0.95, seed=7)
    host = MockHost(page, "microscope", state_of(widget), theme=theme)
    yield shot(page, 700)
    for name, label, values in (
        ("temperature", "Temperature", [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),
        ("top_p", "Top-p", [0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6]),
    ):
        for value in values:
            page.get_by_role("slider", name=f"{label}, slider").fill(str(value))
            widget.set(**{name: value})
            host.put(**state_of(widget))
            yield shot(page, 160)
    yield shot(page, 1200)


def explorer(page: Page, llm: ex.LLM, theme: str) -> Iterator[Frame]:
    """The slider goes from 6 to 2.5 bits and back to 4."""
    widget = ex.widgets.BitrateExplorer(ex.demo_measurement(), llm, bpw=6.0)
    host = MockHost(page, "explorer", state_of(widget, _can_make=True), theme=theme)
    yield shot(page, 700)
    down = [6 - 0.25 * i for i in range(1, 15)]
    for bpw in [*down, *(2.5 + 0.25 * i for i in range(1, 7))]:
        page.get_by_role("slider", name="Bits per weight").fill(str(bpw))
        widget.solve(bpw)
        host.put(**{name: getattr(widget, name) for name in ("bpw", "solved", "nbytes", "predicted_kl", "solve_ms", "_cells")})
        yield shot(page, 140)
    yield shot(page, 1200)


# ---- WebM: Chromium encodes VP9, the container is written here (matroska.org, elements of webmproject.org/docs/container)

ENCODE = """async ([pictures, times, width, height, bitrate]) => {
  const chunks = [];
  const encoder = new VideoEncoder({
    output: (chunk) => {
      const data = new Uint8Array(chunk.byteLength);
      chunk.copyTo(data);
      chunks.push([chunk.timestamp / 1000, chunk.type === 'key', btoa(Array.from(data, (b) => String.fromCharCode(b)).join(''))]);
    },
    error: (problem) => { throw problem; },
  });
  encoder.configure({ codec: 'vp09.00.31.08', width, height, bitrate, latencyMode: 'quality' });
  let at = 0;
  for (let i = 0; i < pictures.length; i++) {
    const picture = await createImageBitmap(await (await fetch('data:image/png;base64,' + pictures[i])).blob());
    const frame = new VideoFrame(picture, { timestamp: at * 1000, duration: times[i] * 1000 });
    encoder.encode(frame, { keyFrame: i === 0 });
    frame.close();
    at += times[i];
  }
  await encoder.flush();
  return chunks;
}"""


def webm(page: Page, frames: list[Frame]) -> bytes:
    """The frames as a WebM video. The last one is there twice, so that it stays as long as it should."""
    pictures, times = [picture for picture, _ in frames], [ms for _, ms in frames]
    encoded = []
    for picture in [*pictures, pictures[-1]]:
        data = io.BytesIO()
        picture.save(data, "PNG")
        encoded.append(base64.b64encode(data.getvalue()).decode())
    page.route("https://encoder.test/", lambda route: route.fulfill(body="<!doctype html><title>encoder</title>", content_type="text/html"))
    page.goto("https://encoder.test/")  # encoders need a secure context
    chunks = page.evaluate(ENCODE, [encoded, [*times, 40], WIDTH, HEIGHT, BITS_PER_S])
    return container([(round(ms), key, base64.b64decode(data)) for ms, key, data in chunks], sum(times) + 40)


def element(number: int, content: bytes | int) -> bytes:
    """One EBML element: its id, its length in 8 bytes, its content."""
    if isinstance(content, int):
        content = content.to_bytes(max(1, (content.bit_length() + 7) // 8), "big")
    return number.to_bytes((number.bit_length() + 7) // 8, "big") + (len(content) | 1 << 56).to_bytes(8, "big") + content


def container(chunks: list[tuple[int, bool, bytes]], duration_ms: int) -> bytes:
    """Chunks (time in ms, key frame?, VP9 data) as WebM: one cluster, whose 16-bit times reach 32 s."""
    head = element(0x1A45DFA3, b"".join([element(0x4282, b"webm"), element(0x4287, 2), element(0x4285, 2)]))
    info = (
        element(0x2AD7B1, 1_000_000)
        + element(0x4489, struct.pack(">d", duration_ms))
        + element(0x4D80, b"exl2nb")
        + element(0x5741, b"exl2nb")
    )
    video = element(0xB0, WIDTH) + element(0xBA, HEIGHT)
    track = element(0xD7, 1) + element(0x73C5, 1) + element(0x83, 1) + element(0x86, b"V_VP9") + element(0xE0, video)
    blocks = [element(0xA3, b"\x81" + struct.pack(">hB", ms, 0x80 if key else 0) + data) for ms, key, data in chunks]
    cluster = element(0x1F43B675, element(0xE7, 0) + b"".join(blocks))
    return head + element(0x18538067, element(0x1549A966, info) + element(0x1654AE6B, element(0xAE, track)) + cluster)


def main() -> None:
    """Take the frames and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=Path, help="also write every tenth frame here as PNG")
    args = parser.parse_args()
    browser_path = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    with ex.demo(progress=None) as llm, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            frames = [frame for scene in (playground, microscope, explorer) for frame in scene(page, llm, theme)]
            pictures, times = [picture for picture, _ in frames], [ms for _, ms in frames]
            assert sum(times) <= MOST_S * 1000, sum(times)
            loop, still = PICTURES / f"loop-{theme}.webm", PICTURES / f"loop-{theme}.webp"
            loop.write_bytes(webm(page, frames))
            pictures[len(pictures) // 2 - 8].save(still, quality=60, method=6)
            made = [loop, still]
            if theme == "light":
                made.append(PICTURES / "widgets.webp")
                pictures[0].save(made[-1], save_all=True, append_images=pictures[1:], duration=times, loop=0, quality=70, method=4)
            if args.frames:
                args.frames.mkdir(parents=True, exist_ok=True)
                for i in range(0, len(pictures), 10):
                    pictures[i].save(args.frames / f"{theme}-{i:03}.png")
            page.close()
            sizes = ", ".join(f"{path.name} {path.stat().st_size / 1000:.0f} kB" for path in made)
            print(f"{len(frames)} frames, {sum(times) / 1000:.1f} s: {sizes}")
        browser.close()


if __name__ == "__main__":
    main()
