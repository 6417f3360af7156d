"""Grammars of whole answers: reasoning first, then free text, tool calls whose arguments fit their schemas, or a structure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from exl2nb.constraint.engine import WHITESPACE
from exl2nb.constraint.structure import Structure, json_schema
from exl2nb.core.errors import OptionError, StructureError
from exl2nb.tokenizer.reply import ReplyFormat, ReplyParser, collect, is_text
from exl2nb.tokenizer.tokenizer import Tokenizer
from exl2nb.tokenizer.tools import Tool

_ANY = r"(.|\n)*"
_LOOSE = {"whitespace_pattern": WHITESPACE}
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models are taught to write calls


class ReplyStructure(Structure):
    """A structure of the content of an answer, behind its reasoning; `parse` reads the content.

    Args:
        source: the grammar of the whole answer. reply: how the answer is read. read: makes the value of the content.
    """

    def __init__(self, source: str, reply: ReplyFormat, read: Callable[[str], Any], tokenizer: Tokenizer, vocab_size: int) -> None:
        super().__init__("grammar", source, tokenizer, vocab_size)
        self._reply, self._read_content = reply, read
        self._read = self._content

    def _content(self, text: str) -> Any:
        parser = ReplyParser(self._reply)
        return self._read_content(collect([*parser.feed(text), *parser.finish()]).content)


def behind_reasoning(kind: str, source: Any, reply: ReplyFormat, tokenizer: Tokenizer, vocab_size: int) -> ReplyStructure:
    """A schema, regex or choice for an answer whose reasoning the prompt has opened.

    Raises:
        OptionError: a grammar, which cannot be put into another one. StructureError: as `Structure`.
    """
    if kind == "grammar":
        raise OptionError(
            "grammar and a prompt that opens the reasoning exclude each other; switch reasoning off (template_options), or write "
            "the grammar so that it begins with the reasoning, and give it to generate"
        )
    only = Structure(kind, source, tokenizer, vocab_size)  # refuses what cannot be used, in its own words
    if kind == "schema":
        body = f"%json {_schema(only.source, _LOOSE)}"
    elif kind == "regex":
        body = f"/{_slashes(source)}/"
    else:
        body = " | ".join(json.dumps(text, ensure_ascii=False) for text in only.source)
    marks = _Marks(reply, tokenizer)
    lines = [f"start: {' '.join([*marks.reasoning(), 'answer'])}", f"answer: {body}", *marks.rules]
    read = (lambda text: only.parse(text)) if kind == "schema" else str
    return ReplyStructure("\n".join(lines), reply, read, tokenizer, vocab_size)


def call_structure(
    reply: ReplyFormat, choice: Literal["auto", "required"] | str, tokenizer: Tokenizer, vocab_size: int, *, parallel: bool
) -> Structure:
    """What an answer must look like so that every call in it names a function and fits its schema.

    Args:
        reply: format and functions.
        choice: "auto" (text, calls, or both), "required" (at least one call), or the name of the only function that may be called.
        parallel: several calls in one answer.

    Raises:
        OptionError: no function of that name. StructureError: a schema cannot be used. MissingDependency: the mask engine is not installed.
    """
    tools = reply.tools if choice in ("auto", "required") else tuple(tool for tool in reply.tools if tool.name == choice)
    if not tools or reply.calls is None:
        raise OptionError(f"tool_choice is {choice!r}; expected 'auto', 'none', 'required' or the name of one of the tools")
    try:
        return Structure("grammar", call_grammar(reply, tools, tokenizer, free=choice == "auto", parallel=parallel), tokenizer, vocab_size)
    except StructureError as error:
        raise StructureError(f"tools: {error}") from error


def call_grammar(reply: ReplyFormat, tools: Sequence[Tool], tokenizer: Tokenizer, *, free: bool, parallel: bool) -> str:
    """The same as text of the mask engine's grammar language (Lark)."""
    form = reply.calls
    assert form is not None
    marks = _Marks(reply, tokenizer)
    rules: list[str] = []
    for number, tool in enumerate(tools):
        rules.append(f"call_{number}: {marks.literal(tool.name + form.middle)} args_{number} {marks.literal(form.after)}")
        rules += _arguments(number, tool, form.argument)
    any_call = "(" + " | ".join(f"call_{number}" for number in range(len(tools))) + ")"
    more = f"({marks.literal(form.between + form.before)} {any_call})*" if parallel else ""
    rest = " ".join(part for part in (any_call, more, marks.literal(form.closes)) if part)
    first, thinking = form.opens + form.before, marks.reasoning(optional=not free)
    if not free:
        body = f"{marks.literal(first)} {rest}"
    elif not form.trigger:
        rules.append(r"free: /\s*[^{\s]" + _ANY + "/")
        body = f"(free | {marks.literal(first)} {rest})?"
    elif marks.is_special(form.trigger):
        rules.append(f"free: /{_ANY}/")
        body = f"free? ({marks.literal(first)} {rest})?"
    else:
        trigger = _escaped(form.trigger)
        rules += [f"FREE: /{_ANY}/ & ~/{_ANY}{trigger}{_ANY}/", f"lead[lazy]: /{_ANY}{trigger}/"]
        body = f"(FREE | lead {marks.literal(first.removeprefix(form.trigger))} {rest})"
    return "\n".join([f"start: {' '.join([*thinking, body])}", *rules, *marks.rules])


