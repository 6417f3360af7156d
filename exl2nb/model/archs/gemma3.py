"""Gemma 3: Gemma 2 without caps, with head norms; five sliding layers with a RoPE of their own for each global one.

The text model alone, and the same inside the multimodal class, whose vision tower and projector are left alone.
"""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs import gemma2
from exl2nb.model.archs.base import ARCHS, Architecture, inside, layer_kinds
from exl2nb.model.fields import Fields
from exl2nb.model.rope import MAX_CONTEXT, RopeConfig


def sliding(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """`layer_types`, or all but every `sliding_window_pattern`-th."""
    every = fields.integer("sliding_window_pattern", low=1, high=1 << 20, default=6)
    return layer_kinds(fields, num_layers, lambda i: (i + 1) % every != 0)


def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The sliding layers' window."""
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0)
    return tuple(window if slides else 0 for slides in sliding(fields, num_layers))


def _rope(fields: Fields, sizes: Mapping[str, int], kind: str, key: str, theta: float) -> RopeConfig:
    """New files have one set per kind of layer; old ones `rope_theta` and `rope_scaling` (global), `rope_local_base_freq` (local)."""
    theta = fields.number(key, low=1.0 + 1e-6, high=1e15, default=theta)
    both = fields.child("rope_parameters")
    own = both.child(kind) if both is not None else None
    found: dict[str, Any] = {"rope_theta": theta, "rope_parameters": own.raw if own is not None else None}
    if kind == "full_attention":
        found["rope_scaling"] = fields.raw.get("rope_scaling")
    where = own.where if own is not None else fields.where
    return RopeConfig.read(Fields(found, where), head_dim=sizes["head_dim"], max_positions=sizes["max_position_embeddings"])


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Gemma 2's, and the two RoPEs."""
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.refuse("use_bidirectional_attention", True, "false: only causal attention is supported")
    return {
        **gemma2.features(fields, sizes),
        "rope": _rope(fields, sizes, "full_attention", "rope_theta", 1e6),
        "local_rope": _rope(fields, sizes, "sliding_attention", "rope_local_base_freq", 1e4),
        "rope_kinds": tuple("local" if slides else "main" for slides in sliding(fields, sizes["num_layers"])),
    }


TEXT = Architecture(
    model_type="gemma3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    windows=windows,
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    names=gemma2.NAMES,
    activation_key="hidden_activation",
    fixed={"norm_offset": 1.0, "post_norm": True, "qk_norm": "head"},
    read=features,
)
ARCHS.register("Gemma3ForCausalLM")(TEXT)
ARCHS.register("Gemma3ForConditionalGeneration")(inside(TEXT, ("mm_input_projection_weight", "mm_input_projection.weight")))
