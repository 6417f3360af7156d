"""A tiny random model of every class that sees, as Transformers writes it, with a tokenizer and a chat template of its kind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..tiny import randomize

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SPECIAL = {
    "<image>": 140,
    "<video>": 141,
    "<start>": 142,
    "<end>": 143,
    "[IMG_BREAK]": 144,
    "[IMG_END]": 145,
    "<boi>": 146,
    "<eoi>": 147,
    "<|user|>": 148,
    "<|bot|>": 149,
}
QWEN = {"image_token_id": 140, "video_token_id": 141, "vision_start_token_id": 142, "vision_end_token_id": 143}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 24, "patch_size": 8,
}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "num_hidden_layers": 2}
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48,
    "patch_size": 4,
}  # fmt: skip
SLIDING = {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SMALL = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 64 * 24}}


@dataclass(frozen=True)
class Seeing:
    """cls: Transformers' class. text, vision: of its config. top: the rest of it. processor: preprocessor_config.json."""

    cls: str
    text: dict[str, Any]
    vision: dict[str, Any]
    top: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> str:
        """Name of the config's class."""
        return self.cls.replace("ForConditionalGeneration", "Config")


ZOO = {
    "qwen2_vl": Seeing(
        "Qwen2VLForConditionalGeneration",
        {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        QWEN,
        SMALL,
    ),
    "qwen2_5_vl": Seeing(
        "Qwen2_5_VLForConditionalGeneration",
        {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        {
            "depth": 3,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        QWEN,
        SMALL,
    ),
    "qwen3_vl": Seeing(
        "Qwen3VLForConditionalGeneration",
        {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
        {
            "depth": 3,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 4,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        QWEN,
        SMALL,
    ),
    "gemma3": Seeing(
        "Gemma3ForConditionalGeneration",
        {**TEXT, **SLIDING, "query_pre_attn_scalar": 16},
        {**SIGLIP, "image_size": 32, "patch_size": 4},
        {"mm_tokens_per_image": 16, "image_token_index": 140, "boi_token_index": 146, "eoi_token_index": 147, "tie_word_embeddings": True},
        {"size": {"height": 32, "width": 32}},
    ),
    "llava": Seeing(
        "LlavaForConditionalGeneration",
        {**TEXT, "model_type": "llama"},
        CLIP,
        {"image_token_index": 140},
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
    ),
    "llava-siglip": Seeing(
        "LlavaForConditionalGeneration",
        {**{k: v for k, v in TEXT.items() if k != "head_dim"}, "model_type": "qwen2"},
        SIGLIP,
        {"image_token_index": 140, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"size": {"height": 24, "width": 24}},
    ),
    "pixtral": Seeing(
        "LlavaForConditionalGeneration",
        {**TEXT, "model_type": "mistral", "sliding_window": None},
        PIXTRAL,
        {"image_token_index": 140, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"size": {"longest_edge": 48}},
    ),
    "mistral3": Seeing(
        "Mistral3ForConditionalGeneration",
        {**TEXT, "model_type": "mistral", "sliding_window": None},
        PIXTRAL,
        {"image_token_index": 140, "tie_word_embeddings": False},
        {"size": {"longest_edge": 48}},
    ),
}
TEMPLATE = """{%- for m in messages -%}
<|{{ 'user' if m.role != 'assistant' else 'bot' }}|> {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}<start><video><end>{% else %} {{ part.text }} {% endif %}
{%- endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %} <|bot|>{% endif %}"""


def build(name: str, seed: int = 0) -> Any:
    """The model of entry `name` in Transformers, random, fp32, on the eager path."""
    import transformers

    entry = ZOO[name]
    config = getattr(transformers, entry.config)(text_config=dict(entry.text), vision_config=dict(entry.vision), **entry.top)
    config.architectures = [entry.cls]
    torch.manual_seed(seed)
    model = getattr(transformers, entry.cls)._from_config(config, attn_implementation="eager").eval()
    return randomize(model, seed, norm=0.0 if "Gemma" in entry.cls else 1.0)


def write(name: str, model: Any, directory: Path, *, tokenizer: bool = True) -> Path:
    """Its files, with the preprocessor's, a tokenizer of 130 words and a chat template."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    entry = ZOO[name]
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(entry.processor))
    if entry.cls.startswith("Qwen"):
        (directory / "video_preprocessor_config.json").write_text(json.dumps(entry.processor))
    if not tokenizer:
        return directory
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": 3 + i for i in range(130)}}
    words |= {f"<unused{i}>": i for i in range(133, 140)} | SPECIAL
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.save(str(directory / "tokenizer.json"))
    mark = {"gemma3": "<boi>"}.get(name, "<image>")
    mark = f"<start>{mark}<end>" if entry.cls.startswith("Qwen") else mark
    template = TEMPLATE.replace("IMAGE", mark)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    return directory
