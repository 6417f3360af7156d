"""What a quantised KV cache costs: rows of a text fed token by token through every mode, held against the fp16 cache.

    python benchmarks/cache_quality.py MODEL --text FILE --rows 3 --length 512 --tokens 384

Rows are cut every `--length` tokens; the first `--tokens` of each are fed. Prints one JSON object per mode: bits a number, bytes a token,
mean KL(fp16 || mode) in nats over all positions, share of equal best tokens, perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CACHE_MODES
from exl2nb.eval.rows import read_text, token_rows
from exl2nb.model.batch import Batch
from exl2nb.model.loader import load_model
from exl2nb.model.model import Model
from exl2nb.tokenizer.tokenizer import Tokenizer


def token_by_token(model: Model, ids: Tensor, mode: str) -> Tensor:
    """Log-probabilities f64 `(rows, T, V)`: one step of the engine per token."""
    rows = []
    for row in ids.tolist():
        cache = KVCache(model.cache_spec(len(row), mode=mode), model.device)
        pages = list(range(cache.spec.num_pages))
        steps = [model.forward(Batch.single([token], start=i, pages=pages, device=model.device), cache) for i, token in enumerate(row)]
        rows.append(torch.cat(steps).double().log_softmax(-1))
    return torch.stack(rows)


def perplexity(logprobs: Tensor, ids: Tensor) -> float:
    """Of the tokens after the first of each row."""
    picked = logprobs[:, :-1].gather(2, ids[:, 1:, None].long())
    return math.exp(-float(picked.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--modes", nargs="+", default=[mode for mode in CACHE_MODES if mode != "fp16"])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = load_model(args.model, device=args.device)
    rows = token_rows(Tokenizer.load(args.model), read_text(args.text), rows=args.rows, length=args.length)
    ids = rows[:, : args.tokens].contiguous()
    base = token_by_token(model, ids, "fp16")
    for mode in ["fp16", *args.modes]:
        spec, other = model.cache_spec(args.tokens, mode=mode), base if mode == "fp16" else token_by_token(model, ids, mode)
        result = {
            "mode": mode,
            "bits": spec.bits,
            "token_bytes": spec.token_bytes,
            "kl": float((base.exp() * (base - other)).sum(-1).mean()),
            "top1": float((base.argmax(-1) == other.argmax(-1)).double().mean()),
            "ppl": perplexity(other, ids),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
