"""Write a normal EXL2 directory of random codes at a real model's shape: weights made where they are measured, nothing to download.

Timing does not depend on the values, so random codes measure what real ones would; the group tables, permutations, option mixes and head
are those of a file that the reference converter would make. Scales are set so that activations stay finite through all layers. Norms have
random signs: an EXL2 code is half a step below zero on average, so with norms of ones all hidden states would end in one direction or its
opposite, every text in one token, and a rounding could turn the sign of a token's logits.

    python benchmarks/make_random_model.py tinyllama OUT --bpw 4.0
"""

from __future__ import annotations

import argparse
import json
import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl2nb.io import safetensors

# Shares are of the rows, widest first; sizes are rows per group. The public converter's own menu, thinned: one option per step in size.
Mix = tuple[tuple[int, float, int], ...]  # ((bits, share, group_size), ...)
ONE = {(b, g): ((b, 1.0, g),) for b in (4, 6, 8) for g in (32, 64, 128)}


def two(wide: int, narrow: int, share: float, group: int) -> Mix:
    return ((wide, share, group), (narrow, 1 - share, group))


ATTENTION: list[dict[str, Mix]] = [
    {"q": two(3, 2, 0.05, 64), "k": two(3, 2, 0.05, 64), "v": two(3, 2, 0.05, 64), "o": two(3, 2, 0.05, 64)},
    {"q": two(3, 2, 0.1, 64), "k": two(3, 2, 0.1, 64), "v": two(4, 3, 0.1, 128), "o": two(4, 3, 0.1, 128)},
    {"q": two(4, 3, 0.1, 128), "k": two(4, 3, 0.1, 128), "v": two(4, 3, 0.1, 64), "o": two(4, 3, 0.1, 128)},
    {"q": ONE[4, 128], "k": ONE[4, 128], "v": ONE[4, 64], "o": ONE[4, 128]},
    {"q": two(5, 4, 0.1, 128), "k": two(5, 4, 0.1, 128), "v": two(5, 4, 0.1, 64), "o": two(5, 4, 0.1, 128)},
    {"q": two(6, 5, 0.1, 128), "k": two(6, 5, 0.1, 128), "v": ONE[6, 128], "o": two(6, 5, 0.1, 128)},
    {"q": ONE[6, 128], "k": ONE[6, 128], "v": ONE[6, 128], "o": ONE[6, 128]},
    {"q": ONE[8, 128], "k": ONE[8, 128], "v": ONE[8, 128], "o": ONE[8, 128]},
]
MLP: list[dict[str, Mix]] = [
    {"gate": two(3, 2, 0.05, 64), "up": two(3, 2, 0.05, 64), "down": ((6, 0.05, 32), (3, 0.2, 64), (2, 0.75, 64))},
    {"gate": two(3, 2, 0.1, 64), "up": two(3, 2, 0.3, 64), "down": two(5, 4, 0.05, 32)},
    {"gate": two(4, 3, 0.1, 128), "up": two(4, 3, 0.25, 128), "down": ((8, 0.05, 32), (4, 0.1, 128), (3, 0.85, 128))},
    {"gate": two(4, 3, 0.1, 32), "up": two(4, 3, 0.25, 32), "down": ((8, 0.05, 32), (4, 0.95, 128))},
    {"gate": ONE[4, 128], "up": ONE[4, 32], "down": ((8, 0.05, 32), (4, 0.95, 128))},
    {"gate": two(5, 4, 0.1, 128), "up": two(5, 4, 0.25, 128), "down": ((8, 0.05, 32), (5, 0.1, 128), (4, 0.85, 128))},
    {"gate": two(6, 5, 0.1, 128), "up": two(6, 5, 0.25, 128), "down": ((8, 0.05, 32), (6, 0.1, 128), (5, 0.85, 128))},
    {"gate": ONE[6, 128], "up": ONE[6, 128], "down": ((8, 0.05, 32), (6, 0.95, 128))},
    {"gate": ONE[8, 128], "up": ONE[8, 128], "down": ONE[8, 128]},
]
HEAD: Mix = ((8, 0.15, 128), (6, 0.85, 128))
FILE, WRITERS = 2 << 30, 8  # bytes of a file, about, where there is more than one; files written at a time


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes; names as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 64
    max_position_embeddings: int = 2048

    def linears(self) -> dict[str, tuple[int, int]]:
        """Role -> (in_features, out_features) of one layer."""
        h, i = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {"q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h), "gate": (h, i), "up": (h, i), "down": (i, h)}


SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary, head_dim, positions
    "tinyllama": Shape(2048, 5632, 22, 32, 4, 32000),
    "llama2-7b": Shape(4096, 11008, 32, 32, 32, 32000, 128, 32768),
    "llama3-8b": Shape(4096, 14336, 32, 32, 8, 128256, 128, 65536),
    "llama2-70b": Shape(8192, 28672, 80, 64, 8, 32000, 128, 32768),
    "demo": Shape(256, 768, 12, 4, 2, 4096, 64, 1024),
}
KEYS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
KEYS |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def groups(rows: int, mix: Mix) -> list[tuple[int, int]]:
    """Group table [(bits, rows), ...] of a matrix, by the converter's rule: whole groups per width, the last one shortened."""
    out, left = [], rows
    for bits, share, size in mix:
        count = math.ceil(min(rows * share, left) / size)
        out += [(bits, size)] * count
        left -= count * size
    out[-1] = (out[-1][0], out[-1][1] + left)
    assert all(n > 0 and n % 32 == 0 for _, n in out)
    assert sum(n for _, n in out) == rows
    return out


