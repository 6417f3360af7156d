"""SmolLM3: Llama where every fourth layer has no RoPE; those may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture, layer_kinds
from exl2nb.model.fields import Fields
from exl2nb.model.rope import MAX_CONTEXT


def rope_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """`no_rope_layers` holds 1 where a layer has RoPE and 0 where it has none."""
    every = fields.integer("no_rope_layer_interval", low=1, high=1 << 20, default=4)
    marks = fields.raw.get("no_rope_layers")
    if marks is None:
        return tuple("main" if (i + 1) % every else "none" for i in range(num_layers))
    if not isinstance(marks, list) or len(marks) < num_layers or any(mark not in (0, 1) for mark in marks):
        raise fields.refuse("no_rope_layers", marks, f"a list of {num_layers} numbers, 0 or 1")
    return tuple("main" if mark else "none" for mark in marks[:num_layers])


def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The sliding layers' window, where it is switched on."""
    used = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0) if used else 0
    kinds = rope_kinds(fields, num_layers)
    sliding = layer_kinds(fields, num_layers, lambda i: window > 0 and kinds[i] == "none")
    return tuple(window if slides else 0 for slides in sliding)


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Which layers rotate."""
    return {"rope_kinds": rope_kinds(fields, sizes["num_layers"])}


ARCHS.register("SmolLM3ForCausalLM")(
    Architecture(
        model_type="smollm3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=windows,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        read=features,
    )
)
