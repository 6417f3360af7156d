"""Mistral Small 3.1 and later: the text part of the multimodal class; the vision tower and its projector are left alone."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.archs.mistral import windows
from exl2nb.model.names import Files, Names

ARCHS.register("Mistral3ForConditionalGeneration")(
    Architecture(
        model_type="mistral3",
        text_key="text_config",
        windows=windows,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True},
        names=Names(
            embed="language_model.model.embed_tokens",
            layer="language_model.model.layers.{}",
            norm="language_model.model.norm",
            head="language_model.lm_head",
        ),
        files=Files(
            renames=(
                ("model.language_model.", "language_model.model."),
                ("language_model.lm_head.", "lm_head."),
                ("lm_head.", "language_model.lm_head."),
                ("model.vision_tower.", "vision_tower."),
                ("model.multi_modal_projector.", "multi_modal_projector."),
            ),
            passed=("vision_tower.*", "multi_modal_projector.*"),
        ),
    )
)
