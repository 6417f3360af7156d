"""The engine in the reader's browser: tokens, logits, draws and texts are the native engine's, and files that are not whole are refused.

Runs on what `make docs` built, in Chromium.
"""

import base64
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest

import exl2nb as ex
from exl2nb.sampling.draw import uniform
from tests.widgets.page import state

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PACKED = ROOT / "tests" / "data" / "demo-exl2-4.0bpw"
ASK = "It was a dark night, and the old man"
OPEN = """async () => {
  const { Engine, explain, Tokenizer, uniform } = await import('/site/browser.js');
  const bytes = async (name) => new Uint8Array(await (await fetch('/site/' + name)).arrayBuffer());
  const [wasm, file] = [await bytes('engine.wasm'), await bytes('model.bin')];
  const tokenizer = new Tokenizer(await (await fetch('/site/tokenizer.json')).json());
  window.made = { Engine, wasm, file, tokenizer, uniform, explain, engine: await Engine.open(wasm, file) };
  window.row = () => {
    const view = new Uint8Array(made.engine.logits().slice().buffer);
    let text = '';
    for (const byte of view) text += String.fromCharCode(byte);
    return btoa(text);
  };
}"""


@pytest.fixture(scope="module")
def small():
    with ex.load(PACKED, device="cpu", progress=None) as llm:
        yield llm


@pytest.fixture
def page(opened, address):
    page = opened(f"{address}/404.html")
    page.evaluate(OPEN)
    return page


def test_ids_are_the_tokenizers(page, small):
    book = (ROOT / "exl2nb" / "demo_model" / "evaluation.txt").read_text(encoding="utf-8")
    starts = random.Random(1).sample(range(len(book) - 400), 40)
    texts = [book[start : start + 400] for start in starts]
    texts += [
        "",
        " ",
        "\n\n  \t x",
        "don't I'LL we've 12,345.60",
        "naïve café — “quoted” 日本語 🙂👩‍👩‍👧",
        "a  b   c\r\n",
        "\u00a0x\u2003y",
        "x" * 300,
        "\x00\x7f",
    ]
    theirs = page.evaluate("(texts) => texts.map((text) => made.tokenizer.encode(text))", texts)
    for text, ids in zip(texts, theirs):
        assert ids == [int(i) for i in small.tokenizer.encode(text)], text
    again = page.evaluate(
        "(all) => all.map((ids) => new TextDecoder().decode(Uint8Array.from(ids.flatMap((id) => [...made.tokenizer.bytes(id)]))))", theirs
    )
    assert again == texts


def test_random_numbers_are_the_samplers(page):
    pairs = [(0, 0), (1, 0), (7, 63), (2**31 - 1, 1000), (123456789, 5)]
    assert page.evaluate("(pairs) => pairs.map(([seed, index]) => made.uniform(seed, index))", pairs) == [uniform(*pair) for pair in pairs]


def test_logits_are_the_native_engines(page, small):
    """To the bit: a prompt of several pieces and pages, then token by token."""
    text = (ROOT / "exl2nb" / "demo_model" / "evaluation.txt").read_text(encoding="utf-8")[:1500]
    ids = [int(i) for i in small.tokenizer.encode(text)]
    assert len(ids) > 300
    done = small.generate(text, max_tokens=8, temperature=0, ignore_eos=True, return_logits=True)
    page.evaluate("(ids) => made.engine.read(ids, 0)", ids)
    for i, (token, row) in enumerate(zip(done.tokens, done.logits)):
        here = np.frombuffer(base64.b64decode(page.evaluate("() => row()")), np.float32)
        native = np.asarray(row, np.float32)
        assert here.shape == native.shape and np.array_equal(here, native), f"token {i}: {np.abs(here - native).max()}"
        page.evaluate("([id, at]) => made.engine.read([id], at)", [token.id, len(ids) + i])


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.8, "top_k": 40}]
)
def test_a_seed_gives_the_same_text(opened, address, small, options):
    settings = {"temperature": 0.8, "top_p": 0.95, **options}
    native = small.generate(ASK, max_tokens=30, seed=11, **settings)
    page = opened(f"{address}/gallery/live/browser_playground.html")
    state = "() => JSON.parse(document.getElementById('exl2nb-browser').textContent).state"
    assert page.evaluate(state)["seed"] == 7
    page.get_by_role("button", name="Generate").wait_for()
    page.locator("summary", has_text="Sampling").first.click()
    for name, value in {
        "Max tokens": 30,
        "Seed": 11,
        "Temperature": settings["temperature"],
        "Top-p": settings["top_p"],
        "Top-k": settings.get("top_k", 0),
        "Min-p": settings.get("min_p", 0),
    }.items():
        box = page.get_by_role("spinbutton", name=name, exact=True)
        box.fill(str(value))
        box.dispatch_event("change")
    page.get_by_role("button", name="Generate").click()
    page.locator("text=/^Done|^Failed/").first.wait_for()
    assert page.locator(".exl2nb-error:visible").count() == 0, page.locator(".exl2nb-error").inner_text()
    shown = page.locator("[role=log], .exl2nb-log").first.inner_text()  # a line break may show as an empty line
    assert " ".join((ASK + native.text).split()) == " ".join(shown.split())


