"""StarCoder 2: LayerNorm with bias, biases everywhere, an ungated GELU MLP, a sliding window on every layer, a tied head."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.archs.mistral import windows
from exl2nb.model.names import Names

ARCHS.register("Starcoder2ForCausalLM")(
    Architecture(
        model_type="starcoder2",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        windows=windows,
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        names=Names(up="mlp.c_fc", down="mlp.c_proj"),
        eps_key="norm_epsilon",
        eps=1e-5,
        fixed={"norm": "layer", "norm_bias": True, "gated": False},
    )
)