def stored_bits(k: int, n: int, mix: Mix) -> int:
    """Bits of one matrix on disk: codes, scales, group table and permutation."""
    table = groups(k, mix)
    return sum(rows * n * bits for bits, rows in table) + len(table) * (48 + 4 * n) + 32 * k


def matrix(k: int, n: int, mix: Mix, std: float, invperm: Tensor, rng: torch.Generator) -> dict[str, Tensor]:
    """Random codes and scales; q_scale_max set so that the weights' standard deviation is near `std`."""
    table = groups(k, mix)
    starts = [0]
    for bits, rows in table:
        starts.append(starts[-1] + rows * bits // 32)
    low, high = -(2**31), 2**31 - 1
    mean_square = sum((i + 1) ** 4 for i in range(16)) / 16 / 256**2  # of the 16 quadratic steps
    scale_max = [std / (2**bits / math.sqrt(12) * math.sqrt(mean_square)) for bits, _ in table]
    return {
        "q_weight": torch.randint(low, high, (starts[-1], n), dtype=torch.int32, generator=rng, device=rng.device),
        "q_scale": torch.randint(low, high, (len(table), n // 8), dtype=torch.int32, generator=rng, device=rng.device),
        "q_scale_max": torch.tensor(scale_max, dtype=torch.float16),
        "q_groups": torch.tensor([v for (bits, _), start in zip(table, starts) for v in (bits, start)], dtype=torch.int16),
        "q_invperm": invperm,
    }


def choose(shape: Shape, bpw: float) -> list[dict[str, Mix]]:
    """Option of every layer: start with the smallest, raise slots in turn (a layer here, a layer there) while the target allows."""
    sizes = shape.linears()
    menus = (ATTENTION, MLP)
    cost = [[sum(stored_bits(*sizes[role], mix) for role, mix in option.items()) for option in menu] for menu in menus]
    slots = [(kind, layer) for layer in range(shape.num_hidden_layers) for kind in (0, 1)]
    slots = [slots[i * 7 % len(slots)] if math.gcd(7, len(slots)) == 1 else slots[i] for i in range(len(slots))]
    state = dict.fromkeys(slots, 0)
    budget = bpw * sum(k * n for k, n in sizes.values()) * shape.num_hidden_layers
    used = sum(cost[kind][0] for kind, _ in slots)
    for level in range(1, max(map(len, menus))):
        for kind, layer in slots:
            if level < len(cost[kind]) and state[kind, layer] == level - 1:
                extra = cost[kind][level] - cost[kind][level - 1]
                if used + extra <= budget:
                    used, state[kind, layer] = used + extra, level
    return [{**ATTENTION[state[0, i]], **MLP[state[1, i]]} for i in range(shape.num_hidden_layers)]


def write_tokenizer(out: Path, vocab_size: int) -> None:
    """Byte-level tokenizer without merges: one token per byte, the rest of the vocabulary is filler. Special: 0 <unk>, 1 <s>, 2 </s>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the byte-level alphabet: these stand for themselves
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
    names = ["<unk>", "<s>", "</s>", *letters.values()]
    names += [f"[{i}]" for i in range(len(names), vocab_size)]
    special = [
        {"id": i, "content": names[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i in range(3)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": template,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []},
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (out / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))


def config_of(shape: Shape, bpw: float) -> dict[str, Any]:
    """The config.json."""
    return {f: getattr(shape, f) for f in Shape.__dataclass_fields__} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": bpw,
            "head_bits": 6,
            "calibration": {"rows": 0, "length": 0},
        },
    }


def make(shape: Shape, out: Path, *, bpw: float, seed: int = 0) -> float:
    """Write the directory and return the bits per weight of its layers (head, embedding and norms aside)."""
    out.mkdir(parents=True, exist_ok=True)
    place = "cuda" if torch.cuda.is_available() else "cpu"  # 70B are 22 GB of random words
    rng = torch.Generator(place).manual_seed(seed)
    sizes, depth = shape.linears(), math.sqrt(2 * shape.num_hidden_layers)
    half = {"generator": rng, "dtype": torch.float32, "device": place}

    def norm() -> Tensor:
        return (2 * torch.randint(2, (shape.hidden_size,), generator=rng, device=place) - 1).half()

    tensors = {"model.embed_tokens.weight": (0.5 * torch.randn(shape.vocab_size, shape.hidden_size, **half)).half()}
    options = choose(shape, bpw)
    used = sum(stored_bits(*sizes[role], mix) for option in options for role, mix in option.items())
    files = max(1, round(used / 8 / FILE))
    with ThreadPoolExecutor(WRITERS) as writers:  # some files are written while the next layers are made
        writing: deque[Future[None]] = deque()

        def write(tensors: dict[str, Tensor], number: int) -> None:
            name = "output.safetensors" if files == 1 else f"output-{number:05}-of-{files:05}.safetensors"
            writing.append(writers.submit(safetensors.save, out / name, tensors))
            if len(writing) > WRITERS:
                writing.popleft().result()

        for i, option in enumerate(options):
            shared = {
                "gate": torch.randperm(shape.hidden_size, generator=rng, device=place).int(),
                "q": torch.randperm(shape.hidden_size, generator=rng, device=place).int(),
            }
            shared |= {"up": shared["gate"], "k": shared["q"], "v": shared["q"]}
            for role, (k, n) in sizes.items():
                std = 1 / math.sqrt(k) / (depth if role in ("o", "down") else 1)
                invperm = shared[role] if role in shared else torch.randperm(k, generator=rng, device=place).int()
                key = f"model.layers.{i}.{KEYS[role]}"
                tensors |= {f"{key}.{part}": t for part, t in matrix(k, n, option[role], std, invperm, rng).items()}
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{i}.{name}.weight"] = norm()
            done = (i + 1) * files // len(options)
            if i + 1 < len(options) and done > i * files // len(options):
                write(tensors, done)
                tensors = {}
        tensors["model.norm.weight"] = norm()
        invperm = torch.randperm(shape.hidden_size, generator=rng, device=place).int()
        head = matrix(shape.hidden_size, shape.vocab_size, HEAD, 2 / math.sqrt(shape.hidden_size), invperm, rng)
        write(tensors | {f"lm_head.{part}": t for part, t in head.items()}, files)
        while writing:
            writing.popleft().result()
    reached = used / sum(k * n for k, n in sizes.values()) / shape.num_hidden_layers
    (out / "config.json").write_text(json.dumps(config_of(shape, bpw), indent=1))
    write_tokenizer(out, shape.vocab_size)
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    reached = make(SHAPES[args.shape], args.out, bpw=args.bpw, seed=args.seed)
    size = sum(p.stat().st_size for p in args.out.iterdir())
    print(f"{args.out}: {args.shape}, {reached:.3f} bits per weight in the layers, {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
