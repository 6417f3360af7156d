"""Train models that a claim must also hold on: a Llama of 60 million weights with GQA, a Qwen2 of 40 million with biases, and a Llama of 11
million that drafts for the first (`benchmarks/speculation.py`).

They are not committed. The trainer is `train_demo_model.py`; text, tokenizer and rows are the same for all of them.

    python tools/train_test_bed.py corpus.txt beds/ --compile                 # both, within 15 minutes, on a GPU
    python tools/train_test_bed.py corpus.txt beds/ --models qwen2-40m --seconds 300
    python tools/train_test_bed.py corpus.txt beds/ --toy                     # tiny ones, within a minute on two CPU cores

The text is plain (.txt, also as .xz), paragraphs apart by blank lines. It should have tens of megabytes: more than PASSES passes would be
learned by heart. Half of the rows repeat passages, so that a model also learns to copy. A draft learns the distributions of its target
on the same rows. `make_stories.py` writes text that is learned quickly. A model that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train_demo_model import Llama, Recipe, Shape, clean, encode_all, save_model, train, train_tokenizer

SHAPES = {
    "llama-60m": Shape(8192, hidden_size=512, intermediate_size=1664, num_layers=16, num_heads=8, num_kv_heads=2),
    "qwen2-40m": Shape(
        8192, hidden_size=384, intermediate_size=1344, num_layers=18, num_heads=6, num_kv_heads=2, rope_theta=1e6, qkv_bias=True
    ),
    "llama-11m": Shape(8192, hidden_size=512, intermediate_size=416, num_layers=2, num_heads=8, num_kv_heads=2),  # few layers: a draft
}
TARGETS = {"llama-11m": "llama-60m"}  # whose drafts they are: they learn from it, where both are trained
FACTS = "training.json"  # in a model's directory, written last
TOY_VOCABULARY = 512
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "context": 64}
PASSES = 20  # of the text, at most
COPIES = 0.5  # of the rows repeat passages
RECIPE = Recipe(steps=3000, batch=64, peak_lr=1e-3, copies=COPIES)
TOY_RECIPE = Recipe(steps=60, batch=8, warmup=10, copies=COPIES)
DRAFT_SHARE, DRAFT_BATCH, DRAFT_LR = 0.4, 0.5, 2.0  # of the time, for a draft; of its target's rows of a step, and of the learning rate


def read_text(path: Path) -> str:
    """Plain text of a file, cleaned."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    text = clean(raw.decode("utf-8", errors="replace"))
    if not text:
        raise SystemExit(f"train_test_bed: {path} has no text; give a file of plain text")
    return text


def parameters_of(shape: Shape) -> int:
    """Weights of the matrices."""
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 2 * shape.vocab_size * shape.hidden_size + shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def load_bed(folder: Path, shape: Shape, device: torch.device) -> Llama:
    """A model that was written before."""
    model = Llama(shape)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        model.load_state_dict(load_file(folder / file), strict=False)
    return model.to(device)


def weight_of(name: str, trained: Collection[str], missing: Collection[str]) -> float:
    """Its share of the time, beside others': by size, or what a draft of one that is trained in the same run needs."""
    target = TARGETS.get(name)
    if target in trained or target in missing:
        return DRAFT_SHARE * parameters_of(SHAPES[str(target)]) / (1 - DRAFT_SHARE)
    return parameters_of(SHAPES[name])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file of plain text, .txt or .xz")
    parser.add_argument("out", type=Path, help="folder; each model gets a directory of its name")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["llama-60m", "qwen2-40m"])
    parser.add_argument("--seconds", type=float, default=900.0, help="for all models together, by size; each trains as many steps as fit")
    parser.add_argument("--steps", type=int, help=f"at most (default {RECIPE.steps})")
    parser.add_argument("--batch", type=int, help=f"rows of a step (default {RECIPE.batch})")
    parser.add_argument("--peak-lr", type=float, help=f"learning rate after warm-up (default {RECIPE.peak_lr})")
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
    given = {"steps": args.steps, "batch": args.batch, "peak_lr": args.peak_lr}
    recipe = replace(recipe, seed=args.seed, **{name: value for name, value in given.items() if value is not None})
    missing = [name for name in args.models if not (args.out / name / FACTS).exists()]
    if not missing:
        print(f"{args.out}: every model is there")
        return 0
    text = read_text(args.text)
    there = [name for name in SHAPES if (args.out / name / FACTS).exists()]
    if there:  # all models of a folder have one tokenizer
        tokenizer = Tokenizer.from_file(str(args.out / there[0] / "tokenizer.json"))
    else:
        size = TOY_VOCABULARY if args.toy else SHAPES[missing[0]].vocab_size
        tokenizer = train_tokenizer([text[at : at + (1 << 20)] for at in range(0, len(text), max(1 << 20, len(text) // 6))], size)
    stream = encode_all(tokenizer, [text])
    seen = f"{len(text):,} characters, {len(stream):,} tokens, vocabulary {tokenizer.get_vocab_size()}, {time.monotonic() - begin:.0f} s"
    print(seen, file=sys.stderr, flush=True)
    toy = {"vocab_size": tokenizer.get_vocab_size(), **(TOY if args.toy else {})}
    models = {name: load_bed(args.out / name, replace(SHAPES[name], **toy), device) for name in there if name in TARGETS.values()}
    missing.sort(key=lambda name: name in TARGETS)  # those that a draft learns from come first
    for at, name in enumerate(missing):
        shape = replace(SHAPES[name], **toy)
        teacher, left = models.get(TARGETS.get(name, "")), args.seconds - (time.monotonic() - begin)
        mine = recipe
        if teacher is not None:
            mine = replace(recipe, batch=max(1, round(recipe.batch * DRAFT_BATCH)), peak_lr=recipe.peak_lr * DRAFT_LR)
        shares = [weight_of(one, models, missing) for one in missing[at:]]
        seconds = left * shares[0] / sum(shares)
        most = max(1, int(args.passes * len(stream) / (mine.batch * shape.context)))
        model, loss, steps = train(
            stream, shape, replace(mine, steps=min(mine.steps, most)), device=device, compiled=args.compile, seconds=seconds,
            teacher=teacher, name=name,
        )  # fmt: skip
        models[name] = model
        save_model(model, tokenizer, args.out / name, max_shard_bytes=1 << 30)
        parameters, passes = sum(p.numel() for p in model.parameters()), steps * mine.batch * shape.context / len(stream)
        facts = {"parameters": parameters, "steps": steps, "passes": round(passes, 2), "training_loss": loss, "seed": args.seed}
        facts |= {"copies": mine.copies, "batch": mine.batch, "peak_lr": mine.peak_lr}
        facts |= {} if teacher is None else {"teacher": TARGETS[name]}
        (args.out / name / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        what = (
            f"training loss {loss:.4f} nats (perplexity {math.exp(loss):.2f})"
            if teacher is None
            else f"KL from {TARGETS[name]} {loss:.4f} nats"
        )
        print(f"{args.out / name}: {parameters:,} parameters, {steps} steps ({passes:.1f} passes of the text), {what}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
