"""Speculation: tokens a second with and without draft tokens, the same text both times.

    python benchmarks/speculation.py --threads 2                                  # n-grams, the demo model, on the CPU
    python benchmarks/speculation.py --target beds/llama-60m --draft beds/llama-11m --device cuda --text unseen.txt

Tasks: `copy`: a passage stands in the prompt more than once, and greedy decoding writes it again (what an edit of a text or of code is,
mostly): pieces of `--text`, or the demo model's passage; `greedy` and `sampled`: the model goes on with pieces of a text, at temperature 0
and 0.8; `batch`: eight of them at once. Models that know a text from training, and how to copy: `tools/train_test_bed.py --models llama-60m
llama-11m`. Prints one JSON object: for each task and kind of draft the median and quartiles of tokens a second over `--rounds`, whole
requests, prompts included, and those of the ratio to plain decoding in the same round. Kinds are taken in turns, each round beginning with
the next one, and nothing is kept in the cache between them. What a GPU captures when a number of rows is first met is captured before: by
rounds with every fixed number of draft tokens, then by whole rounds until one captures nothing (`--warm-up` at most); `captured`: steps
and rounds of draft tokens that were captured in timed rounds all the same. `same_text`: whether every answer was that of plain decoding.
N-grams look at their own text alone, since every round has the same prompts; `remembered` is with earlier texts. `copied`: share of the
tokens of `copy` that are the passage's. `step_us`: of the model by rows, `draft_us`: of a round by draft tokens, as the engine measured
them on steps of one request.
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
from exl2nb.generator.speculation import MAX_DRAFT_TOKENS

PASSAGE = "It was a dark and stormy night. The old man had a boat and a dog. The rain fell on the roof of the house. "
KINDS: dict[str, Any] = {
    "off": "off",
    "ngram": {"kind": "ngram", "earlier": False},
    "remembered": {"kind": "ngram"},
    "draft": {"kind": "draft"},
}
DEMO = Path(ex.__file__).parent / "demo_model"
PROMPT, BEGUN = 64, 16  # tokens of each piece of a text; of a copy that is begun
TASKS: dict[str, dict[str, Any]] = {
    "copy": {"temperature": 0},
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "batch": {"temperature": 0},
}


def prompts_of(task: str, llm: ex.LLM, args: argparse.Namespace) -> list[list[int]]:
    """Requests of a task: those of `batch` run together, all others one after the other."""
    if task == "copy" and not args.text:
        return [llm.tokenizer.encode(PASSAGE * args.copies + PASSAGE[:12])]
    text = args.text.read_text(encoding="utf-8") if args.text else PASSAGE * 40
    ids = llm.tokenizer.encode(text[: 1 << 20])
    count = 8 if task == "batch" else args.prompts
    stride = max(1, (len(ids) - PROMPT) // count)
    starts = range(0, stride * count, stride)
    if task == "copy":
        return [[*ids[at : at + args.tokens + BEGUN] * 2, *ids[at : at + BEGUN]] for at in starts]
    return [ids[at : at + PROMPT] for at in starts]


def measure(
    llm: ex.LLM, task: str, prompts: list[list[int]], args: argparse.Namespace, kind: str, fixed: int = 0
) -> tuple[float, list[Any]]:
    """Tokens a second over all requests, and the answers. fixed: draft tokens of every step; 0: as many as pay."""
    clock = time.process_time if args.processor_time else time.perf_counter
    speculation = KINDS[kind] | {"max_tokens": fixed, "adaptive": False} if fixed else KINDS[kind]
    options = {"max_tokens": args.tokens, "ignore_eos": True, "speculation": speculation, **TASKS[task]}
    llm.cache.clear()
    start = clock()
    if task == "batch":
        found = llm.batch(prompts, **options).run()
        answers = [found[i] for i in range(len(prompts))]
    else:
        answers = [llm.generate(prompt, **options) for prompt in prompts]
    return sum(len(answer.tokens) for answer in answers) / (clock() - start), answers


def run_task(llm: ex.LLM, task: str, kinds: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """All kinds of draft in turns, after rounds that warm up."""
    prompts = prompts_of(task, llm, args)
    warm_up(llm, task, kinds, prompts, args)
    before = llm.engine.prepared
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    texts: dict[str, list[list[int]]] = {}
    stats: dict[str, list[Any]] = {}
    for number in range(args.rounds):
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            speed, answers = measure(llm, task, prompts, args, kind)
            speeds[kind].append(speed)
            texts[kind] = [[token.id for token in answer.tokens] for answer in answers]
            stats[kind] = [answer.speculation for answer in answers if answer.speculation is not None]
    found: dict[str, Any] = {"captured": llm.engine.prepared - before}
    for kind, each in speeds.items():
        found[kind] = {"median_tok_s": round(statistics.median(each), 1), "quartiles_tok_s": quartiles(each, 1)}
        if kind == "off":
            continue
        ratios = [one / plain for one, plain in zip(each, speeds["off"])]
        proposed, accepted = (sum(getattr(one, name) for one in stats[kind]) for name in ("proposed", "accepted"))
        steps = sum(one.steps + one.plain_steps for one in stats[kind])
        found[kind] |= {
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": quartiles(ratios, 3),
            "same_text": texts[kind] == texts["off"],
            "acceptance": round(accepted / max(1, proposed), 3),
            "proposed_per_step": round(proposed / max(1, steps), 2),
            "tokens_per_step": round((steps + accepted) / max(1, steps), 2),
        }
    if task == "copy" and args.text:
        pairs = [pair for prompt, answer in zip(prompts, texts["off"]) for pair in zip(prompt[BEGUN:], answer)]
        found["copied"] = round(statistics.mean(a == b for a, b in pairs), 3)
    return found


def warm_up(llm: ex.LLM, task: str, kinds: list[str], prompts: list[list[int]], args: argparse.Namespace) -> None:
    """Every number of draft tokens once on a GPU, then rounds as they are timed until nothing is captured in one."""
    if llm.model.device != "cpu":
        for kind in kinds[1:]:
            for fixed in range(1, MAX_DRAFT_TOKENS + 1):
                measure(llm, task, prompts if task == "batch" else prompts[:1], args, kind, fixed)
    for _ in range(args.warm_up):
        before = llm.engine.prepared
        for kind in kinds:
            measure(llm, task, prompts, args, kind)
        if llm.engine.prepared == before:
            break


def quartiles(values: list[float], digits: int) -> list[float]:
    """The first and the third."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return [round(low, digits), round(high, digits)]


