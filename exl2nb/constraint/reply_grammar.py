"""Grammars of whole answers: reasoning first, then free text, tool calls whose arguments fit their schemas, or a structure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from exl2nb.constraint.mask_engine import WHITESPACE_PATTERN
from exl2nb.constraint.structure import UNSUPPORTED_KEYWORDS, Structure, json_schema
from exl2nb.core.errors import OptionError, StructureError
from exl2nb.tokenizer import harmony
from exl2nb.tokenizer.gemma_arguments import QUOTE_TOKEN
from exl2nb.tokenizer.reply import ReplyFormat, is_text, may_be_text
from exl2nb.tokenizer.tokenizer import Tokenizer
from exl2nb.tokenizer.tools import ID_PLACEHOLDER, INDEX_PLACEHOLDER, TaggedArguments, Tool, ToolFormat

_ANY_TEXT = r"(.|\n)*"
_LOOSE_JSON = {"whitespace_pattern": WHITESPACE_PATTERN}
_COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models are taught to write calls


class ReplyStructure(Structure):
    """A structure of the content of an answer, behind its reasoning. `parse` reads the content.

    Args:
        source: The grammar of the whole answer.
        only: The structure of the content alone.
        tokenizer: Of the model.
        vocab_size: Tokens that the model can draw.
    """

    def __init__(self, source: str, only: Structure, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().__init__("grammar", source, tokenizer, vocab_size)
        self._only = only

    def parse(self, text: str, *, complete: bool = True) -> Any:
        """The value of the content of an answer; see `Structure.parse`."""
        return self._only.parse(text, complete=complete)


def behind_reasoning(kind: str, source: Any, reply: ReplyFormat, tokenizer: Tokenizer, vocab_size: int) -> ReplyStructure:
    """A schema, regex or choice for the content of an answer that may reason first, or must because the prompt has opened the reasoning.

    Raises:
        OptionError: a grammar, which cannot be put into another one.
        StructureError: as `Structure`.
    """
    if kind == "grammar":
        raise OptionError(
            "grammar and a prompt that opens the reasoning exclude each other; switch reasoning off (template_options), or write "
            "the grammar so that it begins with the reasoning, and give it to generate"
        )
    only = Structure(kind, source, tokenizer, vocab_size)  # refuses what cannot be used, in its own words
    if kind == "schema":
        body = f"%json {_schema(only.source, _LOOSE_JSON)}"
    elif kind == "regex":
        body = f"/{_slashes(source)}/"
    else:
        body = " | ".join(json.dumps(text, ensure_ascii=False) for text in only.source)
    marks = _Marks(reply, tokenizer)
    lines = [f"start: {' '.join([*marks.reasoning(), *marks.content()])} answer", f"answer: {body}", *marks.rules]
    return ReplyStructure("\n".join(lines), only, tokenizer, vocab_size)


def call_structure(
    reply: ReplyFormat, choice: Literal["auto", "required"] | str, tokenizer: Tokenizer, vocab_size: int, *, parallel: bool
) -> tuple[Structure, list[str]]:
    """What an answer must look like so that every call in it names a function and fits its schema.

    A function whose schema the mask engine cannot use does not stop the others from being called, nor itself: its arguments are then any
    JSON object.

    Args:
        reply: Format and functions.
        choice: "auto" (text, calls, or both), "required" (at least one call), or the name of the only function that may be called.
        tokenizer: Of the model.
        vocab_size: Tokens that the model can draw.
        parallel: Allow several calls in one answer.

    Returns:
        The structure, and a note for each function whose arguments are not held to their schema.

    Raises:
        OptionError: No function of that name.
        StructureError: The grammar cannot be used at all, for example because all schemas together are too large.
        MissingDependency: The mask engine is not installed.
    """
    tools = reply.tools if choice in ("auto", "required") else tuple(tool for tool in reply.tools if tool.name == choice)
    if not tools or reply.calls is None:
        raise OptionError(f"tool_choice is {choice!r}; expected 'auto', 'none', 'required' or the name of one of the tools")

    def made(unmasked: frozenset[str]) -> Structure:
        source = call_grammar(reply, tools, tokenizer, free=choice == "auto", parallel=parallel, unmasked=unmasked)
        return Structure("grammar", source, tokenizer, vocab_size)

    try:
        return made(frozenset()), []
    except StructureError as error:
        problems = {tool.name: problem for tool in tools if (problem := _problem(tool, reply.calls, tokenizer, vocab_size)) is not None}
        if not problems:
            raise StructureError(f"tools: {error}") from error
    notes = [
        f"tools: the arguments of {name!r} are not held to their schema, because the mask engine cannot use it ({problem}); check them in "
        "each call"
        for name, problem in problems.items()
    ]
    try:
        return made(frozenset(problems)), notes
    except StructureError as error:
        raise StructureError(f"tools: {error}") from error


def _problem(tool: Tool, form: ToolFormat, tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """Why the arguments of one function cannot be masked; None where they can."""
    try:
        rules = _arguments(0, tool, form, lambda text: json.dumps(text, ensure_ascii=False))
        Structure("grammar", "\n".join(["start: args_0", *rules]), tokenizer, vocab_size)
    except StructureError as error:
        return _reason(str(error))
    return None


def _reason(message: str) -> str:
    """The part of the engine's message that names the keyword."""
    text = re.sub(r"^.*?failed to compile JSON schema: |^grammar cannot be used: ", "", message, flags=re.DOTALL).partition("; leave")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    detail = next((line for line in lines if line.startswith("error: ")), "")
    return f"pattern: {detail.removeprefix('error: ')}" if "regex parse error" in text and detail else lines[0] if lines else "its schema"


