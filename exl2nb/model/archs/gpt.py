"""GPT-2, StarCoder (GPT-BigCode) and StarCoder 2."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture
from exl2nb.model.archs.mistral import mistral_windows
from exl2nb.model.config import Files, Names
from exl2nb.model.config_fields import Fields
from exl2nb.model.rope import RopeConfig


# GPT-2: learned positions, LayerNorm with bias, an ungated GELU MLP, no RoPE, a tied head; its files hold matrices as (in, out).
def gpt2_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """No RoPE anywhere; the scores' scale may be switched off."""
    if fields.flag("scale_attn_by_inverse_layer_idx", default=False):
        raise fields.refuse("scale_attn_by_inverse_layer_idx", True, "false: scores are scaled alike in every layer")
    if not fields.flag("multi_query", default=True):
        raise fields.refuse("multi_query", False, "true: one KV head for all query heads")
    positions = sizes["max_position_embeddings"]
    scaled = fields.flag("scale_attn_weights", default=True)
    return {
        "rope": RopeConfig(rotary_dim=sizes["head_dim"], max_positions=positions, original_positions=positions),
        "rope_kinds": ("none",) * sizes["num_layers"],
        **({} if scaled else {"attention_scale": 1.0}),
    }


GPT2_TEXT = Architecture(
    model_type="gpt2",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    defaults={"n_positions": 1024, "activation_function": "gelu_new", "tie_word_embeddings": True},
    names=Names(attention_norm="ln_1", mlp_norm="ln_2", up="mlp.c_fc", down="mlp.c_proj"),
    files=Files(
        # published files leave out the prefix that Transformers writes today
        renames=(
            *(("transformer.", ""), ("h.", "model.layers."), ("ln_f.", "model.norm."), ("wte.", "model.embed_tokens.")),
            *(("wpe.", "model.wpe."), ("model.model.", "model."), (".attn.c_proj.", ".self_attn.o_proj."), (".attn.", ".self_attn.")),
        ),
        fused=(("self_attn.c_attn", ("q", "k", "v")),),
        transposed=True,
        ignored=("*.self_attn.bias", "*.self_attn.masked_bias"),
    ),
    keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    },
    eps_key="layer_norm_epsilon",
    eps=1e-5,
    activation_key="activation_function",
    inner_multiple=4,
    fixed={"norm": "layer", "norm_bias": True, "gated": False, "learned_positions": True},
    read=gpt2_features,
    reads="scale_attn_by_inverse_layer_idx scale_attn_weights multi_query",
    # heads for classification, and settings of the old inference server
    ignored="summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx inference_runner "
    "pre_allocate_kv_cache validate_runner_input runner_max_sequence_length",
)
ARCHS.register("GPT2LMHeadModel")(GPT2_TEXT)


# StarCoder 1 (GPT-BigCode): GPT-2 with one KV head for all query heads, its matrices the usual way round.
ARCHS.register("GPTBigCodeForCausalLM")(
    replace(
        GPT2_TEXT,
        model_type="gpt_bigcode",
        defaults={**GPT2_TEXT.defaults, "num_key_value_heads": 1, "activation_function": "gelu_pytorch_tanh"},
        files=replace(
            GPT2_TEXT.files,
            renames=(
                ("transformer.ln_f.", "model.norm."),
                ("transformer.", "model."),
                (".h.", ".layers."),
                (".attn.c_proj.", ".self_attn.o_proj."),
                (".attn.", ".self_attn."),
                (".wte.", ".embed_tokens."),
            ),
            transposed=False,
        ),
    )
)


# StarCoder 2: LayerNorm with bias, biases everywhere, an ungated GELU MLP, a sliding window on every layer, a tied head.
ARCHS.register("Starcoder2ForCausalLM")(
    Architecture(
        model_type="starcoder2",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        windows=mistral_windows,
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
        reads="sliding_window",
        neutral={"norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,)},
    )
)
