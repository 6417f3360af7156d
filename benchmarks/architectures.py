"""Decode speed of every architecture beside Llama at equal bytes: random 4-bit weights, what a token reads made equal by the MLP's width.

    python benchmarks/architectures.py --threads 1 [--only gemma2 mixtral] [--device cuda --hidden 2048 --layers 16]
    python benchmarks/architectures.py --device cuda --real --layers 2

For each architecture a normal EXL2 directory is written and loaded, and decodes in turns with Llama through `llm.generate`. Prints a line
each: MB a token reads, ms a token, and tok/s relative to Llama's (times the bytes' ratio, which rounding leaves a few per cent from 1). The
median of the turns' ratios; 0.80 is what the project asks of itself. With --real each has the widths of a published model (few layers, a
small vocabulary), and its Llama the same attention, layers and bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from make_random_model import ONE, matrix, write_tokenizer

import exl2nb as ex
from exl2nb.io import safetensors
from exl2nb.model.archs import ARCHS, parse_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears, model_linears, vector_shapes

LLAMA, VOCAB = "LlamaForCausalLM", 4096
EVERY = {  # keys of all architectures at once: nobody minds those of the others
    "vocab_size": VOCAB, "num_attention_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64, "use_sliding_window": True,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64, "use_qk_norm": True,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "scale_emb": 2.0, "scale_depth": 1.4,
    "dim_model_base": 256, "attn_config": {"clip_qkv": 8.0}, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KV_HEADS: dict[str, Callable[[int], int]] = {
    "GPTBigCodeForCausalLM": lambda heads: 1,
    "QWenLMHeadModel": lambda heads: heads,
    "GPT2LMHeadModel": lambda heads: heads,
}
# Of one architecture: small experts, in part beside one that every token visits. Functions of the width of a token's whole MLP.
EXPERTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "MixtralForCausalLM": lambda inner: {"intermediate_size": inner // 2},
    "GemmoeForCausalLM": lambda inner: {"intermediate_size": inner // 2},
    "DbrxForCausalLM": lambda inner: {"intermediate_size": inner // 4},
    "Qwen2MoeForCausalLM": lambda inner: {
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": inner // 8, "shared_expert_intermediate_size": inner // 2,
    },
    "Qwen3MoeForCausalLM": lambda inner: {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": inner // 8},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model. inner: width of the MLPs that a token passes, altogether; other: keys of its own."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    head_dim: int = 64
    layers: int = 2
    other: dict[str, Any] = field(default_factory=dict)


REAL = {
    "MixtralForCausalLM": Sizes(hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=28672),  # Mixtral 8x7B
    "Qwen3MoeForCausalLM": Sizes(hidden=2048, heads=32, kv_heads=4, head_dim=128, inner=6144, other={"num_experts": 128}),  # Qwen3 30B A3B
    "Qwen2MoeForCausalLM": Sizes(hidden=2048, heads=16, kv_heads=16, head_dim=128, inner=11264, other={"num_experts": 60}),  # Qwen1.5 MoE
    "DbrxForCausalLM": Sizes(hidden=6144, heads=48, kv_heads=8, head_dim=128, inner=43008),
    "Starcoder2ForCausalLM": Sizes(hidden=4608, heads=36, kv_heads=4, head_dim=128, inner=18432),  # StarCoder2 7B
    "CohereForCausalLM": Sizes(hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=14336),  # Aya 8B
    "Gemma2ForCausalLM": Sizes(hidden=3584, heads=16, kv_heads=8, head_dim=256, inner=14336),  # Gemma 2 9B
    "Olmo2ForCausalLM": Sizes(hidden=4096, heads=32, kv_heads=32, head_dim=128, inner=11008),  # OLMo 2 7B
    "Glm4ForCausalLM": Sizes(hidden=4096, heads=32, kv_heads=2, head_dim=128, inner=13696),  # GLM 4 9B
    "GPT2LMHeadModel": Sizes(hidden=1600, heads=25, kv_heads=25, inner=6400),  # GPT-2 XL
}


def raw_config(name: str, sizes: Sizes) -> dict[str, Any]:
    """A config.json of architecture `name`."""
    plain = {
        "hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "head_dim": sizes.head_dim,
        "num_key_value_heads": sizes.kv_heads, "intermediate_size": sizes.inner,
    }  # fmt: skip
    decoder = {**EVERY, **plain, **EXPERTS.get(name, lambda _: {})(sizes.inner), **sizes.other}
    architecture = ARCHS[name]
    nested = {architecture.text_key: decoder} if architecture.text_key else decoder
    quantization = {"quant_method": "exl2", "version": "0.3.2", "bits": 4.0, "head_bits": 4}
    return {"architectures": [name], "model_type": architecture.model_type, **nested, "quantization_config": quantization}


def square(name: str, hidden: int, layers: int) -> Sizes:
    """Sizes of architecture `name` with four query heads per KV head of 64, unless it has them otherwise."""
    heads = hidden // 64
    return Sizes(hidden=hidden, heads=heads, kv_heads=KV_HEADS.get(name, lambda heads: heads // 4)(heads), inner=3 * hidden, layers=layers)


def weights_per_token(config: ModelConfig) -> int:
    """Weights of the matrices that a token visits, the head included."""
    total = config.hidden_size * config.vocab_size
    for layer in range(config.num_layers):
        moe = config.experts(layer)
        for role, linear in layer_linears(config, layer).items():
            share = moe.top_k / moe.num_experts if moe is not None and "." in role else 1
            total += int(linear.in_features * linear.out_features * share)
    return total


def equal(name: str, sizes: Sizes, target: int) -> dict[str, Any]:
    """The config of architecture `name` whose tokens visit about `target` weights: `sizes` but for the MLP's width."""
    step = 256  # experts an eighth as wide are still a multiple of 32
    narrow, wide = (weights_per_token(parse_config(raw_config(name, replace(sizes, inner=inner)))) for inner in (step, 2 * step))
    return raw_config(name, replace(sizes, inner=step * max(1, round(1 + (target - narrow) / (wide - narrow)))))