def call_grammar(
    reply: ReplyFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    free: bool,
    parallel: bool,
    unmasked: frozenset[str] = frozenset(),
) -> str:
    """The same as text of the mask engine's grammar language (Lark).

    Args:
        reply: Format and functions.
        tools: The functions that may be called.
        tokenizer: Of the model.
        free: Allow an answer without calls, and text before them.
        parallel: Allow several calls.
        unmasked: Names of functions whose arguments may be anything that the format can express.
    """
    form = reply.calls
    assert form is not None
    marks = _Marks(reply, tokenizer)
    rules: list[str] = []
    for number, tool in enumerate(tools):
        rules.append(f"call_{number}: {marks.literal(tool.name + form.middle)} args_{number} {marks.literal(form.after)}")
        rules += _any_arguments(number, form, marks.literal) if tool.name in unmasked else _arguments(number, tool, form, marks.literal)
    any_call = "(" + " | ".join(f"call_{number}" for number in range(len(tools))) + ")"
    more = f"({marks.literal(form.between + form.before)} {any_call})*" if parallel else ""
    rest = " ".join(part for part in (any_call, more, marks.closing(form.closes)) if part)
    first, thinking = form.opens + form.before, marks.reasoning(optional=True)
    if reply.channels:
        body = _channels(marks, f"{marks.literal(first)} {rest}", free=free)
    elif not free:
        body = f"{marks.literal(first)} {rest}"
    elif not form.trigger:
        rules.append(r"free: /\s*[^{\s]" + _ANY_TEXT + "/")
        body = f"(free | {marks.literal(first)} {rest})?"
    elif marks.is_special(form.trigger):
        rules.append(f"free: /{_ANY_TEXT}/")
        body = f"free? ({marks.literal(first)} {rest})?"
    else:
        trigger = _escaped(form.trigger)
        rules += [f"FREE: /{_ANY_TEXT}/ & ~/{_ANY_TEXT}{trigger}{_ANY_TEXT}/", f"lead[lazy]: /{_ANY_TEXT}{trigger}/"]
        body = f"(FREE | lead {marks.literal(first.removeprefix(form.trigger))} {rest})"
    return "\n".join([f"start: {' '.join([*thinking, body])}", *rules, *marks.rules])


def _channels(marks: _Marks, calls: str, *, free: bool) -> str:
    """The messages of an answer behind the reasoning: a preamble on the channel "commentary", then calls or the final answer."""
    if not free:
        return calls
    preamble = f"{marks.literal('<|channel|>commentary<|message|>')} {marks.until('<|end|>')} {marks.literal(harmony.NEXT_MESSAGE)}"
    return f"({preamble})* ({marks.literal(harmony.FINAL_CHANNEL)} {marks.anything()} | {calls})"


