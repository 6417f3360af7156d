"""Mixtral: Mistral with experts in every layer; those that a token visits share a weight of one."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.archs.mistral import windows
from exl2nb.model.fields import Fields
from exl2nb.model.moe import MAX_EXPERTS, MoE
from exl2nb.model.names import Names

NAMES = Names(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)


def experts(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """As large as the MLP they replace."""
    count = fields.integer("num_local_experts", low=1, high=MAX_EXPERTS)
    return {
        "moe": MoE(
            num_experts=count,
            top_k=fields.integer("num_experts_per_tok", low=1, high=count),
            intermediate_size=sizes["intermediate_size"],
            layers=(True,) * sizes["num_layers"],
            renormalize=1.0,
        )
    }


ARCHS.register("MixtralForCausalLM")(
    Architecture(
        model_type="mixtral",
        windows=windows,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        eps=1e-5,
        names=NAMES,
        read=experts,
    )
)
