"""Gemma, Gemma 2, Gemma 3 and GemMoE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture, as_inner_decoder, layer_kinds, pattern_slides, sliding_windows
from exl2nb.model.archs.mistral import MIXTRAL_NAMES, mixtral_experts
from exl2nb.model.config import Names
from exl2nb.model.config_fields import Fields
from exl2nb.model.rope import RopeConfig


# Gemma: norms that store their weight minus one, a GELU gate, embeddings times sqrt(hidden_size), a tied head.
def gemma_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """`hidden_act` says "gelu" in the first files and always meant its tanh form."""
    plain = fields.text("hidden_act", default=None) == "gelu"
    return {"embed_scale": sizes["hidden_size"] ** 0.5, **({"activation": "gelu_tanh"} if plain else {})}


ARCHS.register("GemmaForCausalLM")(
    Architecture(
        model_type="gemma",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        defaults={
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        fixed={"norm_offset": 1.0},
        read=gemma_features,
        neutral={"use_bidirectional_attention": (False,), "hidden_activation": ("gelu_pytorch_tanh",)},
    )
)


# Gemma 2: Gemma with norms after each half as well, capped scores and logits, and a sliding window on every other layer.
POST_NORM_NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def gemma2_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Scale of the scores, and the caps (null = none)."""
    return {
        "embed_scale": sizes["hidden_size"] ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", low=1e-3, high=1e6, default=256.0) ** -0.5,
        "attention_softcap": fields.number("attn_logit_softcapping", low=0.0, high=1e6, default=0.0),
        "logit_softcap": fields.number("final_logit_softcapping", low=0.0, high=1e6, default=0.0),
    }


ARCHS.register("Gemma2ForCausalLM")(
    Architecture(
        model_type="gemma2",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=lambda fields, num_layers: sliding_windows(fields, layer_kinds(fields, num_layers, lambda i: i % 2 == 0)),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        names=POST_NORM_NAMES,
        activation_key="hidden_activation",
        fixed={"norm_offset": 1.0, "post_norm": True},
        read=gemma2_features,
        reads="query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window",
        neutral={"use_bidirectional_attention": (False,)},
    )
)


# Gemma 3: Gemma 2 without caps, with head norms; five sliding layers with a RoPE of their own for each global one.
#
# The text model alone, and the same inside the multimodal class, whose vision tower and projector are left alone.
def _rope(fields: Fields, sizes: Mapping[str, int], kind: str, key: str, theta: float) -> RopeConfig:
    """New files have one set per kind of layer; old ones `rope_theta` and `rope_scaling` (global), `rope_local_base_freq` (local)."""
    theta = fields.number(key, low=1.0 + 1e-6, high=1e15, default=theta)
    both = fields.child("rope_parameters")
    own = both.child(kind) if both is not None else None
    found: dict[str, Any] = {"rope_theta": theta, "rope_parameters": own.raw if own is not None else None}
    if kind == "full_attention":
        found["rope_scaling"] = fields.raw.get("rope_scaling")
    where = own.where if own is not None else fields.where
    return RopeConfig.read(Fields(found, where), head_dim=sizes["head_dim"], max_positions=sizes["max_position_embeddings"])


def gemma3_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Gemma 2's, and the two RoPEs."""
    return {
        **gemma2_features(fields, sizes),
        "rope": _rope(fields, sizes, "full_attention", "rope_theta", 1e6),
        "local_rope": _rope(fields, sizes, "sliding_attention", "rope_local_base_freq", 1e4),
        "rope_kinds": tuple("local" if slides else "main" for slides in pattern_slides(fields, sizes["num_layers"], 6)),
    }


GEMMA3_TEXT = Architecture(
    model_type="gemma3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    windows=lambda fields, num_layers: sliding_windows(fields, pattern_slides(fields, num_layers, 6)),
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    names=POST_NORM_NAMES,
    activation_key="hidden_activation",
    fixed={"norm_offset": 1.0, "post_norm": True, "qk_norm": "head"},
    read=gemma3_features,
    reads="query_pre_attn_scalar final_logit_softcapping sliding_window sliding_window_pattern _sliding_window_pattern "
    "rope_local_base_freq",
    # Transformers has the key of the scores' cap and does not apply it; no published file sets it
    neutral={"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
)
ARCHS.register("Gemma3ForCausalLM")(GEMMA3_TEXT)
ARCHS.register("Gemma3ForConditionalGeneration")(
    as_inner_decoder(
        GEMMA3_TEXT,
        ("mm_input_projection_weight", "mm_input_projection.weight"),
        fixed={**GEMMA3_TEXT.fixed, "sees_whole": True},
        # this class of Transformers does not cap the logits
        reads=GEMMA3_TEXT.reads.replace("final_logit_softcapping ", ""),
        neutral={**GEMMA3_TEXT.neutral, "final_logit_softcapping": ()},
        inner_types=("gemma3_text",),
        outer="mm_tokens_per_image image_token_index boi_token_index eoi_token_index",
    )
)


# GemMoE: Gemma with Mixtral's experts. Transformers has no such class; its definition is that of its two parts.
def gemmoe_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Those of both."""
    return {**gemma_features(fields, sizes), **mixtral_experts(fields, sizes)}


ARCHS.register("GemmoeForCausalLM")(
    replace(
        ARCHS["GemmaForCausalLM"],
        model_type="gemmoe",
        defaults={**ARCHS["GemmaForCausalLM"].defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
        names=MIXTRAL_NAMES,
        read=gemmoe_features,
        reads="num_local_experts num_experts_per_tok",
    )
)
