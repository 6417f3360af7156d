"""Options of requests and conversations as types: what an editor completes, and what the signatures in a notebook spell out.

`tests/llm/test_request_options.py` holds them to the dataclasses and functions that check them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from exl2nb.generator.request import Chunk, Request
from exl2nb.sampling.defaults import DEFAULT_NAMES
from exl2nb.sampling.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from exl2nb.constraint.structure import Structure
    from exl2nb.generator.speculation import Speculation


class RequestOptions(SamplingOptions, total=False):
    """Fields of `SamplingParams`, those of `Request`, and what makes its structure and its negative prompt."""

    max_tokens: int
    stop: str | int | Sequence[str | int]
    ignore_eos: bool
    banned_strings: str | Sequence[str]
    token_healing: bool
    top_logprobs: int
    return_logits: bool
    priority: int
    timeout_s: float | None
    structure: Structure | None
    negative_ids: Sequence[int]
    cfg_scale: float
    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    speculation: Speculation | str | Mapping[str, Any]
    lora: str | Mapping[str, float] | None
    negative_prompt: str | Sequence[int]
    schema: Any
    regex: str
    choice: Sequence[str]
    grammar: str


class GenerateOptions(RequestOptions, total=False):
    """Options of `generate`."""

    on_chunk: Callable[[Chunk], object]


class ConversationOptions(RequestOptions, total=False):
    """Options of `conversation`."""

    template: str | None
    tools: Sequence[Mapping[str, Any]]
    template_options: Mapping[str, Any]
    tool_choice: str
    parallel_tool_calls: bool
    reasoning_budget: int
    generation_config: bool


class ChatOptions(ConversationOptions, total=False):
    """Options of `chat`."""

    continue_final_message: bool


OPTION_DEFAULTS: dict[str, Any] = {field.name: field.default for cls in (SamplingParams, Request) for field in fields(cls)}
"""Of the options that have one."""
CHAT_DEFAULT_OPTIONS: dict[str, Any] = {name: value for name, value in OPTION_DEFAULTS.items() if name not in DEFAULT_NAMES} | {
    "generation_config": True
}
"""The same for `chat` and `conversation`, where the model decides about the others."""
