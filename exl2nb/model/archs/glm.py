"""GLM-4 (0414): norms before and after each half, interleaved RoPE on a part of each head, fused gate and up."""

from exl2nb.model.archs.architecture import ARCHS, Architecture
from exl2nb.model.config import Files, Names

ARCHS.register("Glm4ForCausalLM")(
    Architecture(
        model_type="glm4",
        qkv_bias="attention_bias",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        names=Names(attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
        files=Files(fused=(("mlp.gate_up_proj", ("gate", "up")),)),
        eps=1.5625e-07,
        fixed={"post_norm": True, "interleaved": True},
        partial_rotary=True,
    )
)
