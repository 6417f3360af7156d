"""Beside exllamav2 0.3.2 on one GPU: the same files, alternating, tokens counted as they reach Python; and whether both compute the same.

exllamav2 is a peer, not a part of this project: install it beside (`pip install --no-deps exllamav2==0.3.2`, compiles at first import).
Its loop is its own fastest one without text (forward, argmax on the GPU, one token to the host), after 260 tokens of warm-up, when its
graphs and its kernels' tuning are done. `no_sdpa`, because its SDPA prefill is not causal.

    python benchmarks/compare_exllamav2.py DIR [--tokens 512] [--rounds 3] [--json]
    python benchmarks/compare_exllamav2.py DIR --check          largest difference of the logits over 200 tokens
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

WARM_UP = 260


class Peer:
    """exllamav2's model and cache."""

    def __init__(self, directory: Path, length: int) -> None:
        from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config  # type: ignore[import-not-found]

        config = ExLlamaV2Config(str(directory))
        config.no_flash_attn, config.no_sdpa, config.no_xformers = True, True, True
        config.max_seq_len = length
        self.model: Any = ExLlamaV2(config)
        self.cache: Any = ExLlamaV2Cache(self.model, max_seq_len=length, lazy=True)
        self.model.load_autosplit(self.cache)

    def decode(self, prompt: list[int], tokens: int) -> float:
        """Tokens per second after the prompt."""
        self.cache.current_seq_len = 0
        with torch.inference_mode():
            logits = self.model.forward(torch.tensor([prompt]), self.cache, last_id_only=True)
            token = logits[:, -1].argmax(-1, keepdim=True).cpu()
            begun = time.perf_counter()
            for _ in range(tokens):
                token = self.model.forward(token, self.cache)[:, -1].argmax(-1, keepdim=True).cpu()
        return tokens / (time.perf_counter() - begun)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """All logits f32 `(T, V)`."""
        self.cache.current_seq_len = 0
        with torch.inference_mode():
            return self.model.forward(torch.tensor([ids]), self.cache)[0].float().cpu()


def ours(llm: ex.LLM, prompt: list[int], tokens: int) -> float:
    """Tokens per second of `stream` after the first one."""
    stream = llm.stream(prompt, max_tokens=tokens + 1, temperature=0, ignore_eos=True)
    next(stream)
    begun = time.perf_counter()
    count = sum(len(chunk.tokens) for chunk in stream)
    return count / (time.perf_counter() - begun)


def check(llm: ex.LLM, peer: Peer, ids: list[int]) -> dict[str, float]:
    """How far the logits are apart."""
    from exl2nb.eval.rows import logits

    mine, theirs = logits(llm.model, torch.tensor([ids]))[0].float().cpu(), peer.logits(ids)
    theirs = theirs[:, : mine.shape[1]]
    return {
        "max_difference": float((mine - theirs).abs().max()),
        "std": float(mine.std()),
        "same_argmax": float((mine.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    length = WARM_UP + args.tokens + 64
    peer = Peer(args.model, length)
    with ex.load(args.model, device="cuda", context=length, progress=None) as llm:
        ids = [5 + i * 37 % (llm.config.vocab_size - 6) for i in range(200)]
        found: dict[str, Any] = {"model": args.model.name, "gpu": torch.cuda.get_device_name()}
        if args.check:
            found |= check(llm, peer, ids)
        else:
            peer.decode(ids[:16], WARM_UP)
            ours(llm, ids[:16], 32)
            rounds = [(ours(llm, ids[:16], args.tokens), peer.decode(ids[:16], args.tokens)) for _ in range(args.rounds)]
            found["exl2nb_tok_s"], found["exllamav2_tok_s"] = (round(statistics.median(speeds), 1) for speeds in zip(*rounds))
            found["ratio"] = round(found["exl2nb_tok_s"] / found["exllamav2_tok_s"], 2)
    print(json.dumps(found) if args.json else "\n".join(f"{name:18} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
