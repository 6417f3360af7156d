"""Mistral: Llama with a sliding window on every layer (4096 where the key is absent, none where it is null)."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields
from exl2nb.model.rope import MAX_CONTEXT


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
