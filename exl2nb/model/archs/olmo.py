"""OLMo 2: norms after each half and none before, and an RMS norm over all heads of q, and of k, together."""

from exl2nb.model.archs.architecture import ARCHS, Architecture
from exl2nb.model.config import Names

ARCHS.register("Olmo2ForCausalLM")(
    Architecture(
        model_type="olmo2",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        defaults={"max_position_embeddings": 2048},
        names=Names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"),
        eps=1e-5,
        fixed={"pre_norm": False, "post_norm": True, "qk_norm": "full"},
    )
)
