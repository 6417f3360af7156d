"""Qwen 1.5, 2 and 2.5: biases on q, k and v; a window on the upper layers where the config switches it on."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields
from exl2nb.model.rope import MAX_CONTEXT

KINDS = ("full_attention", "sliding_attention")


def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`layer_types` says which layers slide; without it, those from `max_window_layers` on."""
    used = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=4096) if used else 0
    first = fields.integer("max_window_layers", low=0, high=1 << 20, default=28)
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else 0 for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in KINDS for kind in kinds):
        raise fields.refuse("layer_types", kinds, f"a list of {num_layers} names out of {', '.join(KINDS)}")
    if not window and KINDS[1] in kinds:
        raise fields.refuse("layer_types", kinds, "no sliding_attention while use_sliding_window is false")
    return tuple(window if kind == KINDS[1] else 0 for kind in kinds)


ARCHS.register("Qwen2ForCausalLM")(
    Architecture(
        model_type="qwen2",
        qkv_bias=True,
        windows=windows,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    )
)