class _Marks:
    """Texts as the grammar language writes them: a special token by its id, all else as text."""

    def __init__(self, reply: ReplyFormat, tokenizer: Tokenizer) -> None:
        self.rules: list[str] = []
        self._think, self._thinking, self._thought, self._harmony = reply.think, reply.thinking, reply.thought, reply.channels
        self._ids = {text: i for i, text in tokenizer.special_in(reply.tags).items()}
        self._eos = tokenizer.eos_ids
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) + ")") if self._ids else None
        self._made: dict[str, str] = {}

    def is_special(self, tag: str) -> bool:
        return tag in self._ids

    def literal(self, text: str) -> str:
        """Exactly this text, in which `INDEX_PLACEHOLDER` and `ID_PLACEHOLDER` stand for any number and any id."""
        parts = [part for part in (self._split.split(text) if self._split else [text]) if part]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else self._text(part) for part in parts)

    def closing(self, text: str) -> str:
        """A text at the end of the answer. A token that ends the answer by itself is left out: the engine lets it follow anyway."""
        return "" if self._ids.get(text) in self._eos else self.literal(text)

    def anything(self) -> str:
        """Any text, which has no special token in it."""
        return self._rule("anything", f": /{_ANY_TEXT}/")

    def until(self, tag: str) -> str:
        """Any text up to this tag, and the tag."""
        if self.is_special(tag):
            return f"{self.anything()} {self.literal(tag)}"
        return self._rule(f"until_{len(self._made)}", f"[lazy]: /{_ANY_TEXT}{_escaped(tag)}/", tag)

    def reasoning(self, *, optional: bool = True) -> list[str]:
        """What the answer begins with where it may or must hold reasoning first."""
        if self._think is None or self._thought or not (self._thinking or optional):
            return []
        opens, closes = self._think
        gap = self.literal(harmony.NEXT_MESSAGE) if self._harmony else self._rule("gap", r": /\s{0,4}/")
        thought = f"{self.until(closes)} {gap}"
        return [thought] if self._thinking else [f"({self.literal(opens)} {thought})?"]

    def content(self) -> list[str]:
        """What stands before the content of an answer."""
        return [self.literal(harmony.FINAL_CHANNEL)] if self._harmony else []

    def _rule(self, name: str, body: str, key: str = "") -> str:
        key = key or name
        if key not in self._made:
            self._made[key] = name
            self.rules.append(name + body)
        return self._made[key]

    @staticmethod
    def _text(text: str) -> str:
        patterns = {INDEX_PLACEHOLDER: "/[0-9]{1,3}/", ID_PLACEHOLDER: "/[A-Za-z0-9]{9}/"}
        parts = re.split(f"({re.escape(INDEX_PLACEHOLDER)}|{re.escape(ID_PLACEHOLDER)})", text)
        return " ".join(patterns.get(part) or json.dumps(part, ensure_ascii=False) for part in parts if part)


def _arguments(number: int, tool: Tool, form: ToolFormat, literal: Callable[[str], str]) -> list[str]:
    """The rules of one function's arguments.

    Raises:
        StructureError: Its schema cannot be kept to in this form.
    """
    schema, _ = json_schema({"additionalProperties": False, **tool.parameters})
    if form.layout in ("json", "harmony"):
        return [f"args_{number}: %json {_schema(schema, _COMPACT_JSON)}"]
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if len(unknown := [key for key in schema if key in ("$ref", "anyOf", "oneOf", "allOf")]) > 0:
        raise StructureError(f"{unknown[0]} at the top of its parameters")
    if form.tagged is None:
        return gemma_rules(f"args_{number}", schema, literal)
    tags, parts, rules = form.tagged, [], []
    properties = {**properties, **{name: {} for name in required if name not in properties}}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for at, (name, one) in enumerate(properties.items()):
        rules += _tagged_value(f"value_{number}_{at}", one, tags, shared)
        part = f"{_name_rule(tags, name, one, literal)} value_{number}_{at}"
        parts.append(part if name in required else f"({part})?")
    more = schema.get("additionalProperties", False)
    if more is not False:
        rules += _further(number, tags, more, shared, literal)
        parts.append(f"further_{number}*")
    return [f"args_{number}: {' '.join(parts) or json.dumps('')}", *rules]


def _any_arguments(number: int, form: ToolFormat, literal: Callable[[str], str]) -> list[str]:
    """The rules of arguments that are held to no schema."""
    if form.layout in ("json", "harmony"):
        return [f"args_{number}: %json {_schema({'type': 'object'}, _COMPACT_JSON)}"]
    if form.tagged is None:
        return gemma_rules(f"args_{number}", {"type": "object"}, literal)
    return [f"args_{number}: further_{number}*", *_further(number, form.tagged, True, {}, literal)]


