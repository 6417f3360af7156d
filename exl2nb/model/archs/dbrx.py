"""DBRX: LayerNorms without bias, q, k and v cut to a bound, sixteen experts in three stacked tensors."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture
from exl2nb.model.config import MAX_EXPERTS, Files, MoE, Names
from exl2nb.model.config_fields import Fields, Keys, known_words
from exl2nb.model.rope import RopeConfig

KEY_RENAMES = (
    ("transformer.", "model."),
    (".blocks.", ".layers."),
    (".norm_attn_norm.norm_1.", ".input_layernorm."),
    (".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
    (".norm_attn_norm.attn.", ".self_attn."),
    (".out_proj.", ".o_proj."),
    (".ffn.experts.mlp.", ".block_sparse_moe.experts."),
    (".ffn.router.layer.", ".block_sparse_moe.gate."),
    (".norm_f.", ".norm."),
    (".wte.", ".embed_tokens."),
)


def dbrx_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """What `attn_config` and `ffn_config` say."""
    empty = Fields({}, fields.where)
    attention, ffn = fields.child("attn_config") or empty, fields.child("ffn_config") or empty
    count = ffn.integer("moe_num_experts", low=1, high=MAX_EXPERTS, default=4)
    theta = attention.number("rope_theta", low=1.0 + 1e-6, high=1e15, default=None)
    own = (fields.child("rope_parameters") or empty).number("rope_theta", low=1.0 + 1e-6, high=1e15, default=None)
    if None not in (theta, own) and theta != own:
        raise attention.refuse("rope_theta", theta, f"the rope_theta of rope_parameters, {own:g}, or only one of the two")
    rope = fields if theta is None else Fields({**fields.raw, "rope_theta": theta}, fields.where)
    # published files say 1; null leaves the weights as they are
    given = ffn.raw.get("moe_normalize_expert_weights", 1.0) is not None
    return {
        "clip_qkv": attention.number("clip_qkv", low=1e-6, high=1e9, default=0.0),
        "rope": RopeConfig.read(rope, head_dim=sizes["head_dim"], max_positions=sizes["max_position_embeddings"]),
        "moe": MoE(
            num_experts=count,
            top_k=ffn.integer("moe_top_k", low=1, high=count, default=1),
            intermediate_size=sizes["intermediate_size"],
            layers=(True,) * sizes["num_layers"],
            renormalize=ffn.number("moe_normalize_expert_weights", low=0.1, high=16.0, default=1.0) if given else 0.0,
        ),
    }


ARCHS.register("DbrxForCausalLM")(
    Architecture(
        model_type="dbrx",
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "num_key_value_heads": "attn_config.kv_n_heads",
            "intermediate_size": "ffn_config.ffn_hidden_size",
            "hidden_act": "ffn_config.ffn_act_fn.name",
        },
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 1, "intermediate_size": 3584},
        eps=1e-5,
        eps_key="layer_norm_eps",
        names=Names(
            router="block_sparse_moe.gate",
            expert_gate="block_sparse_moe.experts.{}.w1",
            expert_up="block_sparse_moe.experts.{}.v1",
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
        files=Files(
            renames=KEY_RENAMES,
            fused=(("self_attn.Wqkv", ("q", "k", "v")),),
            stacked=(
                ("block_sparse_moe.experts.w1", "gate", False),
                ("block_sparse_moe.experts.v1", "up", False),
                ("block_sparse_moe.experts.w2", "down", True),
            ),
        ),
        fixed={"norm": "layer"},
        read=dbrx_features,
        nested={
            "attn_config": Keys(used=known_words("kv_n_heads clip_qkv rope_theta")),
            "ffn_config": Keys(
                used=known_words("ffn_hidden_size ffn_act_fn moe_num_experts moe_top_k moe_normalize_expert_weights"),
                neutral={"uniform_expert_assignment": (False,)},
                ignored=known_words("moe_jitter_eps moe_loss_weight hidden_size"),  # noise and loss of training; a copy of d_model
            ),
        },
    )
)
