"""Speculation: tokens a second with and without draft tokens, the same text both times.

    python benchmarks/speculation.py --threads 2                                  # n-grams, the demo model, on the CPU
    python benchmarks/speculation.py --target beds/llama-60m --draft beds/llama-11m --device cuda --text unseen.txt

Tasks: `copy`: a passage stands in the prompt several times, and greedy decoding writes it again (what an edit of a text or of code is,
mostly); `greedy` and `sampled`: the model goes on with pieces of a text, at temperature 0 and 0.8; `batch`: eight of them at once. Models
that know a text from training: `tools/train_test_bed.py --models llama-60m llama-11m`. Prints one JSON object: for each task and kind of
draft the best and median tokens a second of `--rounds`, whole requests, prompts included, taken in turns, and the ratio of the
medians to plain decoding. `same_text`: whether every answer was that of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import exl2nb as ex

PASSAGE = "It was a dark and stormy night. The old man had a boat and a dog. The rain fell on the roof of the house. "
DEMO = Path(ex.__file__).parent / "demo_model"
PROMPT = 64  # tokens of each piece of a text
TASKS: dict[str, dict[str, Any]] = {
    "copy": {"temperature": 0},
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "batch": {"temperature": 0},
}


def prompts_of(task: str, llm: ex.LLM, args: argparse.Namespace) -> list[list[int]]:
    """Requests of a task: those of `batch` run together, all others one after the other."""
    if task == "copy":
        return [llm.tokenizer.encode(PASSAGE * args.copies + PASSAGE[:12])]
    text = args.text.read_text(encoding="utf-8") if args.text else PASSAGE * 40
    ids = llm.tokenizer.encode(text[: 1 << 20])
    count = 8 if task == "batch" else args.prompts
    stride = max(1, (len(ids) - PROMPT) // count)
    return [ids[at : at + PROMPT] for at in range(0, stride * count, stride)]


def measure(llm: ex.LLM, task: str, prompts: list[list[int]], tokens: int, kind: str) -> tuple[float, list[Any]]:
    """Tokens a second over all requests, and the answers."""
    options = {"max_tokens": tokens, "ignore_eos": True, "speculation": kind, **TASKS[task]}
    llm.cache.clear()
    start = time.perf_counter()
    if task == "batch":
        found = llm.batch(prompts, **options).run()
        answers = [found[i] for i in range(len(prompts))]
    else:
        answers = [llm.generate(prompt, **options) for prompt in prompts]
    return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - start), answers


def run_task(llm: ex.LLM, task: str, kinds: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """All kinds of draft in turns, after a round that warms up."""
    prompts = prompts_of(task, llm, args)
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    texts: dict[str, list[list[int]]] = {}
    stats: dict[str, list[Any]] = {}
    for number in range(args.rounds + 1):
        for kind in kinds:
            speed, answers = measure(llm, task, prompts, args.tokens, kind)
            if number:
                speeds[kind].append(speed)
            texts[kind] = [[token.id for token in answer.tokens] for answer in answers]
            stats[kind] = [answer.speculation for answer in answers if answer.speculation is not None]
    plain, found = statistics.median(speeds["off"]), {}
    for kind, each in speeds.items():
        found[kind] = {"best_tok_s": round(max(each), 1), "median_tok_s": round(statistics.median(each), 1)}
        if kind == "off":
            continue
        proposed, accepted = (sum(getattr(one, name) for one in stats[kind]) for name in ("proposed", "accepted"))
        steps = sum(one.steps + one.plain_steps for one in stats[kind])
        found[kind] |= {
            "ratio": round(statistics.median(each) / plain, 3),
            "best_ratio": round(max(each) / max(speeds["off"]), 3),
            "same_text": texts[kind] == texts["off"],
            "acceptance": round(accepted / max(1, proposed), 3),
            "proposed_per_step": round(proposed / max(1, steps), 2),
            "tokens_per_step": round((steps + accepted) / max(1, steps), 2),
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", "--model", default=str(DEMO), help="model directory; the demo model")
    parser.add_argument("--draft", help="draft model directory, or 'self'")
    parser.add_argument("--device", help="cpu, cuda; what load chooses")
    parser.add_argument("--text", type=Path, help="plain text whose pieces are the prompts; else the passage")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="default: copy, and the others with a draft model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--copies", type=int, default=4, help="times the passage stands in the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with ex.load(args.target, draft=args.draft, device=args.device, context=1024, progress=None) as llm:
        found: dict[str, Any] = {"target": llm.name, "draft": args.draft and Path(args.draft).name, "device": llm.model.device}
        found |= {"threads": args.threads, "tokens": args.tokens}
        for task in args.tasks or (list(TASKS) if args.draft else ["copy"]):
            kinds = ["off", "ngram", *(["draft"] if args.draft and task != "copy" else [])]
            found[task] = run_task(llm, task, kinds, args)
            print(json.dumps({task: found[task]}), flush=True)
    print(json.dumps(found, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