def _further(number: int, tags: TaggedArguments, schema: Any, shared: Mapping[str, Any], literal: Callable[[str], str]) -> list[str]:
    """The rule of one argument of any name."""
    one = {} if schema is True else schema
    return [
        f"further_{number}: {literal(tags.before)} key_{number} {_between_rule(tags, one, literal)} more_{number}",
        f"key_{number}: /[A-Za-z0-9_.$-]+/",
        *_tagged_value(f"more_{number}", one, tags, shared),
    ]


def _name_rule(tags: TaggedArguments, name: str, schema: Any, literal: Callable[[str], str]) -> str:
    """What stands before a value, with the name of its argument."""
    if "{kind}" not in tags.between or (may_be_text(schema) and not is_text(schema)):
        return f"{literal(tags.before + name)} {_between_rule(tags, schema, literal)}"
    return literal(tags.before + name + tags.between.replace("{kind}", "true" if is_text(schema) else "false"))


def _between_rule(tags: TaggedArguments, schema: Any, literal: Callable[[str], str]) -> str:
    """What stands between a name and its value."""
    before, kind, after = tags.between.partition("{kind}")
    if not kind:
        return literal(before)
    kinds = '"true"' if is_text(schema) else '("true" | "false")' if may_be_text(schema) else '"false"'
    return f"{literal(before)} {kinds} {literal(after)}"


def _tagged_value(rule: str, schema: Any, tags: TaggedArguments, shared: Mapping[str, Any]) -> list[str]:
    """The rules of a value between tags and the tag behind it: a text as it is, anything else as JSON.

    A value that may be a text among others is any text. No value contains the tag that ends it, since the parser would end it there.
    """
    end = json.dumps(tags.after, ensure_ascii=False)
    if not may_be_text(schema):
        whole = {**schema, **shared} if isinstance(schema, Mapping) else schema
        return [f"{rule}: %json {_schema(whole, _COMPACT_JSON) if isinstance(whole, Mapping) else json.dumps(whole)} {end}"]
    schema = schema if isinstance(schema, Mapping) else {}
    if unknown := [key for key in schema if key in UNSUPPORTED_KEYWORDS]:
        raise StructureError(f"the keyword {unknown[0]!r}")
    choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])] if is_text(schema) else []
    if choices:
        return [f"{rule}: ({' | '.join(json.dumps(text, ensure_ascii=False) for text in choices)}) {end}"]
    if is_text(schema) and "pattern" in schema:
        return [f"{rule}: /{_slashes(str(schema['pattern']).removeprefix('^').removesuffix('$'))}/ {end}"]
    times = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}" if is_text(schema) else "*"
    lead, _, tail = tags.after.partition(tags.end)
    lead = f"({_escaped(lead)})?" if lead else ""
    rest = f" {json.dumps(tail, ensure_ascii=False)}" if tail else ""
    return [f"{rule}: {rule}_text{rest}", f"{rule}_text[lazy]: /(.|\\n){times}{lead}{_escaped(tags.end)}/"]


