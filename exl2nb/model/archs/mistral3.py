"""Mistral Small 3.1 and later: the text part of the multimodal class; the vision tower and its projector are left alone."""

from exl2nb.model.archs.base import ARCHS, Architecture, inside
from exl2nb.model.archs.mistral import windows

TEXT = Architecture(
    model_type="mistral3",
    windows=windows,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True},
)
ARCHS.register("Mistral3ForConditionalGeneration")(inside(TEXT))
