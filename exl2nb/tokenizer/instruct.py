"""Instruct formats by name, for models that come without a chat template: Jinja sources and the texts that end an answer."""

from __future__ import annotations

from typing import NamedTuple


class Instruct(NamedTuple):
    """One format. source: its Jinja template. stop: texts that begin the next turn, which a model may write itself."""

    source: str
    stop: tuple[str, ...] = ()


def _turns(system: str, user: str, assistant: str, prompt: str) -> str:
    """A template whose roles stand in front of each message; `tool` results are shown as the user's."""
    return (
        "{{ bos_token or '' }}{% for message in messages %}"
        f"{{% if message.role == 'system' %}}{system}"
        f"{{% elif message.role == 'assistant' %}}{assistant}"
        f"{{% else %}}{user}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


_MISTRAL = """{{ bos_token or '' }}{% set ns = namespace(system='') %}{% for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = message.content ~ '\n\n' %}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ (eos_token or '') }}
{%- else %}{{ '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' }}{% set ns.system = '' %}{% endif %}{% endfor %}"""
_LLAMA2 = """{% set ns = namespace(system='') %}{% for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = '<<SYS>>\n' ~ message.content ~ '\n<</SYS>>\n\n' %}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ ' ' ~ (eos_token or '') }}
{%- else %}{{ (bos_token or '') ~ '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' }}{% set ns.system = '' %}{% endif %}{% endfor %}"""
INSTRUCT: dict[str, Instruct] = {
    "chatml": Instruct(
        "{% if bos_token and bos_token != '<|im_start|>' %}{{ bos_token }}{% endif %}{% for message in messages %}"
        "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}"
        "{% if not loop.last or message.role != 'assistant' or add_generation_prompt %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_end|>", "<|im_start|>"),
    ),
    "llama2": Instruct(_LLAMA2, ("[INST]",)),
    "mistral": Instruct(_MISTRAL, ("[INST]",)),
    "alpaca": Instruct(
        _turns(
            "{{ message.content ~ '\n\n' }}",
            "{{ '### Instruction:\n' ~ message.content ~ '\n\n' }}",
            "{{ '### Response:\n' ~ message.content ~ '\n\n' }}",
            "{{ '### Response:\n' }}",
        ),
        ("### Instruction:",),
    ),
    "vicuna": Instruct(
        _turns(
            "{{ message.content ~ '\n\n' }}",
            "{{ 'USER: ' ~ message.content ~ '\n' }}",
            "{{ 'ASSISTANT: ' ~ message.content ~ (eos_token or '') ~ '\n' }}",
            "{{ 'ASSISTANT:' }}",
        ),
        ("USER:",),
    ),
}
