"""Llama 1, 2 and 3.x, and the architectures that differ from it by names, norms, factors or RoPE."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture, layer_kinds
from exl2nb.model.config import Files, Names
from exl2nb.model.config_fields import Fields
from exl2nb.model.rope import MAX_CONTEXT

# Llama 1, 2 and 3.x, and what is published under its class name: pre-norm, rotary, gated SiLU, no biases unless the config says so.
ARCHS.register("LlamaForCausalLM")(
    Architecture(
        model_type="llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    )
)


# Yi as first published: Llama whose norms are called ln1 and ln2 (later files are plain Llama).
ARCHS.register("YiForCausalLM")(
    Architecture(
        model_type="yi",
        defaults={"max_position_embeddings": 4096},
        names=Names(attention_norm="ln1", mlp_norm="ln2"),
        files=Files(renames=((".input_layernorm.", ".ln1."), (".post_attention_layernorm.", ".ln2."))),
    )
)


# Orion: Llama with LayerNorm.
ARCHS.register("OrionForCausalLM")(
    Architecture(
        model_type="orion",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        defaults={"max_position_embeddings": 4096},
        eps=1e-5,
        fixed={"norm": "layer", "norm_bias": True},
    )
)


# Index: Llama whose head's rows are normalised (`norm_head`); EXL2 files hold them normalised already.
def index_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """`norm_head`, true or 1 where it is absent."""
    value = fields.raw.get("norm_head", True)
    if value not in (0, 1):
        raise fields.refuse("norm_head", value, "true or false")
    return {"files": Files(unit_head=bool(value))}


ARCHS.register("IndexForCausalLM")(
    Architecture(model_type="index", defaults={"max_position_embeddings": 4096}, read=index_features, reads="norm_head")
)


# InternLM2: Llama under other names, its q, k and v fused and interleaved per KV head.
ARCHS.register("InternLM2ForCausalLM")(
    Architecture(
        model_type="internlm2",
        qkv_bias="bias",
        o_bias="bias",
        defaults={"max_position_embeddings": 2048, "bias": True},
        names=Names(
            attention_norm="attention_norm",
            mlp_norm="ffn_norm",
            gate="feed_forward.w1",
            up="feed_forward.w3",
            down="feed_forward.w2",
        ),
        files=Files(
            renames=(
                ("model.tok_embeddings.", "model.embed_tokens."),
                ("output.", "lm_head."),
                (".attention.", ".self_attn."),
                (".wo.", ".o_proj."),
            ),
            fused=(("self_attn.wqkv", ("q", "k", "v")),),
            grouped=True,
        ),
    )
)


# MiniCPM: Llama with factors on the embedding, on what each half adds (falling with depth), and on the logits (falling with width).
def minicpm_factors(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """`scale_emb`, `scale_depth` / sqrt(layers), `dim_model_base` / hidden_size."""
    base = fields.integer("dim_model_base", low=1, high=1 << 20, default=1)
    return {
        "embed_scale": fields.number("scale_emb", low=1e-6, high=1e6, default=1.0),
        "residual_scale": fields.number("scale_depth", low=1e-6, high=1e6, default=1.0) / sizes["num_layers"] ** 0.5,
        "logit_scale": base / sizes["hidden_size"],
    }


ARCHS.register("MiniCPMForCausalLM")(
    Architecture(
        model_type="minicpm",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
        read=minicpm_factors,
        reads="scale_emb scale_depth dim_model_base",
        neutral={"use_mup": (True,)},
        ignored="mup_denominator",  # of the initialisation
    )
)


# Granite 3: Llama with factors on the embedding, the scores, what each half adds, and the logits.
def granite_factors(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """All default to 1; `logits_scaling` divides."""
    bounds = {"low": 1e-6, "high": 1e6, "default": 1.0}
    return {
        "embed_scale": fields.number("embedding_multiplier", **bounds),
        "attention_scale": fields.number("attention_multiplier", **bounds),
        "residual_scale": fields.number("residual_multiplier", **bounds),
        "logit_scale": 1.0 / fields.number("logits_scaling", **bounds),
    }


ARCHS.register("GraniteForCausalLM")(
    Architecture(
        model_type="granite",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
        read=granite_factors,
        reads="embedding_multiplier attention_multiplier residual_multiplier logits_scaling",
    )
)


# SmolLM3: Llama where every fourth layer has no RoPE; those may have a sliding window.
def rope_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """`no_rope_layers` holds 1 where a layer has RoPE and 0 where it has none."""
    every = fields.integer("no_rope_layer_interval", low=1, high=1 << 20, default=4)
    marks = fields.raw.get("no_rope_layers")
    if marks is None:
        return tuple("main" if (i + 1) % every else "none" for i in range(num_layers))
    if not isinstance(marks, list) or len(marks) < num_layers or any(mark not in (0, 1) for mark in marks):
        raise fields.refuse("no_rope_layers", marks, f"a list of {num_layers} numbers, 0 or 1")
    return tuple("main" if mark else "none" for mark in marks[:num_layers])


def smollm3_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The sliding layers' window, where it is switched on."""
    used = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0) if used else 0
    kinds = rope_kinds(fields, num_layers)
    sliding = layer_kinds(fields, num_layers, lambda i: window > 0 and kinds[i] == "none")
    return tuple(window if slides else 0 for slides in sliding)


def smollm3_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Which layers rotate."""
    return {"rope_kinds": rope_kinds(fields, sizes["num_layers"])}


ARCHS.register("SmolLM3ForCausalLM")(
    Architecture(
        model_type="smollm3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=smollm3_windows,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        read=smollm3_features,
        reads="use_sliding_window sliding_window no_rope_layers no_rope_layer_interval",
    )
)
