"""Granite 3: Llama with factors on the embedding, the scores, what each half adds, and the logits."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields


def factors(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
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
        read=factors,
    )
)
