"""Decode speed of every architecture beside Llama at equal bytes: random 4-bit weights, what a token reads made equal by the MLP's width.

    python benchmarks/architectures.py --threads 1 [--only gemma2 mixtral] [--device cuda --hidden 2048 --layers 16]

For each architecture a normal EXL2 directory is written and loaded, and decodes in turns with Llama through `llm.generate`. Prints a line
each: MB a token reads, ms a token, and tok/s relative to Llama's (times the bytes' ratio, which rounding leaves a few per cent from 1). The
median of the turns' ratios; 0.80 is what the project asks of itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from make_random_model import ONE, matrix, write_tokenizer

import exl2nb as ex
from exl2nb.io import safetensors
from exl2nb.model.archs import ARCHS, parse_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears, linears, vectors

LLAMA, VOCAB, PROMPT = "LlamaForCausalLM", 4096, 16
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


def raw_config(name: str, hidden: int, layers: int, inner: int) -> dict[str, Any]:
    """A config.json of architecture `name` whose tokens pass MLPs of `inner` altogether."""
    heads = hidden // 64
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": 64, "intermediate_size": inner}
    sizes["num_key_value_heads"] = KV_HEADS.get(name, lambda heads: heads // 4)(heads)
    decoder = {**EVERY, **sizes, **EXPERTS.get(name, lambda _: {})(inner)}
    architecture = ARCHS[name]
    nested = {architecture.text_key: decoder} if architecture.text_key else decoder
    quantization = {"quant_method": "exl2", "version": "0.3.2", "bits": 4.0, "head_bits": 4}
    return {"architectures": [name], "model_type": architecture.model_type, **nested, "quantization_config": quantization}


def weights_per_token(config: ModelConfig) -> int:
    """Weights of the matrices that a token visits, the head included."""
    total = config.hidden_size * config.vocab_size
    for layer in range(config.num_layers):
        moe = config.experts(layer)
        for role, linear in layer_linears(config, layer).items():
            share = moe.top_k / moe.num_experts if moe is not None and "." in role else 1
            total += int(linear.in_features * linear.out_features * share)
    return total


def equal(name: str, hidden: int, layers: int, target: int) -> dict[str, Any]:
    """The config of architecture `name` whose tokens visit about `target` weights."""
    step = 256  # experts an eighth as wide are still a multiple of 32
    narrow, wide = (weights_per_token(parse_config(raw_config(name, hidden, layers, inner))) for inner in (step, 2 * step))
    return raw_config(name, hidden, layers, step * max(1, round(1 + (target - narrow) / (wide - narrow))))


def write(raw: dict[str, Any], out: Path) -> Path:
    """A directory of random weights for a config."""
    rng = torch.Generator().manual_seed(0)
    config = parse_config(raw)
    tensors = {}
    for name, shape in vectors(config).items():
        plain = len(shape) == 1 or "norm" in name
        tensors[name] = torch.ones(shape).half() if plain else (0.5 * torch.randn(shape, generator=rng)).half()
    for linear in linears(config):
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
    """Tokens per second of greedy decoding after a short prompt; with one thread on the CPU, of processor time: others may be at work."""
    clock = time.process_time if llm.model.device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    done = llm.generate(list(range(3, 3 + PROMPT)), max_tokens=tokens, temperature=0, ignore_eos=True)
    return len(done.tokens) / (clock() - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="parts of class names; all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llama = raw_config(LLAMA, args.hidden, args.layers, 3 * args.hidden)
    target = weights_per_token(parse_config(llama))
    print(
        f"{args.device}, {args.threads} threads, hidden {args.hidden}, {args.layers} layers, {target / 1e6:.1f} M weights a token, 4 bits"
    )
    with loaded(llama, args.device) as base:
        for name in ARCHS:
            if args.only and not any(part.lower() in name.lower() for part in args.only):
                continue
            with loaded(equal(name, args.hidden, args.layers, target), args.device) as llm:
                size = llm.model.bytes_per_token / base.model.bytes_per_token
                turns = [(speed(base, args.tokens), speed(llm, args.tokens)) for _ in range(args.rounds)]
            ratio = statistics.median(mine / llamas for llamas, mine in turns) * size
            best = max(mine for _, mine in turns)
            note = "  below 0.80" if ratio < 0.8 else ""
            megabytes = size * base.model.bytes_per_token / 1e6
            print(f"{name:36s} {megabytes:6.1f} MB {1e3 / best:7.2f} ms  {ratio:.2f} of Llama{note}", flush=True)


if __name__ == "__main__":
    main()
