"""GemMoE: Gemma with Mixtral's experts. Transformers has no such class; its definition is that of its two parts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl2nb.model.archs import gemma, mixtral
from exl2nb.model.archs.base import ARCHS
from exl2nb.model.fields import Fields


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Those of both."""
    return {**gemma.features(fields, sizes), **mixtral.experts(fields, sizes)}


ARCHS.register("GemmoeForCausalLM")(
    replace(
        ARCHS["GemmaForCausalLM"],
        model_type="gemmoe",
        defaults={**ARCHS["GemmaForCausalLM"].defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
        names=mixtral.NAMES,
        read=features,
    )
)
