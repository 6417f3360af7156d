"""Qwen3 MoE: Qwen3 with experts, none of them shared."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs import qwen2_moe
from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields
from exl2nb.model.rope import MAX_CONTEXT


def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The same window on every layer, where the config switches it on."""
    used = fields.flag("use_sliding_window", default=False)
    return (fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=4096) if used else 0,) * num_layers


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Old files call the experts `num_experts`, newer ones may say `num_local_experts`."""
    raw = dict(fields.raw)
    raw["num_experts"] = raw.get("num_experts", raw.get("num_local_experts", 128))
    return qwen2_moe.experts(Fields(raw, fields.where), sizes, shared=False)


ARCHS.register("Qwen3MoeForCausalLM")(
    Architecture(
        model_type="qwen3_moe",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=windows,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fixed={"qk_norm": "head"},
        read=features,
    )
)
