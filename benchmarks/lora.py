"""What adapters cost: decode tok/s with a rank-16 adapter on every matrix of every layer over none, in turns; one text, and 16 of them.

python benchmarks/lora.py [MODEL] [--rank 16] [--rounds 7] [--device cpu]
python benchmarks/make_random_model.py llama3-8b OUT --bpw 4.0 && python benchmarks/lora.py OUT --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import exl2nb as ex
from tests.llm.lora_maker import write_lora

PROMPT = [(37 * i) % 190 + 5 for i in range(16)]  # ids: models of random codes have no text


def tok_s(llm: ex.LLM, loras: list[str | None], tokens: int) -> float:
    """New tokens of all texts per second of decoding: from when every text has its first token. Prompts with many adapters take a while."""
    prompts = [{"prompt": PROMPT, "lora": lora} for lora in loras]
    begun, seen, before, start = set(), 0, 0, 0.0
    for event in llm.batch(prompts, max_tokens=tokens, temperature=0, ignore_eos=True):
        seen += len(event.tokens)
        if event.tokens and len(begun) < len(prompts):
            begun.add(event.id)
            before, start = seen, time.perf_counter()
    return (seen - before) / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    options = {"device": given.device, "progress": None, "max_sequences": 16, "cache_tokens": 16384}
    load = (lambda: ex.demo(**options)) if given.model == "demo" else (lambda: ex.load(given.model, **options))
    with load() as llm, tempfile.TemporaryDirectory() as folder:
        names = [f"a{i}" for i in range(16)]
        for i, name in enumerate(names):
            llm.loras.load(write_lora(Path(folder) / name, llm.config, seed=i, rank=given.rank, alpha=float(given.rank)), progress=None)
        cases: dict[str, list[str | None]] = {
            "1 text": [None], "1 text, 1 adapter": ["a0"], "16 texts": [None] * 16, "16 texts, 1 adapter": ["a0"] * 16,
            "16 texts, 16 adapters": list(names),
        }  # fmt: skip
        found: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(given.rounds):
            for case, loras in cases.items():
                found[case].append(tok_s(llm, loras, given.tokens))
        rows = {case: {"tok_s": round(max(runs)), "median": round(statistics.median(runs))} for case, runs in found.items()}
        for case, row in rows.items():
            plain = found[case.split(",")[0]]
            pairs = [b / a for a, b in zip(found[case], plain)]
            row["slower"] = round(statistics.median(pairs) - 1, 3)
            row["slower_at_best"] = round(max(plain) / max(found[case]) - 1, 3)
        print(json.dumps({"model": llm.name, "rank": given.rank, "device": llm.model.device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
