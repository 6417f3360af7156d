"""Mistral, Mistral 3, Ministral 3 and Mixtral."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture, Wrapped, as_inner_decoder
from exl2nb.model.config import MAX_EXPERTS, MoE, Names
from exl2nb.model.config_fields import ROPE_KEYS, Fields, known_words
from exl2nb.model.rope import MAX_CONTEXT, RopeConfig


# Mistral: Llama with a sliding window on every layer (4096 where the key is absent, none where it is null).
def mistral_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The same window on every layer."""
    return (fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0),) * num_layers


MISTRAL_TEXT = Architecture(
    model_type="mistral",
    windows=mistral_windows,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    reads="sliding_window",
)
ARCHS.register("MistralForCausalLM")(MISTRAL_TEXT)


# Ministral 3: Mistral without a window unless the config has one, YaRN, and queries that grow with their position. The factor of a query
# is 1 + beta * log(1 + floor(position / original_max_position_embeddings)), so it is exactly 1 within the original context. The kernels
# turn queries and keys by one table and have no factor for queries alone, so the context of such a model ends where the factor begins.
def ministral3_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """The RoPE, and the context up to which queries keep their size."""
    positions = sizes["max_position_embeddings"]
    own = fields.child("rope_scaling") or fields.child("rope_parameters") or Fields({}, fields.where)
    beta = own.number("llama_4_scaling_beta", low=0.0, high=1e3, default=0.0)
    rope = RopeConfig.read(fields, head_dim=sizes["head_dim"], max_positions=positions)
    limit = own.integer("original_max_position_embeddings", low=1, high=MAX_CONTEXT, default=rope.original_positions) if beta else 0
    if not limit:
        return {"rope": rope}
    return {
        "rope": rope,
        "max_position_embeddings": min(positions, limit),
        "context_limit": limit,
        "context_limit_reason": f"Beyond it, llama_4_scaling_beta {beta:g} scales every query by its position",
    }


MINISTRAL3_TEXT = Architecture(
    model_type="ministral3",
    windows=mistral_windows,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    eps=1e-5,
    read=ministral3_features,
    reads="sliding_window",
    rope_keys=replace(ROPE_KEYS, used=ROPE_KEYS.used | known_words("llama_4_scaling_beta")),
)
ARCHS.register("Ministral3ForCausalLM")(MINISTRAL3_TEXT)


# Mistral Small 3.1 and later: the text part of the multimodal class; the vision tower and its projector are left alone. Files leave out of
# `text_config` whatever is a default of the class that its model_type names.
TEXT_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
OUTER_KEYS = "image_token_index spatial_merge_size vision_feature_layer projector_hidden_act multimodal_projector_bias"


def _mistral3_decoder(text: Architecture) -> Architecture:
    defaults = {**TEXT_DEFAULTS, **text.defaults, "tie_word_embeddings": True}
    return as_inner_decoder(replace(text, defaults=defaults), inner_types=(text.model_type,), outer=OUTER_KEYS)


MISTRAL3_DECODERS = {"mistral": _mistral3_decoder(MISTRAL_TEXT), "ministral3": _mistral3_decoder(MINISTRAL3_TEXT)}
ARCHS.register("Mistral3ForConditionalGeneration")(
    Wrapped(model_type="mistral3", files=MISTRAL3_DECODERS["mistral"].files, decoders=MISTRAL3_DECODERS, default_decoder="mistral")
)


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
        windows=mistral_windows,
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
        keys={"num_local_experts": "num_experts"},
        reads="sliding_window num_experts_per_tok",
    )
)
