"""Orion: Llama with LayerNorm."""

from exl2nb.model.archs.base import ARCHS, Architecture

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
