"""Qwen 1: Qwen2 under other names, q, k and v fused; its context ends where its own scaling of RoPE and scores would begin."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields
from exl2nb.model.names import Files


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """`intermediate_size` counts gate and up together."""
    size = sizes["intermediate_size"]
    if size % 2:
        raise fields.refuse("intermediate_size", size, "an even number: gate and up together")
    return {"intermediate_size": size // 2}


ARCHS.register("QWenLMHeadModel")(
    Architecture(
        model_type="qwen",
        qkv_bias=True,
        defaults={"seq_length": 8192},
        files=Files(
            renames=(
                ("transformer.wte.", "model.embed_tokens."),
                ("transformer.ln_f.", "model.norm."),
                ("transformer.h.", "model.layers."),
                (".attn.c_proj.", ".self_attn.o_proj."),
                (".attn.", ".self_attn."),
                (".ln_1.", ".input_layernorm."),
                (".ln_2.", ".post_attention_layernorm."),
                (".mlp.w1.", ".mlp.up_proj."),
                (".mlp.w2.", ".mlp.gate_proj."),
                (".mlp.c_proj.", ".mlp.down_proj."),
            ),
            fused=(("self_attn.c_attn", ("q", "k", "v")),),
        ),
        keys={"head_dim": "kv_channels", "max_position_embeddings": "seq_length", "rope_theta": "rotary_emb_base"},
        eps_key="layer_norm_epsilon",
        read=features,
    )
)
