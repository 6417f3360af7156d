"""Speculation on the demo model: tok/s of decoding with and without guesses, the same text both times.

    python benchmarks/speculation.py --threads 2

The task is a copy: a passage stands in the prompt, and greedy decoding writes it again (what an edit of a text or of code is, mostly).
Prints one JSON object: for each kind of guess the best and median tok/s of `--rounds`, taken in turns with plain decoding, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

import exl2nb as ex
from exl2nb.generator.speculation import Speculation

PASSAGE = "It was a dark and stormy night. The old man had a boat and a dog. The rain fell on the roof of the house. "
DEMO = Path(ex.__file__).parent / "demo_model"


def measure(llm: ex.LLM, prompt: str, tokens: int, speculation: Speculation | str) -> tuple[float, ex.llm.Completion]:
    done = llm.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True, speculation=speculation)
    return done.tokens_per_second, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO), help="model directory; the demo model")
    parser.add_argument("--draft", help="draft model directory: measures speculation='draft' too")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--copies", type=int, default=4, help="times the passage stands in the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompt = PASSAGE * args.copies + PASSAGE[:12]
    kinds = {"plain": "off", "ngram": "ngram", **({"draft": "draft"} if args.draft else {})}
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ex.load(args.model, draft=args.draft, progress=None) as llm:
        texts, stats = {}, {}
        for speculation in kinds.values():
            measure(llm, prompt, 32, speculation)
        for _ in range(args.rounds):
            for kind, speculation in kinds.items():
                speed, done = measure(llm, prompt, args.tokens, speculation)
                speeds[kind].append(speed)
                texts[kind], stats[kind] = done.text, done.speculation
    assert len(set(texts.values())) == 1, "speculation changed the text"
    result = {"model": Path(args.model).name, "threads": args.threads, "tokens": args.tokens, "copied": texts["plain"][:60]}
    for kind, found in speeds.items():
        result[kind] = {"best_tok_s": round(max(found), 1), "median_tok_s": round(statistics.median(found), 1)}
        if stats[kind] is not None:
            result[kind]["ratio"] = round(max(found) / max(speeds["plain"]), 2)
            result[kind]["acceptance"] = str(stats[kind])
    print(json.dumps(result, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