def write(raw: dict[str, Any], out: Path) -> Path:
    """A directory of random weights for a config."""
    rng = torch.Generator().manual_seed(0)
    config = parse_config(raw)
    tensors = {}
    for name, shape in vector_shapes(config).items():
        plain = len(shape) == 1 or "norm" in name
        tensors[name] = torch.ones(shape).half() if plain else (0.5 * torch.randn(shape, generator=rng)).half()
    for linear in model_linears(config):
        k, n = linear.in_features, linear.out_features
        order = torch.randperm(k, generator=rng).int()
        parts = matrix(k, n, ONE[4, 128 if k % 128 == 0 else 32], 0.5 * k**-0.5, order, rng)
        tensors |= {f"{linear.key}.{part}": value for part, value in parts.items()}
        if linear.bias:
            tensors[f"{linear.key}.bias"] = torch.zeros(n).half()
    out.mkdir()
    safetensors.save(out / "output.safetensors", tensors)
    (out / "config.json").write_text(json.dumps(raw))
    write_tokenizer(out, VOCAB)
    return out


@contextmanager
def loaded(raw: dict[str, Any], device: str) -> Iterator[ex.LLM]:
    """The random model of a config, ready and warm."""
    with tempfile.TemporaryDirectory() as folder, ex.load(write(raw, Path(folder) / "model"), device=device, progress=None) as llm:
        speed(llm, 24)
        yield llm


def speed(llm: ex.LLM, tokens: int) -> float:
    """Tokens per second of greedy decoding after one token: a longer prompt is another path, in which the host routes tokens.

    With one thread on the CPU, of processor time: others may be at work.
    """
    clock = time.process_time if llm.model.device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    done = llm.generate([3], max_tokens=tokens, temperature=0, ignore_eos=True)
    return len(done.tokens) / (clock() - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--real", action="store_true", help="widths of published models in place of --hidden")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="parts of class names; all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.device}, {args.threads} threads, {args.layers} layers, {'real widths' if args.real else f'hidden {args.hidden}'}, 4 bits")
    wanted = [name for name in ARCHS if not args.only or any(part.lower() in name.lower() for part in args.only)]
    if args.real:
        for name in wanted:
            if name in REAL:
                mine = raw_config(name, replace(REAL[name], layers=args.layers))
                llama = equal(LLAMA, replace(REAL[name], layers=args.layers, other={}), weights_per_token(parse_config(mine)))
                with loaded(llama, args.device) as base:
                    beside(base, name, mine, args)
        return
    llama = raw_config(LLAMA, square(LLAMA, args.hidden, args.layers))
    target = weights_per_token(parse_config(llama))
    with loaded(llama, args.device) as base:
        for name in wanted:
            beside(base, name, equal(name, square(name, args.hidden, args.layers), target), args)


def beside(base: ex.LLM, name: str, raw: dict[str, Any], args: argparse.Namespace) -> None:
    """Measure a config in turns with `base` and print its line."""
    with loaded(raw, args.device) as llm:
        size = llm.model.bytes_per_token / base.model.bytes_per_token
        turns = [(speed(base, args.tokens), speed(llm, args.tokens)) for _ in range(args.rounds)]
    ratio = statistics.median(mine / llamas for llamas, mine in turns) * size
    best, llamas = (max(turn[i] for turn in turns) for i in (1, 0))
    note = "  below 0.80" if ratio < 0.8 else ""
    megabytes = size * base.model.bytes_per_token / 1e6
    print(f"{name:36s} {megabytes:6.1f} MB {1e3 / best:7.3f} ms  {ratio:.2f} of Llama ({1e3 / llamas:.3f} ms){note}", flush=True)


if __name__ == "__main__":
    main()
