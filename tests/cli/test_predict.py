"""`bench --predict`: near what H100 and H200 were measured at, and sane elsewhere."""

from dataclasses import replace

import pytest

from exl2nb.cli.predict import CARDS, FITTED, Work, predict

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary, head_dim
    "tinyllama": (2048, 5632, 22, 32, 4, 32000, 64),
    "llama2-7b": (4096, 11008, 32, 32, 32, 32000, 128),
    "llama3-8b": (4096, 14336, 32, 32, 8, 128256, 128),
    "llama2-70b": (8192, 28672, 80, 64, 8, 32000, 128),
}
MEASURED = [  # milliseconds of a step at context 128, benchmarks/RESULTS.md and log/2026-11-25.md; bits with scales and permutations
    ("h200", "tinyllama", 4.06, 0.472), ("h200", "tinyllama", 3.06, 0.466), ("h200", "llama2-7b", 4.06, 1.309),
    ("h200", "llama3-8b", 4.06, 1.48), ("h200", "llama2-70b", 2.55, 7.53), ("h100", "tinyllama", 4.06, 0.478),
    ("h100", "tinyllama", 3.06, 0.466), ("h100", "llama2-7b", 4.06, 1.472), ("h100", "llama3-8b", 4.06, 1.773),
]  # fmt: skip


def work(name, bpw):
    h, inner, layers, heads, kv, vocab, dim = SHAPES[name]
    weights, head = 2 * h * heads * dim + 2 * h * kv * dim + 3 * h * inner, h * vocab
    cache = 2 * 2 * layers * kv * dim * 128
    return Work(layers, weights, weights * bpw / 8, head, head * 6.4 / 8, cache, layers * weights * bpw / 8 + head * 2.8)


@pytest.mark.parametrize(("card", "name", "bpw", "ms"), MEASURED)
def test_near_what_was_measured(card, name, bpw, ms):
    assert predict(CARDS[card], work(name, bpw))["decode_ms"] == pytest.approx(ms, rel=FITTED)


@pytest.mark.parametrize("card", CARDS)
def test_a_step_takes_at_least_what_it_reads_and_multiplies(card):
    found, slower = (predict(CARDS[card], work("llama3-8b", bpw)) for bpw in (3.0, 5.0))
    assert found["decode_ms"] >= max(found["read_ms"], found["multiply_ms"]) + found["gaps_ms"] - 0.01
    assert found["bound"] == ("multiplying" if found["multiply_ms"] > found["read_ms"] else "reading")
    assert slower["decode_ms"] > found["decode_ms"]
    assert not predict(CARDS[card], replace(work("llama3-8b", 4.0), weight_bytes=200e9))["fits"]


def test_the_command(cli, cli_json, refused):
    found = cli_json("bench", "demo", "--predict", "t4")
    assert found["prediction"]
    assert found["fits"]
    assert found["decode_tok_s"] < cli_json("bench", "demo", "--predict", "4090")["decode_tok_s"]
    more = [cli_json("bench", "demo", "--predict", "l4", "--context", "1000", "--cache", mode)["read_ms"] for mode in ("fp16", "q4")]
    assert more[0] > more[1] > found["read_ms"] * 0.5
    assert "no card of this kind was measured" in cli("bench", "demo", "--predict", "a100")[1]
    assert "within 9%" in cli("bench", "demo", "--predict", "h200")[1]
    assert "leave --batch and --report out" in refused("bench", "demo", "--predict", "t4", "--batch", "2")
    assert "bench" in refused("bench", "demo", "--predict", "k80")
