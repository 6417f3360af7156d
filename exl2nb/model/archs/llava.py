"""Llava and Pixtral: a decoder of another architecture behind a vision tower."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exl2nb.core.errors import ConfigError
from exl2nb.model.archs import llama, mistral, qwen
from exl2nb.model.archs.base import ARCHS, Architecture, inside
from exl2nb.model.config import ModelConfig

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


@dataclass(frozen=True, kw_only=True)
class Wrapped(Architecture):
    """An architecture whose decoder is the one that `text_config` names. decoders: model_type -> architecture."""

    decoders: Mapping[str, Architecture] = field(default_factory=dict)

    def config(self, name: str, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """Read and check `raw` as this architecture."""
        text = raw.get("text_config")
        kind = text.get("model_type", "llama") if isinstance(text, Mapping) else None
        if not isinstance(kind, str) or kind not in self.decoders:
            raise ConfigError(f"{where}: text_config.model_type is {str(kind)[:40]!r}; expected one of {', '.join(sorted(self.decoders))}")
        return self.decoders[kind].config(name, raw, where)


def _inside(name: str, defaults: Mapping[str, Any]) -> Architecture:
    text = ARCHS[name]
    return inside(replace(text, defaults={**text.defaults, **defaults}))


DECODERS = {
    "llama": _inside("LlamaForCausalLM", LLAMA),
    "mistral": _inside("MistralForCausalLM", MISTRAL),
    "qwen2": _inside("Qwen2ForCausalLM", QWEN2),
}
ARCHS.register("LlavaForConditionalGeneration")(Wrapped(model_type="llava", files=DECODERS["llama"].files, decoders=DECODERS))
