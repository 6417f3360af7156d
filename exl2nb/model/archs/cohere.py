"""Command R: attention and MLP side by side behind one LayerNorm without bias, interleaved RoPE, a factor on the logits, a tied head."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields
from exl2nb.model.names import Names

FIXED = {"norm": "layer", "parallel": True, "interleaved": True}


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """The factor, and R+'s head norms (LayerNorm, a row per head)."""
    return {
        "logit_scale": fields.number("logit_scale", low=1e-6, high=1e6, default=0.0625),
        "qk_norm": "head" if fields.flag("use_qk_norm", default=False) else "",
    }


ARCHS.register("CohereForCausalLM")(
    Architecture(
        model_type="cohere",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        defaults={"max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": True},
        names=Names(mlp_norm="input_layernorm"),
        eps_key="layer_norm_eps",
        eps=1e-5,
        fixed=FIXED,
        read=features,
    )
)
