"""What a decode step costs for 1 to 64 rows, beside the one-row step of the same run and beside reading the weights once.

    python benchmarks/rows.py tinyllama llama2-7b llama3-8b                  # shapes of make_random_model.py, about 4.0 bits
    python benchmarks/rows.py llama2-70b:2.55 --rows 1 2 4 8 16 --context 128
    python benchmarks/rows.py llama3-8b --out before.json                    # then, with other sources: --before before.json

Every row is a sequence of its own with `--context` tokens. Steps are captured and replayed without the engine (cuda_step.py), so the host's
share is not in them. The floor is the bytes of every matrix plus the keys and values, over the bandwidth that is measured here. Prints a
table for each model; models stay in `--models`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from cuda_step import PAGE, REPLAYS, WARM_UP, CapturedStep

import exl2nb as ex

ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]
PROBE = 4 << 30  # bytes that are read to learn the bandwidth
PEAK = 15  # reads of them


def bandwidth() -> float:
    """Bytes a second that the GPU reads."""
    data = torch.ones(PROBE // 8, dtype=torch.int64, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(PEAK):
        begin.record()
        data.sum()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return PROBE / best


def measured(folder: Path, rows: list[int], context: int, rounds: int, read: float) -> dict[str, dict[str, float]]:
    """Rows -> microseconds of a step, and the floor."""
    pages, found = (context + 64) // PAGE + 1, {}
    with ex.load(
        folder, device="cuda", context=pages * PAGE, cache_tokens=max(rows) * pages * PAGE, max_sequences=max(16, *rows), progress=None
    ) as llm:
        weights = sum(int(head[32:40].view(torch.int64)) for head in llm.model.gpu.program.heads.values())
        token = sum(pool[0].nbytes // PAGE for part in (llm.engine.cache.k, llm.engine.cache.v) for pool in part)
        steps = {count: CapturedStep(llm, count, context, pages) for count in rows}
        for step in steps.values():
            step.replay(WARM_UP)
        times: dict[int, list[float]] = {count: [] for count in rows}
        for _ in range(rounds):  # in turns
            for count, step in steps.items():
                times[count].append(step.replay(REPLAYS))
    for count in rows:
        floor = (weights + token * context * count) / read
        found[str(count)] = {"us": round(statistics.median(times[count]), 1), "floor_us": round(floor * 1e6, 1)}
    return found


def table(name: str, now: dict[str, dict[str, float]], before: dict[str, dict[str, float]] | None) -> str:
    """Markdown: microseconds, over one row, over the floor."""
    lines = [f"**{name}**", "", "| rows | us | over one row | over the floor |" + (" before, us | over one row |" if before else "")]
    lines.append("|---" * (6 if before else 4) + "|")
    for count, it in now.items():
        line = f"| {count} | {it['us']:.0f} | {it['us'] / now['1']['us']:.2f} | {it['us'] / it['floor_us']:.2f} |"
        if before:
            was = before[count]["us"]
            line += f" {was:.0f} | {was / before['1']['us']:.2f} |"
        lines.append(line)
    slower = [(a, b) for a, b in zip(now, list(now)[1:]) if now[a]["us"] > now[b]["us"]]
    return "\n".join([*lines, "", f"slower than more rows: {slower or 'none'}", ""])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="SHAPE or SHAPE:BPW")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, help="keep the numbers as JSON")
    parser.add_argument("--before", type=Path, help="numbers of other sources, from --out on the same machine")
    args = parser.parse_args()
    before = json.loads(args.before.read_text()) if args.before else {}
    read, found = bandwidth(), {}
    print(f"{torch.cuda.get_device_name()}, reads {read / 1e9:.0f} GB/s, context {args.context}\n")
    for name in args.shapes:
        shape, _, bpw = name.partition(":")
        folder = args.models / name.replace(":", "-")
        if not (folder / "config.json").exists():
            maker = Path(__file__).with_name("make_random_model.py")
            subprocess.run([sys.executable, str(maker), shape, str(folder), "--bpw", bpw or "4.0"], check=True, stdout=subprocess.DEVNULL)
        found[name] = measured(folder, sorted({1, *args.rows}), args.context, args.rounds, read)
        print(table(name, found[name], before.get(name)))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
