"""A made-up DemoResult with the shape of a real one: 12 layers, 7 matrices, three bitrates."""

import math
import random

from exl2nb.cli.report import DemoResult, Entry
from exl2nb.eval.comparison import EDGES

MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
WORDS = "It was the <best> of times & it was the worst of times, and nobody knew which of the two it was."
PASSAGE = tuple(f" {word}" for word in WORDS.split(" "))


def entry(name, target, bpw, size, ppl, kl, p99, top1, speed, seconds):
    rng = random.Random(name)
    bits = {
        f"model.layers.{layer}.{matrix}": 16.0 if target is None else min(8.1, max(2.1, rng.gauss(bpw, 0.8)))
        for layer in range(12)
        for matrix in MATRICES
    }
    centre = math.log10(kl or 1)
    weights = [math.exp(-((math.log10(max(edge, 3e-5)) - centre) ** 2)) for edge in EDGES]
    histogram = [(a, b, w / sum(weights)) for a, b, w in zip(EDGES, [*EDGES[1:], math.inf], weights)]
    return Entry(
        name=name,
        path=f"exl2nb-demo/{name.replace(' ', '')}",
        target_bpw=target,
        bpw=bpw,
        head_bits=16.0 if target is None else 6.04,
        bytes=size,
        ppl=ppl,
        kl_mean=kl,
        kl_p99=p99,
        top1=top1,
        decode_tok_s=speed,
        convert_s=seconds,
        sample=" the gate was open. <b>Nobody</b> had passed that way for years, she thought, and she went on to the door of the house.",
        bits=bits,
        histogram=histogram if target else [],
        passage_kl=[rng.expovariate(1 / (kl + 1e-9)) for _ in PASSAGE] if target else [],
    )


def sample_result():
    return DemoResult(
        entries=(
            entry("FP16", None, 16.0, 23_093_392, 24.58, 0.0, 0.0, 1.0, 640, None),
            entry("6 bpw", 6.0, 5.996, 10_150_000, 24.72, 0.0061, 0.06, 0.951, 980, 8.1),
            entry("4 bpw", 4.0, 3.998, 7_790_000, 26.1, 0.094, 0.71, 0.816, 1190, 7.9),
            entry("3 bpw", 3.0, 2.999, 6_610_000, 33.2, 0.412, 2.9, 0.64, 1370, 52.0),
        ),
        prompt="The old house stood at the end of the lane, and",
        rows=32,
        length=512,
        passage=PASSAGE,
        machine={"Engine": "compiled, avx512", "Processor": "Some <CPU>, 2 threads", "System": "Linux x86_64, Python 3.11, torch 2.13"},
        total_s=112.0,
        created="2026-11-21 05:00",
        version="0.1.0",
        report="exl2nb-demo/report.html",
    )
