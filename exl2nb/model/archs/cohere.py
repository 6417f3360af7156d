"""Command R (Cohere) and Command R7B, Command A (Cohere 2)."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture, pattern_slides, sliding_windows
from exl2nb.model.config import Names
from exl2nb.model.config_fields import Fields

# Command R: attention and MLP in parallel after one LayerNorm without bias, interleaved RoPE, a factor on the logits, a tied head.
# Keys that the published files keep from Cohere's own trainer, with the values that Transformers assumes.
COHERE_NEUTRAL_KEYS = {
    "position_embedding_type": ("rope_gptj", "rope"),
    "rotary_pct": (1,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "use_embedding_sharing": (True,),
    "order_of_interleaved_layers": ("local_attn_first",),
}
COHERE_SETTINGS = {"norm": "layer", "parallel": True, "interleaved": True}


def cohere_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
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
        fixed=COHERE_SETTINGS,
        read=cohere_features,
        reads="logit_scale use_qk_norm",
        neutral=COHERE_NEUTRAL_KEYS,
    )
)


# Command R7B and A: Command R with sliding layers that have RoPE and global layers that have none.
def cohere2_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """The factor on the logits, and which layers rotate."""
    return {
        "logit_scale": fields.number("logit_scale", low=1e-6, high=1e6, default=0.0625),
        "rope_kinds": tuple("main" if slides else "none" for slides in pattern_slides(fields, sizes["num_layers"], 4)),
    }


ARCHS.register("Cohere2ForCausalLM")(
    Architecture(
        model_type="cohere2",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=lambda fields, num_layers: sliding_windows(fields, pattern_slides(fields, num_layers, 4)),
        defaults={"max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True},
        names=Names(mlp_norm="input_layernorm"),
        eps_key="layer_norm_eps",
        eps=1e-5,
        fixed=COHERE_SETTINGS,
        read=cohere2_features,
        reads="logit_scale sliding_window sliding_window_pattern _sliding_window_pattern",
        neutral=COHERE_NEUTRAL_KEYS,
    )
)