CHAINS = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 1},
    {"min_p": 0.5},
    {"temperature": 0},
    {},
]


@pytest.mark.parametrize("settings", CHAINS, ids=str)
def test_every_step_of_the_chain_is_the_microscopes(page, small, settings):
    scope = ex.widgets.SamplerMicroscope(small, ASK, max_tokens=6, seed=5, **settings)
    whole = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    ids, answer = [int(i) for i in small.tokenizer.encode(ASK)], [token for token, _ in state(scope, "_answer")]
    for at in (0, 3, 5):
        page.evaluate("([ids, rest]) => made.engine.read([...ids, ...rest], 0)", [ids, answer[:at]])
        here = page.evaluate("([s, at]) => made.explain(made.engine, s, 5, at, (id) => made.tokenizer.text(id))", [whole, at])
        scope.look(at)
        assert (here["token"], here["uniform"]) == (scope.token, scope.uniform)
        assert here["tokens"] == state(scope, "_tokens") and here["prob"] == pytest.approx(scope.prob, abs=1e-6)
        steps, line = state(scope, "_steps"), state(scope, "_line")
        for mine, theirs in zip(here["steps"], steps):
            exact = ("name", "settings", "survivors", "removed")
            assert [mine[name] for name in exact] == [theirs[name] for name in exact]
            near = ("mass", "temperature", "entropy_bits")
            assert [mine[name] for name in near] == pytest.approx([theirs[name] for name in near], abs=2e-4)
            probs, expected = mine["probs"], theirs["probs"]
            assert [p is None for p in probs] == [p is None for p in expected]
            assert [p for p in probs if p is not None] == pytest.approx([p for p in expected if p is not None], abs=1e-6)
        assert len(here["steps"]) == len(steps)
        assert [part[:2] for part in here["line"]] == [part[:2] for part in line]
        assert [part[2] for part in here["line"]] == pytest.approx([part[2] for part in line], abs=1e-6)
    scope.close()


def test_the_microscopes_sliders_draw_again(opened, address):
    page = opened(f"{address}/gallery/live/browser_microscope.html")
    table = page.locator("main").inner_text()
    page.get_by_role("slider", name="Temperature, slider").fill("1.6")
    page.wait_for_function("(before) => document.querySelector('main').innerText !== before", arg=table)
    page.wait_for_function("() => document.querySelector('main').innerText.includes('temperature 1.6')")
    assert page.locator(".exl2nb-error:visible").count() == 0


def test_files_that_are_not_whole_are_refused(page):
    size = page.evaluate("() => made.file.length")
    refuse = """async ([at, bytes, length]) => {
      const file = made.file.slice(0, length);
      if (bytes) file.set(bytes, at);
      try { await made.Engine.open(made.wasm, file); return ''; } catch (problem) { return String(problem.message ?? problem); }
    }"""
    assert page.evaluate(refuse, [0, None, size]) == ""
    huge, odd = list(struct.pack("<q", 2**40)), list(struct.pack("<q", 12345))
    cases = [
        (0, None, 40, "too short"),
        (0, None, size - 64, "bytes; expected"),
        (0, [0] * 8, size, "no model for the browser"),
        (24, huge, size, "longer than the file"),
        (32, huge, size, "longer than the file"),
        (40, huge, size, "out of range"),
        (64, huge, size, "out of range"),
        (72, [0] * 8, size, "not the code of a Program"),
        (72 + 8 * 6, odd, size, "outside of the file"),
        (72 + 8 * 5, odd, size, "unknown op"),
    ]
    for at, data, length, words in cases:
        assert words in page.evaluate(refuse, [at, data, length]), (at, words)
    seeded, wrong = random.Random(2), []
    for _ in range(60):  # single words of the header, the program and the relocations: an error, or a model that still runs; never a trap
        at = 8 * seeded.randrange(600)
        found = page.evaluate(refuse, [at, list(seeded.randbytes(8)), size])
        if "unreachable" in found or "out of bounds" in found:
            wrong.append((at, found))
    assert not wrong


def test_the_page_says_how_fast_it_is(opened, address, record_property):
    page = opened(f"{address}/gallery/browser.html")
    frame = page.locator("iframe[data-widget=browser_playground]")
    frame.scroll_into_view_if_needed()
    inside = frame.content_frame
    inside.get_by_role("button", name="Generate").click()
    inside.locator("text=/^Done/").first.wait_for()
    words = inside.locator("body").inner_text()
    assert "tok/s" in words
    print(json.dumps([line for line in words.splitlines() if "tok/s" in line]))


def test_a_failed_fetch_is_told_and_tried_again(browser, address):
    """The page says what failed; the next click fetches again."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.route("**/site/model.bin", lambda route: route.fulfill(status=503, body="busy"))
    page.goto(f"{address}/gallery/live/browser_playground.html")
    page.get_by_role("button", name="Generate").click()
    page.locator(".exl2nb-error", has_text="503").wait_for()
    page.unroute("**/site/model.bin")
    page.get_by_role("button", name="Generate").click()
    page.locator("text=/^Done/").first.wait_for()
    context.close()
