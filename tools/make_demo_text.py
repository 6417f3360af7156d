"""Sample the packaged calibration and evaluation texts from the packaged fp16 demo model.

Every text starts from `<s>` alone and is drawn at temperature 1 with no filter, so the two files are what the model itself believes in,
and they are ours. The seeds below made the committed files; the same torch version on the same kind of CPU makes them again byte for byte.

    python tools/make_demo_text.py                 # writes both files beside the weights, about two minutes on two cores
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train_demo_model import BOS, EOS, Llama, Shape

MODEL = Path(__file__).resolve().parent.parent / "exl2nb" / "demo_model"
FILES = {"calibration.txt": (20261, 3), "evaluation.txt": (19271, 1)}  # name: (first seed, batches)
BATCH, LENGTH, TEMPERATURE = 64, 512, 1.0
SLURS = re.compile(r"\b(n[i]gg|dark(y|ies)\b|k[i]ke)", re.IGNORECASE)  # old books hold such words: a sample with one is left out


def load(directory: Path) -> Llama:
    """The demo model in fp32, weights under their checkpoint names."""
    model = Llama(Shape()).eval()
    weights = {k: v.float() for shard in sorted(directory.glob("*.safetensors")) for k, v in load_file(shard).items()}
    model.load_state_dict(weights)
    return model


@torch.inference_mode()
def sample(model: Llama, seed: int) -> list[list[int]]:
    """BATCH sequences of at most LENGTH tokens after BOS, each cut at its first EOS."""
    generator = torch.Generator().manual_seed(seed)
    shape = model.shape
    past = torch.zeros(shape.num_layers, 2, BATCH, shape.num_kv_heads, LENGTH, shape.head_dim)
    ids = torch.full((BATCH, 1), BOS)
    columns = []
    for position in range(LENGTH):
        logits = model(ids, start=position, past=past)[:, -1].float()
        ids = torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), 1, generator=generator)
        columns.append(ids)
    rows = torch.cat(columns, dim=1).tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


def main(argv: list[str] | None = None) -> int:
    """Write the texts; returns the exit code."""
    parser = argparse.ArgumentParser(description="Sample the packaged texts from the demo model.")
    parser.add_argument("--out", type=Path, default=MODEL, help="folder to write to")
    args = parser.parse_args(argv)
    model, tokenizer = load(MODEL), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for name, (first, batches) in FILES.items():
        start, texts = time.monotonic(), []
        for seed in range(first, first + batches):
            for row in sample(model, seed):
                texts.append(tokenizer.decode(row, skip_special_tokens=True).replace("\ufffd", "").strip())
        text = "\n\n".join(t for t in texts if t and not SLURS.search(t)) + "\n"
        (args.out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.encode()):,} bytes, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
