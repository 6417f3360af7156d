"""Gemma 2: Gemma with norms after each half as well, capped scores and logits, and a sliding window on every other layer."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture, layer_kinds
from exl2nb.model.fields import Fields
from exl2nb.model.names import Names
from exl2nb.model.rope import MAX_CONTEXT

NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`layer_types`, or even layers slide."""
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0)
    return tuple(window if slides else 0 for slides in layer_kinds(fields, num_layers, lambda i: i % 2 == 0))


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
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
        windows=windows,
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
        names=NAMES,
        activation_key="hidden_activation",
        fixed={"norm_offset": 1.0, "post_norm": True},
        read=features,
    )
)
