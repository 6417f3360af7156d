"""Llama 1, 2 and 3.x, and what is published under its class name: pre-norm, rotary, gated SiLU, no biases unless the config says so."""

from exl2nb.model.archs.base import ARCHS, Architecture

ARCHS.register("LlamaForCausalLM")(
    Architecture(
        model_type="llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    )
)
