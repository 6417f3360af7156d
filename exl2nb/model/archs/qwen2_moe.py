"""Qwen 1.5 and 2 MoE: Qwen2 with small experts beside one that every token visits, weighted by a sigmoid."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture, layer_kinds
from exl2nb.model.fields import Fields
from exl2nb.model.moe import MAX_EXPERTS, MoE
from exl2nb.model.rope import MAX_CONTEXT

MAX_SIZE = 1 << 18


def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`layer_types` says which layers slide; without it, every second one below `max_window_layers`."""
    used = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=4096) if used else 0
    first = fields.integer("max_window_layers", low=0, high=1 << 20, default=28)
    kinds = layer_kinds(fields, num_layers, lambda i: bool(window) and i % 2 == 0 and i < first)
    return tuple(window if slides else 0 for slides in kinds)


def sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, those in `mlp_only_layers` never."""
    step = fields.integer("decoder_sparse_step", low=1, high=1 << 20, default=1)
    plain = fields.raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(i) is not int or not 0 <= i < num_layers for i in plain):
        raise fields.refuse("mlp_only_layers", plain, f"a list of layers from 0 to {num_layers - 1}")
    return tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers))


def experts(fields: Fields, sizes: Mapping[str, int], *, shared: bool = True) -> Mapping[str, Any]:
    """Routing as the config says; a model whose config has no experts is a dense one."""
    count = fields.integer("num_experts", low=0, high=MAX_EXPERTS)
    layers = sparse_layers(fields, sizes["num_layers"])
    if count == 0 or not any(layers):
        return {}
    return {
        "moe": MoE(
            num_experts=count,
            top_k=fields.integer("num_experts_per_tok", low=1, high=count),
            intermediate_size=fields.integer("moe_intermediate_size", low=8, high=MAX_SIZE),
            layers=layers,
            renormalize=float(fields.flag("norm_topk_prob", default=False)),
            shared_size=fields.integer("shared_expert_intermediate_size", low=8, high=MAX_SIZE) if shared else 0,
        )
    }


ARCHS.register("Qwen2MoeForCausalLM")(
    Architecture(
        model_type="qwen2_moe",
        qkv_bias="qkv_bias",
        windows=windows,
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        read=experts,
    )
)