def _schema(schema: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    """A JSON schema inside a grammar."""
    return json.dumps({"x-guidance": style, **schema}, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A regex that matches `text` and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _slashes(pattern: str) -> str:
    """A regex whose slashes do not end it."""
    return re.sub(r"(?<!\\)/", r"\\/", pattern)


# Arguments of calls in the notation of Gemma 4 (`tokenizer.gemma_arguments`): numbers, keywords of schemas, depth of nesting.
_NUMBER_RULE = r"/-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?/"
_INTEGER_RULE = r"/-?(0|[1-9][0-9]{0,39})/"
_KNOWN_KEYWORDS = {
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "description",
    "title",
    "default",
    "additionalProperties",
    "nullable",
    "minLength",
    "maxLength",
}
_MAX_DEPTH = 16


def gemma_rules(name: str, schema: Mapping[str, Any], literal: Callable[[str], str]) -> list[str]:
    """The rules of an object without its outer braces.

    Args:
        name: The rule of the object; the names of all others begin with it.
        schema: Its JSON schema.
        literal: Writes a text, with special tokens by their id.

    Raises:
        StructureError: The schema has a keyword that these rules cannot express; names it.
    """
    rules = _GemmaRules(name, literal)
    return [f"{name}: {rules.members(schema, 0)}", *rules.made]


class _GemmaRules:
    def __init__(self, name: str, literal: Callable[[str], str]) -> None:
        self._name, self._literal = name, literal
        self.made: list[str] = []
        self._any, self._texts = "", dict[tuple[int, int | None], str]()

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        """The members of an object, in the order of their keys; those that are not required may be left out."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties:
            if schema.get("additionalProperties") is False:
                return json.dumps("")
            pair = f"/[A-Za-z0-9_.$-]+/ {json.dumps(':')} {self.anything()}"
            return f"({pair} ({json.dumps(',')} {pair})*)?"
        parts: list[tuple[str, bool]] = []
        for key in sorted(properties):
            part = f"{self._literal(key + ':')} {self.value(properties[key], depth + 1)}"
            parts.append((part, key in required))
        return self._list(parts)

    def _list(self, parts: list[tuple[str, bool]]) -> str:
        """The parts with commas between those that are there: one rule for each place, with and without something before it."""
        comma, rest = json.dumps(","), ("", "")  # rules of what follows: nothing was written before, something was
        for part, needed in reversed(parts):
            first, later = f"{part} {rest[1]}".strip(), f"{comma} {part} {rest[1]}".strip()
            if not needed:
                first = f"({first} | {rest[0] or json.dumps('')})"
                later = f"({later} | {rest[1] or json.dumps('')})"
            rest = (self._rule(first), self._rule(later))
        return rest[0]

    def value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self.anything()
        if unknown := sorted(set(schema) - _KNOWN_KEYWORDS):
            raise StructureError(f"the keyword {unknown[0]!r} in this model's notation of calls")
        if depth > _MAX_DEPTH:
            raise StructureError(f"a schema of more than {_MAX_DEPTH} levels in this model's notation of calls")
        choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
        kind = schema.get("type")
        if choices:
            found = "(" + " | ".join(self._constant(choice) for choice in choices) + ")"
        elif isinstance(kind, list):
            found = "(" + " | ".join(self.value({**schema, "type": one}, depth) for one in kind) + ")"
        elif kind == "string":
            found = self.text(int(schema.get("minLength", 0)), schema.get("maxLength"))
        elif kind in ("integer", "number"):
            found = _INTEGER_RULE if kind == "integer" else _NUMBER_RULE
        elif kind == "boolean":
            found = '("true" | "false")'
        elif kind == "null":
            found = '"null"'
        elif kind == "array":
            item = self._rule(self.value(schema.get("items", {}), depth + 1))
            found = f'"[" ({item} ("," {item})*)? "]"'
        elif kind == "object":
            found = f'"{{" {self.members(schema, depth)} "}}"'
        else:
            found = self.anything()
        return f'({found} | "null")' if schema.get("nullable") is True else found

    def text(self, least: int = 0, most: int | None = None) -> str:
        """A text between quotes, of so many characters."""
        key = least, most
        if key not in self._texts:
            quote, times = self._literal(QUOTE_TOKEN), f"{{{least},{'' if most is None else int(most)}}}"
            if quote.startswith("<["):
                self._texts[key] = self._rule(f"{quote} /(.|\\n){times}/ {quote}")
            else:
                end = "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in QUOTE_TOKEN)
                name = f"{self._name}_quoted_{len(self._texts)}"
                self.made.append(f"{name}[lazy]: /(.|\\n){times}{end}/")
                self._texts[key] = self._rule(f"{quote} {name}")
        return self._texts[key]

    def anything(self) -> str:
        """Any value."""
        if not self._any:
            self._any = f"{self._name}_any"
            pair = f'/[A-Za-z0-9_.$-]+/ ":" {self._any}'
            self.made.append(
                f'{self._any}: {self.text()} | {_NUMBER_RULE} | "true" | "false" | "null" | "[" ({self._any} ("," {self._any})*)? "]" '
                f'| "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return self._any

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._literal(f"{QUOTE_TOKEN}{value}{QUOTE_TOKEN}")
        if isinstance(value, (bool, int, float)) or value is None:
            return json.dumps(json.dumps(value))
        raise StructureError("an enum of objects in this model's notation of calls")

    def _rule(self, body: str) -> str:
        name = f"{self._name}_{len(self.made)}"
        self.made.append(f"{name}: {body}")
        return name
