"""MiniCPM: Llama with factors on the embedding, on what each half adds (falling with depth), and on the logits (falling with width)."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields


def factors(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
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
        read=factors,
    )
)
