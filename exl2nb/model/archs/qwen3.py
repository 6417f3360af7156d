"""Qwen3: Qwen2 without biases, with an RMS norm on every head of q and k."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.archs.qwen2 import windows

ARCHS.register("Qwen3ForCausalLM")(
    Architecture(
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=windows,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        fixed={"qk_norm": "head"},
    )
)
