"""Llava and Pixtral: a decoder of another architecture behind a vision tower."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl2nb.model.archs import llama, mistral, qwen
from exl2nb.model.archs.base import ARCHS, Architecture, Wrapped, inside

REGISTERED = (llama, mistral, qwen)  # before their entries are looked up below

# Llava's files leave out of `text_config` whatever is a default of its class.
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
MISTRAL = {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
QWEN2 = {**LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}


OUTER = (
    "image_token_index image_seq_length projector_hidden_act multimodal_projector_bias vision_feature_layer vision_feature_select_strategy"
)


def _inside(name: str, defaults: Mapping[str, Any]) -> Architecture:
    text = ARCHS[name]
    return inside(replace(text, defaults={**text.defaults, **defaults}), inner_types=(text.model_type,), outer=OUTER)


DECODERS = {
    "llama": _inside("LlamaForCausalLM", LLAMA),
    "mistral": _inside("MistralForCausalLM", MISTRAL),
    "qwen2": _inside("Qwen2ForCausalLM", QWEN2),
}
ARCHS.register("LlavaForConditionalGeneration")(
    Wrapped(model_type="llava", files=DECODERS["llama"].files, decoders=DECODERS, default_decoder="llama")
)