def parts(llm: ex.LLM) -> dict[str, Any]:
    """What the engine measured: microseconds of a step by rows, and of a round of the draft model by draft tokens."""
    engine = llm.engine
    found = {"step_us": {rows: round(engine.step_times.seconds(rows) * 1e6, 1) for rows in range(1, 65) if engine.step_times.knows(rows)}}
    if engine.drafter is not None:
        found["draft_us"] = {count: round(engine.drafter.seconds(count) * 1e6, 1) for count in range(1, 8)}
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
    parser.add_argument("--warm-up", type=int, default=4, help="rounds before the timed ones, at most")
    parser.add_argument(
        "--processor-time", action="store_true", help="of the process instead of wall time: for one thread, on a shared machine"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with ex.load(args.target, draft=args.draft, device=args.device, context=1024, progress=None) as llm:
        found: dict[str, Any] = {"target": llm.name, "draft": args.draft and Path(args.draft).name, "device": llm.model.device}
        found |= {"threads": args.threads, "tokens": args.tokens}
        for task in args.tasks or (list(TASKS) if args.draft else ["copy"]):
            kinds = ["off", "ngram", "remembered"] if task == "copy" else ["off", "ngram", *(["draft"] if args.draft else [])]
            found[task] = run_task(llm, task, kinds, args) | parts(llm)
            print(json.dumps({task: found[task]}), flush=True)
    print(json.dumps(found, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
