"""How model families write tool calls: a table of formats, and which one a chat template belongs to. Knows neither streams nor grammars."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.tokenizer import gemma_arguments

MAX_TOOLS = 128
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
INDEX_PLACEHOLDER = "{index}"  # in a `ToolFormat`: the number of the call in the answer
ID_PLACEHOLDER = "{id}"  # in a `ToolFormat`: nine letters and digits of the call's id


def _json_head(name: str = "name", arguments: tuple[str, ...] = ("arguments", "parameters")) -> str:
    """A pattern for the beginning of a call that is a JSON object, up to its arguments. Group 1 is the name of the function."""
    return (
        r"\s*(?:```\w*\s*)?[\[\s]*\{\s*(?:\"(?:type|id|tool_call_id)\"\s*:\s*\"[^\"]*\"\s*,\s*)*"
        rf'"{name}"\s*:\s*"([^"\\]+)"\s*,\s*"(?:{"|".join(arguments)})"\s*:\s*(?=\{{)'
    )


@dataclass(frozen=True, kw_only=True)
class TaggedArguments:
    """Arguments that stand between tags, one after another, instead of in one JSON object.

    A value is written as it is where its schema says string, and as JSON otherwise. `{kind}` in `before` stands for "true" or "false":
    whether the value is such a text (DeepSeek V3.2).

    Attributes:
        before: Text before the name of an argument.
        between: Text between the name and the value.
        after: Text after the value.
    """

    before: str
    between: str
    after: str

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """Matches what stands before a value, however white space is spread over lines. Groups: name, kind."""
        between = r"\s*".join(re.escape(part) for part in self.between.split())
        between = between.replace(re.escape("{kind}"), "(?P<kind>true|false)") if "{kind}" in self.between else f"(?P<kind>){between}"
        return re.compile(rf"\s*{re.escape(self.before.strip())}\s*(?P<name>[^<>\"\n]*?)\s*{between}")

    @property
    def end(self) -> str:
        """The tag behind a value, without the line breaks around it. No value can contain it."""
        return self.after.strip()

    def value(self, raw: str) -> str:
        """A value without the line breaks that the family writes around it."""
        raw = raw.removeprefix("\n") if self.between.endswith("\n") else raw
        return raw.removesuffix("\n") if self.after.startswith("\n") else raw


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How one model family writes calls: `opens before NAME middle ARGUMENTS after (between before ...)* closes`.

    Attributes:
        name: Of the format, as the guide and errors call it.
        seen: Texts that all occur in the chat templates of the family.
        before: Text before the name of a function.
        middle: Text between the name and the arguments. It may contain `INDEX_PLACEHOLDER` and `ID_PLACEHOLDER`.
        after: Text after the arguments.
        opens: Text before the first call.
        between: Text between two calls.
        closes: Text after the last call.
        trigger: The tag that a call begins with; "" where a call is JSON that is the whole answer.
        head: A pattern for what stands before the arguments. Group 1 is the name.
        tagged: How arguments are written where they are not one JSON object.
        layout: How arguments and messages are laid out: "json", "tagged", "gemma" (see `gemma_arguments`) or "harmony" (see `harmony`).
        marks: Tags that may follow the arguments.
        next_call: The tag of a further call where it is not the trigger.
        ends: Tokens that end the answer, even where no file of the model names them as end tokens.
        id_length: Characters of a call's id.
        id_text: The id of a call where the family makes it of the name and the number of the call; "" for random letters.
        taught: Whether templates of the family describe this form to the model when they get functions. False: we describe it.
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
    head: str = _json_head()
    tagged: TaggedArguments | None = None
    layout: Literal["json", "tagged", "gemma", "harmony"] = "json"
    marks: tuple[str, ...] = ()
    next_call: str = ""
    ends: tuple[str, ...] = ()
    id_length: int = 24
    id_text: str = ""
    taught: bool = True

    @cached_property
    def head_pattern(self) -> re.Pattern[str]:
        """`head`, compiled."""
        return re.compile(self.head)

    @cached_property
    def bare(self) -> bool:
        """Whether a call may come without its trigger: then it is JSON that the answer begins with."""
        call = f"{self.before.removeprefix(self.trigger)}f{self.middle}{{}}".replace(INDEX_PLACEHOLDER, "0").replace(ID_PLACEHOLDER, "a")
        return not self.trigger or (self.is_object and self.head_pattern.match(call) is not None)

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """Every tag that the parser looks for. Some are special tokens, which have no text of their own in an answer."""
        return tuple(dict.fromkeys(tag for tag in (self.trigger, self.next_call, *self.marks, *self.ends) if tag))

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object that its arguments are a member of."""
        return self.layout == "json" and self.after.lstrip().startswith("}")

    def new_id(self, name: str, number: int) -> str:
        """An id for a call that the model wrote.

        Args:
            name: The name of the function.
            number: The number of the call in the answer.
        """
        if self.id_text:
            return self.id_text.format(name=name, index=number)
        letters = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return letters if self.id_length < 20 else f"call_{letters}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls in this form.

        Args:
            calls: The name and the arguments, as JSON text, of each call.
        """
        made: list[str] = []
        for number, (name, text) in enumerate(calls):
            before, middle = (
                part.replace(INDEX_PLACEHOLDER, str(number)).replace(ID_PLACEHOLDER, f"call{number:05}")
                for part in (self.before, self.middle)
            )
            made.append(f"{before}{name}{middle}{self._arguments(text)}{self.after}")
        return f"{self.opens}{self.between.join(made)}{self.closes}"

    def _arguments(self, text: str) -> str:
        if self.layout == "gemma":
            return gemma_arguments.written(json.loads(text))
        if self.tagged is None:
            return text
        parts: list[str] = []
        for name, value in json.loads(text).items():
            before = self.tagged.before
            between = self.tagged.between.replace("{kind}", "true" if isinstance(value, str) else "false")
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parts.append(f"{before}{name}{between}{shown}{self.tagged.after}")
        return "".join(parts)


_HERMES_AFTER = ("</tool_call>",)
_INVOKE_ENDS = ("</invoke>", "</minimax:tool_call>")
_GLM_FORMAT = ToolFormat(
    name="glm",
    seen=("<tool_call>", "<arg_key>"),
    layout="tagged",
    trigger="<tool_call>",
    before="<tool_call>",
    middle="\n",
    after="</tool_call>",
    head=r"\s*<tool_call>\s*([^\s<]+)(?=[\s<])\s*",
    marks=_HERMES_AFTER,
    tagged=TaggedArguments(before="<arg_key>", between="</arg_key>\n<arg_value>", after="</arg_value>\n"),
)
_MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    seen=("[TOOL_CALLS]", "[ARGS]"),
    trigger="[TOOL_CALLS]",
    before="[TOOL_CALLS]",
    middle="[ARGS]",
    after="",
    between="",
    head=r"\s*\[TOOL_CALLS\]\s*([^\s\[{]+)\s*(?:\[CALL_ID\](?P<id>[^\[]*))?\[ARGS\]\s*(?=\{)",
    marks=("[ARGS]", "[CALL_ID]"),
    id_length=9,
)
_DEEPSEEK_FORMAT = ToolFormat(
    name="deepseek",
    seen=("<｜tool▁calls▁begin｜>", "```json"),
    trigger="<｜tool▁calls▁begin｜>",
    opens="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    after="\n```<｜tool▁call▁end｜>",
    closes="<｜tool▁calls▁end｜>",
    head=r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\s*(?:function\s*<｜tool▁sep｜>)?([^\s<]+)\s*```json\s*(?=\{)",
    marks=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
    next_call="<｜tool▁call▁begin｜>",
)


def _json_list(name: str, trigger: str, closes: str, *, seen: tuple[str, ...] = (), **more: Any) -> ToolFormat:
    """A family that writes a trigger and then a JSON list of objects with "name" and "arguments"."""
    return ToolFormat(
        name=name,
        seen=seen or (trigger,),
        trigger=trigger,
        opens=f"{trigger}[",
        before='{"name": "',
        middle='", "arguments": ',
        after="}",
        between=", ",
        closes=closes,
        head=rf"\s*(?:{re.escape(trigger)})?" + _json_head(),
        **more,
    )


def _dsml(name: str, block: str, *, seen: tuple[str, ...]) -> ToolFormat:
    """DeepSeek's markup language, in which calls stand in a block of this name."""
    opens, closes = f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"
    return ToolFormat(
        name=name,
        seen=seen,
        layout="tagged",
        trigger=opens,
        opens=f"{opens}\n",
        before='<｜DSML｜invoke name="',
        middle='">\n',
        after="</｜DSML｜invoke>\n",
        between="",
        closes=closes,
        head=rf'\s*(?:{opens})?\s*<｜DSML｜invoke\s+name="([^"]+)">\s*',
        marks=("</｜DSML｜invoke>", closes),
        next_call="<｜DSML｜invoke",
        tagged=TaggedArguments(before='<｜DSML｜parameter name="', between='" string="{kind}">', after="</｜DSML｜parameter>\n"),
    )


FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat(
            name="harmony",
            seen=("<|channel|>", "<|message|>", "<|start|>"),
            layout="harmony",
            trigger="<|channel|>commentary to=functions.",
            before="<|channel|>commentary to=functions.",
            middle=" <|constrain|>json<|message|>",
            after="",
            between="<|end|><|start|>assistant",
            closes="<|call|>",
            marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>"),
            ends=("<|call|>", "<|return|>"),
        ),
        ToolFormat(
            name="gemma-4",
            seen=("<|tool_call>", "<tool_call|>"),
            layout="gemma",
            trigger="<|tool_call>",
            before="<|tool_call>call:",
            middle="{",
            after="}<tool_call|>",
            between="",
            head=r"\s*<\|tool_call>\s*call:\s*([^\s{]+)\s*\{",
            marks=("<tool_call|>", '<|"|>'),
            ends=("<|tool_response>",),
        ),
        _json_list("apriel", "<tool_calls>", "]</tool_calls>", marks=("</tool_calls>",)),
        replace(
            _GLM_FORMAT,
            name="glm-4.7",
            seen=("<tool_call>{function-name}<arg_key>",),
            middle="",
            tagged=TaggedArguments(before="<arg_key>", between="</arg_key><arg_value>", after="</arg_value>"),
        ),
        _GLM_FORMAT,
        ToolFormat(
            name="seed",
            seen=("<seed:tool_call>", "<function="),
            layout="tagged",
            trigger="<seed:tool_call>",
            before="<seed:tool_call>\n<function=",
            middle=">\n",
            after="</function>\n</seed:tool_call>",
            head=r"\s*<seed:tool_call>\s*<function=([^>\s]+)>\s*",
            marks=("</function>", "</seed:tool_call>"),
            tagged=TaggedArguments(before="<parameter=", between=">", after="</parameter>\n"),
        ),
        ToolFormat(
            name="qwen-coder",
            seen=("<tool_call>", "<function="),
            layout="tagged",
            trigger="<tool_call>",
            before="<tool_call>\n<function=",
            middle=">\n",
            after="</function>\n</tool_call>",
            head=r"\s*<tool_call>\s*<function=([^>\s]+)>\s*",
            marks=("</function>", *_HERMES_AFTER),
            tagged=TaggedArguments(before="<parameter=", between=">\n", after="\n</parameter>\n"),
        ),
        ToolFormat(
            name="minimax",
            seen=("<minimax:tool_call>",),
            layout="tagged",
            trigger="<minimax:tool_call>",
            opens="<minimax:tool_call>\n",
            before='<invoke name="',
            middle='">\n',
            after="</invoke>\n",
            between="",
            closes="</minimax:tool_call>",
            head=r'\s*(?:<minimax:tool_call>)?\s*<invoke\s+name="([^"]+)">\s*',
            marks=_INVOKE_ENDS,
            next_call="<invoke",
            tagged=TaggedArguments(before='<parameter name="', between='">', after="</parameter>\n"),
        ),
        _dsml("dsml-4", "tool_calls", seen=("｜DSML｜", "tool_calls>")),
        _dsml("dsml", "function_calls", seen=("｜DSML｜",)),
        ToolFormat(
            name="functionary",
            seen=("<function=", "</function>"),
            trigger="<function=",
            before="<function=",
            middle=">",
            after="</function>",
            between="",
            head=r"\s*<function=([^>\s]+)>\s*(?=\{)",
            marks=("</function>",),
        ),
        ToolFormat(
            name="hermes",
            seen=("<tool_call>",),
            trigger="<tool_call>",
            before='<tool_call>\n{"name": "',
            middle='", "arguments": ',
            after="}\n</tool_call>",
            head=r"\s*<tool_call>" + _json_head(),
            marks=_HERMES_AFTER,
        ),
        replace(_MISTRAL_ARGS, name="mistral-id", seen=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), middle=f"[CALL_ID]{ID_PLACEHOLDER}[ARGS]"),
        _MISTRAL_ARGS,
        _json_list("mistral", "[TOOL_CALLS]", "]", id_length=9),
        _DEEPSEEK_FORMAT,
        replace(
            _DEEPSEEK_FORMAT,
            name="deepseek-plain",
            seen=("<｜tool▁calls▁begin｜>",),
            before="<｜tool▁call▁begin｜>",
            middle="<｜tool▁sep｜>",
            after="<｜tool▁call▁end｜>",
            between="",
            head=r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\s*([^\s<]+)\s*<｜tool▁sep｜>\s*(?=\{)",
        ),
        ToolFormat(
            name="kimi",
            seen=("<|tool_calls_section_begin|>",),
            trigger="<|tool_calls_section_begin|>",
            opens="<|tool_calls_section_begin|>",
            before="<|tool_call_begin|>functions.",
            middle=f":{INDEX_PLACEHOLDER}<|tool_call_argument_begin|>",
            after="<|tool_call_end|>",
            between="",
            closes="<|tool_calls_section_end|>",
            head=(
                r"\s*(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^\s:<]+)(?::\d+)?\s*"
                r"<\|tool_call_argument_begin\|>\s*(?=\{)"
            ),
            marks=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
            next_call="<|tool_call_begin|>",
            id_text="functions.{name}:{index}",
        ),
        ToolFormat(
            name="cohere-action",
            seen=("<|START_ACTION|>",),
            trigger="<|START_ACTION|>",
            opens="<|START_ACTION|>[\n    ",
            before=f'{{"tool_call_id": "{INDEX_PLACEHOLDER}", "tool_name": "',
            middle='", "parameters": ',
            after="}",
            between=",\n    ",
            closes="\n]<|END_ACTION|>",
            head=r"\s*(?:<\|START_ACTION\|>)?" + _json_head("tool_name", ("parameters",)),
            marks=("<|END_ACTION|>",),
        ),
        ToolFormat(
            name="cohere",
            seen=("Action:", "```json", "tool_name"),
            trigger="Action: ```json",
            opens="Action: ```json\n[\n    ",
            before='{\n        "tool_name": "',
            middle='",\n        "parameters": ',
            after="\n    }",
            between=",\n    ",
            closes="\n]```",
            head=r"\s*(?:Action:)?" + _json_head("tool_name", ("parameters",)),
        ),
        _json_list("phi", "<|tool_call|>", "]<|/tool_call|>", seen=("<|tool|>",), marks=("<|/tool_call|>",), taught=False),
        _json_list("granite", "<|tool_call|>", "]", marks=("<|/tool_call|>",)),
        _json_list("nemotron", "<TOOLCALL>", "]</TOOLCALL>", marks=("</TOOLCALL>",)),
        ToolFormat(
            name="apertus",
            seen=("<|tools_prefix|>",),
            trigger="<|tools_prefix|>",
            opens="<|tools_prefix|>[",
            before='{"',
            middle='": ',
            after="}",
            between=", ",
            closes="]<|tools_suffix|>",
            head=r'\s*(?:<\|tools_prefix\|>)?[\[\s]*\{\s*"([^"\\]+)"\s*:\s*(?=\{)',
            marks=("<|tools_suffix|>",),
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
        ToolFormat(name="gemma", seen=("<start_of_turn>",), before='{"name": "', middle='", "parameters": ', after="}", taught=False),
        ToolFormat(name="json", seen=(), before='{"name": "', middle='", "arguments": ', after="}", taught=False),
    )
}
"""In the order in which they are looked for. "json" is for templates that none of the others is for."""


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
        if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
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
    """What tells a model about functions if its chat template does not: text for the system message."""
    lines = "\n".join(json.dumps(tool.json["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. Each is described by one line of JSON, with the JSON schema of its arguments:\n{lines}\n\n{taught(form)}"
    )


def taught(form: ToolFormat) -> str:
    """What tells a model how to write a call: text for the system message."""
    if form.tagged is not None or form.layout == "gemma":
        call = form.written([("NAME", '{"ARGUMENT": "VALUE"}')])
        return f"To call a function, answer with nothing but\n{call}\nwhere NAME is its name, with each ARGUMENT and its VALUE."
    call = form.written([("NAME", "{...}")])
    return f"To call a function, answer with nothing but\n{call}\nwhere NAME is its name and {{...}} its arguments as JSON."
