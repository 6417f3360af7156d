"""How model families write tool calls: a table of formats, and which one a chat template belongs to. Knows neither streams nor grammars."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_JSON_HEAD = (
    r'\s*(?:```\w*\s*)?[\[\s]*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*'
    r'"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How one model family writes calls: `opens before NAME middle ARGUMENTS after (between ...)* closes`.

    seen: texts that all occur in the chat templates of the family. trigger: the tag a call begins with; "" where a call is JSON that is the
    whole answer. head: matches what stands before the arguments; group 1 is the name. argument: for families that write each argument
    between tags instead of one JSON object: the texts before its name, between name and value, and after the value; texts are written
    bare, all else as JSON. marks: tags that may follow the arguments. id_length: characters of a call's id.
    """

    name: str
    seen: tuple[str, ...]
    before: str
    middle: str
    after: str
    opens: str = ""
    between: str = "\n"
    closes: str = ""
    trigger: str = ""
    head: str = _JSON_HEAD
    marks: tuple[str, ...] = ()
    argument: tuple[str, str, str] | None = None
    id_length: int = 24
    text_arguments: bool = False  # its templates put the arguments of earlier calls together as text

    @cached_property
    def head_pattern(self) -> re.Pattern[str]:
        """`head`, compiled."""
        return re.compile(self.head)

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """Every tag that the parser looks for; some are special tokens, which have no text of their own in an answer."""
        return tuple(dict.fromkeys(tag for tag in (self.trigger, *self.marks) if tag))

    def new_id(self) -> str:
        """A fresh id of a call."""
        letters = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return letters if self.id_length < 20 else f"call_{letters}"


_HERMES_AFTER = ("</tool_call>",)
_DEEPSEEK = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "[ARGS]")
FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat(
            name="glm",
            seen=("<tool_call>", "<arg_key>"),
            trigger="<tool_call>",
            before="<tool_call>",
            middle="\n",
            after="</tool_call>",
            head=r"\s*<tool_call>\s*([^\s<]+)\s*",
            marks=_HERMES_AFTER,
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        ToolFormat(
            name="qwen-coder",
            seen=("<tool_call>", "<function="),
            trigger="<tool_call>",
            before="<tool_call>\n<function=",
            middle=">\n",
            after="</function>\n</tool_call>",
            head=r"\s*<tool_call>\s*<function=([^>\s]+)>\s*",
            marks=("</function>", *_HERMES_AFTER),
            argument=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        ToolFormat(
            name="hermes",
            seen=("<tool_call>",),
            trigger="<tool_call>",
            before='<tool_call>\n{"name": "',
            middle='", "arguments": ',
            after="}\n</tool_call>",
            head=r"\s*<tool_call>" + _JSON_HEAD,
            marks=_HERMES_AFTER,
        ),
        ToolFormat(
            name="mistral-args",
            seen=("[TOOL_CALLS]", "[ARGS]"),
            trigger="[TOOL_CALLS]",
            before="[TOOL_CALLS]",
            middle="[ARGS]",
            after="",
            between="",
            head=r"\s*\[TOOL_CALLS\]\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{)",
            marks=("[ARGS]", "[CALL_ID]"),
            id_length=9,
        ),
        ToolFormat(
            name="mistral",
            seen=("[TOOL_CALLS]",),
            trigger="[TOOL_CALLS]",
            opens="[TOOL_CALLS][",
            before='{"name": "',
            middle='", "arguments": ',
            after="}",
            between=", ",
            closes="]",
            head=r"\s*(?:\[TOOL_CALLS\])?" + _JSON_HEAD,
            id_length=9,
        ),
        ToolFormat(
            name="deepseek",
            seen=("<｜tool▁calls▁begin｜>", "```json"),
            trigger="<｜tool▁calls▁begin｜>",
            opens="<｜tool▁calls▁begin｜>",
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
            closes="<｜tool▁calls▁end｜>",
            head=r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\s*(?:function\s*<｜tool▁sep｜>)?([^\s<]+)\s*```json\s*(?=\{)",
            marks=_DEEPSEEK,
            text_arguments=True,
        ),
        ToolFormat(
            name="deepseek-plain",
            seen=("<｜tool▁calls▁begin｜>",),
            trigger="<｜tool▁calls▁begin｜>",
            opens="<｜tool▁calls▁begin｜>",
            before="<｜tool▁call▁begin｜>",
            middle="<｜tool▁sep｜>",
            after="<｜tool▁call▁end｜>",
            between="",
            closes="<｜tool▁calls▁end｜>",
            head=r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\s*([^\s<]+)\s*<｜tool▁sep｜>\s*(?=\{)",
            marks=_DEEPSEEK,
            text_arguments=True,
        ),
        ToolFormat(
            name="llama3",
            seen=("<|start_header_id|>",),
            before='{"name": "',
            middle='", "parameters": ',
            after="}",
            between="; ",
            marks=("<|python_tag|>",),
        ),
        ToolFormat(name="gemma", seen=("<start_of_turn>",), before='{"name": "', middle='", "parameters": ', after="}"),
        ToolFormat(name="json", seen=(), before='{"name": "', middle='", "arguments": ', after="}"),
    )
}
"""In the order in which they are looked for; "json" is for templates that none of the others is for."""


def tool_format(template: str) -> ToolFormat:
    """The format of the family that a chat template is for."""
    return next(one for one in FORMATS.values() if all(text in template for text in one.seen))


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One function the model may call. parameters: the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    @property
    def json(self) -> dict[str, Any]:
        """As chat templates read it."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}}


def tools_of(value: Any) -> tuple[Tool, ...]:
    """Check functions given as `{"type": "function", "function": {"name", "description", "parameters"}}`, or as the inner object alone.

    Raises:
        OptionError: names the entry and what is expected.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, Mapping) for one in value) or len(value) > MAX_TOOLS:
        raise OptionError(f"tools is {str(value)[:80]!r}; expected a list of JSON schemas of functions, as dicts, at most {MAX_TOOLS}")
    made: list[Tool] = []
    for number, one in enumerate(value):
        if one.get("type", "function") != "function":
            raise OptionError(f"tools: number {number} is of type {shown(one['type'])}; expected 'function'")
        inner = one.get("function", one)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(f"tools: number {number} has the name {shown(name)}; expected 1 to 64 letters, digits, '_', '-' or '.'")
        parameters = inner.get("parameters")
        parameters = {"type": "object", "properties": {}} if parameters is None else parameters
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise OptionError(f"tools: parameters of {name!r} is {shown(parameters)}; expected a JSON schema of type object")
        made.append(Tool(name=name, description=str(inner.get("description") or ""), parameters={"type": "object", **parameters}))
    names = [tool.name for tool in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"tools: {twice!r} is there twice; give each function a name of its own")
    return tuple(made)


def described(tools: Sequence[Tool], form: ToolFormat) -> str:
    """What tells a model about tools whose chat template does not: text for the system message."""
    lines = "\n".join(json.dumps(tool.json["function"], ensure_ascii=False) for tool in tools)
    call = f"{form.opens}{form.before}NAME{form.middle}{{...}}{form.after}{form.closes}"
    return (
        "You may call functions. Each is described by one line of JSON, with the JSON schema of its arguments:\n"
        f"{lines}\n\nTo call a function, answer with nothing but\n{call}\nwhere NAME is its name and {{...}} its arguments as JSON."
    )
