"""StarCoder 1 (GPT-BigCode): GPT-2 with one KV head for all query heads, its matrices the usual way round."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.archs.gpt2 import FIXED, KEYS, NAMES, RENAMES, features
from exl2nb.model.names import Files

ARCHS.register("GPTBigCodeForCausalLM")(
    Architecture(
        model_type="gpt_bigcode",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        defaults={
            "n_positions": 1024,
            "num_key_value_heads": 1,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        names=NAMES,
        files=Files(
            renames=RENAMES,
            fused=(("self_attn.c_attn", ("q", "k", "v")),),
            ignored=("*.self_attn.bias", "*.self_attn.masked_bias"),
        ),
        keys=KEYS,
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation_key="activation_function",
        inner_multiple=4,
        fixed=FIXED,
        read=features,
    )
)