class _Marks:
    """Texts as the grammar language writes them: a tag that is a special token by its id."""

    def __init__(self, reply: ReplyFormat, tokenizer: Tokenizer) -> None:
        self.rules: list[str] = []
        self._think, self._thinking = reply.think, reply.thinking
        tags = {*(reply.calls.tags if reply.calls is not None else ()), *(reply.think or ())}
        ids = {tag: tokenizer.token_id(tag) for tag in tags}
        self._ids = {tag: i for tag, i in ids.items() if i is not None and i in tokenizer.skipped_ids}
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) + ")") if self._ids else None

    def is_special(self, tag: str) -> bool:
        return tag in self._ids

    def literal(self, text: str) -> str:
        parts = [part for part in (self._split.split(text) if self._split else [text]) if part]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False) for part in parts)

    def reasoning(self, *, optional: bool = False) -> list[str]:
        """What the answer begins with where it may or must hold reasoning first."""
        if self._think is None or not (self._thinking or optional):
            return []
        opens, closes = self._think
        if self.is_special(closes):
            self.rules += [f"thought: /{_ANY}/ {self.literal(closes)}"]
        else:
            self.rules += [f"thought[lazy]: /{_ANY}{_escaped(closes)}/"]
        self.rules.append(r"gap: /\s*/")
        return ["thought", "gap"] if self._thinking else [f"({self.literal(opens)} thought gap)?"]


def _arguments(number: int, tool: Tool, argument: tuple[str, str, str] | None) -> list[str]:
    """The rules of one function's arguments."""
    schema, _ = json_schema({"additionalProperties": False, **tool.parameters})
    if argument is None:
        return [f"args_{number}: %json {_schema(schema, _COMPACT)}"]
    before, between, after = argument
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if len(unknown := [key for key in schema if key in ("$ref", "anyOf", "oneOf", "allOf")]) > 0:
        raise StructureError(f"parameters of {tool.name!r} has {unknown[0]} at its top, which this model's call format cannot keep to")
    parts, rules = [], []
    for at, (name, one) in enumerate(properties.items()):
        rules.append(f"value_{number}_{at}{_tagged_value(one, after, schema.get('$defs'))}")
        part = f"{json.dumps(before + name + between, ensure_ascii=False)} value_{number}_{at}"
        parts.append(part if name in required else f"({part})?")
    return [f"args_{number}: {' '.join(parts) or json.dumps('')}", *rules]


def _tagged_value(schema: Any, after: str, defs: Any) -> str:
    """The rule of a value between tags and the tag behind it: a text as it is, anything else as JSON."""
    end = json.dumps(after, ensure_ascii=False)
    if not is_text(schema):
        whole = {**schema, "$defs": defs} if isinstance(schema, Mapping) and defs else schema
        return f": %json {_schema(whole, _COMPACT) if isinstance(whole, Mapping) else json.dumps(whole)} {end}"
    choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    if choices:
        return ": (" + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices) + f") {end}"
    if "pattern" in schema:
        return f": /{_slashes(str(schema['pattern']).removeprefix('^').removesuffix('$'))}/ {end}"
    times = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return f"[lazy]: /(.|\\n){times}{_escaped(after)}/"


def _schema(schema: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    """A JSON schema inside a grammar."""
    return json.dumps({"x-guidance": style, **schema}, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A regex that matches `text` and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _slashes(pattern: str) -> str:
    """A regex whose slashes do not end it."""
    return re.sub(r"(?<!\\)/", r"\\/", pattern)
