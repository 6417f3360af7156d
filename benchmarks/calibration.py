"""What the mixed calibration text costs in a model's own domain, and what it gains outside: KL by kind of text.

    python benchmarks/calibration.py train out/mixed-model         # a second model: a small Llama on four fifths of the mixed text (CPU)
    python benchmarks/calibration.py compare demo out/mixed-model  # converts each on the demo model's text, and on those four fifths

What is measured on was neither trained nor calibrated on: every fifth record of each kind, and the demo model's evaluation text.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import exl2nb as ex
from exl2nb.converter.calibration import calibration_rows
from exl2nb.eval.comparison import compare_models

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(ex.__file__).parent


def records() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Texts by kind: to train and calibrate on, and held out."""
    kept: dict[str, list[str]] = {}
    held_out: dict[str, list[str]] = {}
    seen: dict[str, int] = {}
    with lzma.open(PACKAGE / "calibration_text" / "mixed.jsonl.xz", "rt", encoding="utf-8") as file:
        for record in map(json.loads, file):
            text = record.get("text") or "\n\n".join(f"{m['role'].title()}: {m['content']}" for m in record["messages"])
            kind, number = record["kind"], seen.get(record["kind"], 0)
            seen[kind] = number + 1
            (held_out if number % 5 == 4 else kept).setdefault(kind, []).append(text)
    return kept, held_out


def train(out: Path, steps: int, batch: int) -> None:
    """A small Llama with the tool that trained the demo model."""
    sys.path.insert(0, str(ROOT / "tools"))
    import train_demo_model as tool

    kept, _ = records()
    texts = [text for some in kept.values() for text in some]
    tokenizer = tool.train_tokenizer(texts, 2048)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_layers": 4, "num_heads": 3, "num_kv_heads": 1}
    shape = tool.Shape(vocab_size=tokenizer.get_vocab_size(), context=256, **sizes)
    recipe = tool.Recipe(steps=steps, batch=batch, warmup=50, peak_lr=3e-3)
    model, loss, _ = tool.train(tool.encode_all(tokenizer, texts), shape, recipe, device=torch.device("cpu"), compiled=False)
    tool.save_model(model, tokenizer, out)
    print(f"{out}: training loss {loss:.3f}")


def compare(models: list[str], bpw: float, rows: int, used: int, length: int) -> None:
    """One table for each model."""
    kept, held_out = records()
    mixed = [text for some in kept.values() for text in some]
    demo_text = (PACKAGE / "demo_model" / "calibration.txt").read_text(encoding="utf-8")
    judged = {"demo model's": (PACKAGE / "demo_model" / "evaluation.txt").read_text(encoding="utf-8")}
    judged |= {kind: "\n\n".join(texts) for kind, texts in held_out.items()}
    for name in models:
        source = PACKAGE / "demo_model" if name == "demo" else Path(name)
        found: dict[str, dict[str, Any]] = {kind: {} for kind in judged}
        with tempfile.TemporaryDirectory() as folder, ex.load(source, progress=None, context=length) as dense:
            ids = {kind: calibration_rows(dense.tokenizer, text, rows=rows, length=length) for kind, text in judged.items()}
            for label, text in (("demo text", [demo_text]), ("mixed", mixed)):
                out = Path(folder) / label.replace(" ", "-")
                ex.convert(source, out, bpw=bpw, calibration=text, length=length, rows=used, report_rows=0, progress=None)
                with ex.load(out, progress=None, context=length) as made:
                    for kind, rows_of_it in ids.items():
                        result = compare_models(dense.engine.shared_model, made.engine.shared_model, rows_of_it, None)
                        found[kind][label] = result.kl_mean
        print(f"\n{name}, {bpw:g} bpw: KL in nats per token\n")
        print("| text | calibrated on the demo text | on the mixed text | ratio |\n|---|---|---|---|")
        for kind, kl in found.items():
            print(f"| {kind} | {kl['demo text']:.3g} | {kl['mixed']:.3g} | {kl['mixed'] / kl['demo text']:.2f} |")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("train")
    first.add_argument("out", type=Path)
    first.add_argument("--steps", type=int, default=900)
    first.add_argument("--batch", type=int, default=8)
    second = commands.add_parser("compare")
    second.add_argument("models", nargs="+")
    second.add_argument("--bpw", type=float, default=3.0)
    second.add_argument("--rows", type=int, default=16)
    second.add_argument("--calibration-rows", type=int, default=32)
    second.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    if args.command == "train":
        train(args.out, args.steps, args.batch)
    else:
        compare(args.models, args.bpw, args.rows, args.calibration_rows, args.length)


if __name__ == "__main__":
    main()
