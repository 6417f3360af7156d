"""Llava and Pixtral: a decoder of another architecture behind a vision tower."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl2nb.model.archs import llama, mistral, qwen
from exl2nb.model.archs.architecture import ARCHS, Architecture, Wrapped, as_inner_decoder

REGISTERED_MODULES = (llama, mistral, qwen)  # before their entries are looked up below

# Llava's files leave out of `text_config` whatever is a default of its class.
LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
MISTRAL_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}


OUTER_KEYS = (
    "image_token_index image_seq_length projector_hidden_act multimodal_projector_bias vision_feature_layer vision_feature_select_strategy"
)


def _llava_decoder(name: str, defaults: Mapping[str, Any]) -> Architecture:
    text = ARCHS[name]
    return as_inner_decoder(replace(text, defaults={**text.defaults, **defaults}), inner_types=(text.model_type,), outer=OUTER_KEYS)


LLAVA_DECODERS = {
    "llama": _llava_decoder("LlamaForCausalLM", LLAMA_DEFAULTS),
    "mistral": _llava_decoder("MistralForCausalLM", MISTRAL_DEFAULTS),
    "qwen2": _llava_decoder("Qwen2ForCausalLM", QWEN2_DEFAULTS),
}
ARCHS.register("LlavaForConditionalGeneration")(
    Wrapped(model_type="llava", files=LLAVA_DECODERS["llama"].files, decoders=LLAVA_DECODERS, default_decoder="llama")
)
