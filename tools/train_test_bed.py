"""Train models that a claim must also hold on: a Llama of 60 million weights with GQA, a Qwen2 of 40 million with biases, and a Llama of 11
million that drafts for the first (`benchmarks/speculation.py`).

They are not committed. The trainer is `train_demo_model.py`; text, tokenizer and rows are the same for all of them.

    python tools/train_test_bed.py corpus.txt beds/ --compile                 # both, within 15 minutes, on a GPU
    python tools/train_test_bed.py corpus.txt beds/ --models qwen2-40m --seconds 300
    python tools/train_test_bed.py corpus.txt beds/ --toy                     # tiny ones, within a minute on two CPU cores

The text is plain (.txt, also as .xz), paragraphs apart by blank lines. It should have tens of megabytes: more than PASSES passes would be
learned by heart. A model that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from train_demo_model import Recipe, Shape, clean, encode_all, save_model, train, train_tokenizer

SHAPES = {
    "llama-60m": Shape(8192, hidden_size=512, intermediate_size=1664, num_layers=16, num_heads=8, num_kv_heads=2),
    "qwen2-40m": Shape(
        8192, hidden_size=384, intermediate_size=1344, num_layers=18, num_heads=6, num_kv_heads=2, rope_theta=1e6, qkv_bias=True
    ),
    "llama-11m": Shape(8192, hidden_size=384, intermediate_size=1696, num_layers=2, num_heads=6, num_kv_heads=2),  # few steps: a draft
}
FACTS = "training.json"  # in a model's directory, written last
RECIPE = Recipe(steps=3000, batch=64, peak_lr=1e-3)
TOY_VOCABULARY = 512
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "context": 64}
TOY_RECIPE = Recipe(steps=60, batch=8, warmup=10)
PASSES = 20  # of the text, at most
PROBED = 5  # steps that are timed, after as many that are not
SPARE = 0.85  # of the time is planned with


def read_text(path: Path) -> str:
    """Plain text of a file, cleaned."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    text = clean(raw.decode("utf-8", errors="replace"))
    if not text:
        raise SystemExit(f"train_test_bed: {path} has no text; give a file of plain text")
    return text


def steps_within(stream: torch.Tensor, shape: Shape, recipe: Recipe, seconds: float, device: torch.device, *, compiled: bool) -> int:
    """Steps of the recipe, or as many as fit: the cost of one is measured first, at the price of 3 * PROBED of them."""
    begin = time.monotonic()
    train(stream, shape, replace(recipe, steps=PROBED), device=device, compiled=compiled)
    middle = time.monotonic()
    train(stream, shape, replace(recipe, steps=2 * PROBED), device=device, compiled=compiled)
    end = time.monotonic()
    each = max((end - middle) / (2 * PROBED), 1e-6)  # what is compiled by then is not compiled again
    return max(1, min(recipe.steps, int(SPARE * (seconds - (end - begin)) / each)))


def parameters_of(shape: Shape) -> int:
    """Weights of the matrices."""
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 2 * shape.vocab_size * shape.hidden_size + shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file of plain text, .txt or .xz")
    parser.add_argument("out", type=Path, help="folder; each model gets a directory of its name")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["llama-60m", "qwen2-40m"])
    parser.add_argument("--seconds", type=float, default=900.0, help="for all models together, by size; each trains as many steps as fit")
    parser.add_argument("--steps", type=int, help=f"at most (default {RECIPE.steps})")
    parser.add_argument("--passes", type=float, default=PASSES, help=f"of the text, at most (default {PASSES})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="tiny networks, few steps, to see that it works")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train and write the model directories; returns the exit code."""
    args = parse(argv)
    begin, device, recipe = time.monotonic(), torch.device(args.device), TOY_RECIPE if args.toy else RECIPE
    recipe = replace(recipe, seed=args.seed, steps=recipe.steps if args.steps is None else args.steps)
    missing = [name for name in args.models if not (args.out / name / FACTS).exists()]
    if not missing:
        print(f"{args.out}: every model is there")
        return 0
    text = read_text(args.text)
    tokenizer = train_tokenizer([text], TOY_VOCABULARY if args.toy else SHAPES[missing[0]].vocab_size)
    stream = encode_all(tokenizer, [text])
    print(f"{len(text):,} characters, {len(stream):,} tokens, vocabulary {tokenizer.get_vocab_size()}", file=sys.stderr)
    for at, name in enumerate(missing):
        shape = replace(SHAPES[name], vocab_size=tokenizer.get_vocab_size(), **(TOY if args.toy else {}))
        share = parameters_of(SHAPES[name]) / sum(parameters_of(SHAPES[one]) for one in missing[at:])
        seconds = (args.seconds - (time.monotonic() - begin)) * share
        most = max(1, int(args.passes * len(stream) / (recipe.batch * shape.context)))
        steps = steps_within(stream, shape, replace(recipe, steps=min(recipe.steps, most)), seconds, device, compiled=args.compile)
        model, loss = train(stream, shape, replace(recipe, steps=steps), device=device, compiled=args.compile)
        save_model(model, tokenizer, args.out / name, max_shard_bytes=1 << 30)
        parameters, passes = sum(p.numel() for p in model.parameters()), steps * recipe.batch * shape.context / len(stream)
        facts = {"parameters": parameters, "steps": steps, "passes": round(passes, 2), "training_loss": loss, "seed": args.seed}
        (args.out / name / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        print(
            f"{args.out / name}: {parameters:,} parameters, {steps} steps ({passes:.1f} passes of the text), "
            f"training loss {loss:.4f} nats (perplexity {math.exp(loss):.2f})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
