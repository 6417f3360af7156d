"""Mistral, Mistral 3 and Mixtral."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture, inside
from exl2nb.model.config import MAX_EXPERTS, MoE, Names
from exl2nb.model.fields import Fields
from exl2nb.model.rope import MAX_CONTEXT


# Mistral: Llama with a sliding window on every layer (4096 where the key is absent, none where it is null).
def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The same window on every layer."""
    return (fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0),) * num_layers


ARCHS.register("MistralForCausalLM")(
    Architecture(
        model_type="mistral",
        windows=windows,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    )
)


# Mistral Small 3.1 and later: the text part of the multimodal class; the vision tower and its projector are left alone.
MISTRAL3 = Architecture(
    model_type="mistral3",
    windows=windows,
    defaults={"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True},
)
ARCHS.register("Mistral3ForConditionalGeneration")(inside(MISTRAL3))


# Mixtral: Mistral with experts in every layer; those that a token visits share a weight of one.
MIXTRAL_NAMES = Names(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)


def mixtral_experts(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
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
        names=MIXTRAL_NAMES,
        read=mixtral_experts,
    )
)
