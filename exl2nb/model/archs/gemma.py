"""Gemma: norms that store their weight minus one, a GELU gate, embeddings times sqrt(hidden_size), a tied head."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
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
        read=features,
    )
)
