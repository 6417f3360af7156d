"""From the text of an answer to reasoning, content and tool calls, while the text still comes. Knows neither models nor threads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from exl2nb.tokenizer import gemma_arguments, harmony
from exl2nb.tokenizer.harmony import ReplyDelta, held_length
from exl2nb.tokenizer.tools import FORMATS, Tool, ToolFormat, tool_format

THINK_TAGS = (
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""The tags around reasoning, by family; the first pair that a chat template contains is its own."""
_MAX_HEAD = 512  # characters of JSON in which the name of a call must have come
_CALL_SEPARATORS = "}],;` \t\r\n"  # what may stand between calls


@dataclass(frozen=True)
class ToolCall:
    """A function the model wants to be called. arguments: JSON text; `parsed` its value (incomplete JSON raises ValueError)."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> Any:
        """The arguments as plain data."""
        return json.loads(self.arguments)

    @property
    def arguments_or_none(self) -> Any:
        """The arguments as plain data; None where they are not complete JSON."""
        try:
            return self.parsed
        except (ValueError, RecursionError):
            return None

    @property
    def json(self) -> dict[str, Any]:
        """As it stands in a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Reply:
    """An answer taken apart: what the model thought, what it says, what it wants to be called."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.json for call in self.tool_calls]
        return message


class GeneratedPiece(Protocol):
    """The part of a generated token that is read here."""

    @property
    def id(self) -> int: ...  # noqa: D102
    @property
    def text(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class ReplyFormat:
    """How the answers of one request are to be read.

    Attributes:
        calls: The format of tool calls; None = none are looked for.
        tools: The functions that may be called.
        think: The tags around reasoning; None = the model has none.
        thinking: Whether the prompt has opened the reasoning.
        thought: Whether the prompt has opened and closed the reasoning, so that the answer has none.
        channels: Whether answers are messages on channels (see `harmony`).
        special: Texts of special tokens that are tags, by id. The text of the answer lacks them.
    """

    calls: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()
    think: tuple[str, str] | None = None
    thinking: bool = False
    thought: bool = False
    channels: bool = False
    special: Mapping[int, str] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """True where the answer is content and nothing else."""
        return self.calls is None and self.think is None and not self.channels

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag that the answer may hold."""
        calls = self.calls.tags if self.calls is not None else ()
        return (*calls, *(self.think or ()), *(harmony.HARMONY_TAGS if self.channels else ()))

    @property
    def closing(self) -> str:
        """The text that ends the reasoning and begins the content."""
        assert self.think is not None, "only a format with reasoning has an end of it"
        return harmony.CLOSING_TEXT if self.channels else f"\n{self.think[1]}\n\n"

    def text(self, tokens: Iterable[GeneratedPiece]) -> str:
        """The text of tokens, with the tags that are special tokens."""
        special = self.special
        return "".join([token.text or special.get(token.id, "") for token in tokens])

    def parser(self) -> ReplyParser | harmony.HarmonyParser:
        """A parser for one answer."""
        if self.channels:
            new_id = self.calls.new_id if self.calls is not None else FORMATS["json"].new_id
            return harmony.HarmonyParser(new_id, thinking=self.thinking)
        return ReplyParser(self)

    def read(self, tokens: Iterable[GeneratedPiece]) -> Reply:
        """A whole answer."""
        return self.read_text(self.text(tokens))

    def read_text(self, text: str) -> Reply:
        """A whole answer, given as text with its tags."""
        parser = self.parser()
        return collect([*parser.feed(text), *parser.finish()])


def think_tags(template: str) -> tuple[str, str] | None:
    """The tags around reasoning that a chat template knows; None where it knows none."""
    if tool_format(template).layout == "harmony":
        return (harmony.ANALYSIS_CHANNEL, "<|end|>")
    return next((tags for tags in THINK_TAGS if tags[0] in template or tags[1] in template), None)


def collect(deltas: Iterable[ReplyDelta]) -> Reply:
    """The reply that deltas add up to."""
    calls: list[list[str]] = []
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    for delta in deltas:
        if delta.kind == "call":
            calls.append([delta.id, delta.text, ""])
        elif delta.kind == "arguments":
            calls[delta.call][2] += delta.text
        else:
            texts[delta.kind].append(delta.text)
    return Reply("".join(texts["content"]), "".join(texts["reasoning"]).rstrip(), tuple(ToolCall(*call) for call in calls))


class ReplyParser:
    r"""Takes the text of one answer in pieces and gives `ReplyDelta`s; text that may still become a tag is held back.

    Example:
        >>> from exl2nb.tokenizer.tools import FORMATS
        >>> parser = ReplyParser(ReplyFormat(calls=FORMATS["hermes"]))
        >>> found = parser.feed('Let me see.\n<tool_call>\n{"name": "add", "argum')
        >>> found += parser.feed('ents": {"a": 1}}\n</tool_call>') + parser.finish()
        >>> [(delta.kind, delta.text) for delta in found]
        [('content', 'Let me see.'), ('call', 'add'), ('arguments', '{"a": 1}')]
    """

    def __init__(self, form: ReplyFormat) -> None:
        self._form, self._calls = form, form.calls
        self._schemas = {tool.name: tool.parameters for tool in form.tools}
        self._text = ""  # not decided yet
        self._state = "reasoning" if form.thinking and form.think else "start"
        self._count = 0  # calls that have begun
        self._said, self._thought = False, False  # content came, and reasoning
        self._depth, self._quoted, self._escaped = 0, False, False  # of the JSON value that is read
        self._json_calls = self._calls is not None and self._calls.bare
        self._in_object = self._calls is not None and self._calls.is_object
        self._written, self._schema = 0, dict[str, Any]()  # of the call whose arguments stand between tags
        self._argument: tuple[str, bool] | None = None  # name of the argument whose value is read, and whether it is a text
        self._searched = 0  # characters of the value in which its end was looked for

    def feed(self, text: str) -> list[ReplyDelta]:
        """Take more text."""
        if self._form.plain:
            return [ReplyDelta("content", text)] if text else []
        self._text += text
        found: list[ReplyDelta] = []
        while getattr(self, f"_{self._state}")(found):
            pass
        return found

    def finish(self) -> list[ReplyDelta]:
        """The answer is over: what is still held."""
        text, state, self._text = self._text, self._state, ""
        if state in ("tagged", "gemma"):  # the answer was cut: the arguments stay incomplete JSON
            return [] if self._written else [ReplyDelta("arguments", "{", self._count - 1)]
        if not text or state in ("after", "start", "tail"):
            return [ReplyDelta("content", text)] if text.strip() and state == "start" else []
        if state == "head":
            found: list[ReplyDelta] = []
            self._text = text
            if self._whole_call(found):
                return found
        if state == "arguments":
            return [ReplyDelta("arguments", text, self._count - 1)]
        return [ReplyDelta("reasoning" if state == "reasoning" else "content", text)]

    # ---- states; each takes what it can off `_text` and says whether another should go on

    def _start(self, found: list[ReplyDelta]) -> bool:
        """Nothing but white space so far: reasoning may begin here, or a call that is JSON."""
        text = self._text.lstrip()
        if not text:
            return False
        think = self._form.think
        if think and not self._said and self._count == 0:
            if text.startswith(think[0]):
                self._text, self._state = text[len(think[0]) :].lstrip(), "reasoning"
                return True
            if think[0].startswith(text):
                return False
        if self._json_calls:
            for mark in self._calls.marks if self._calls else ():
                text = text.removeprefix(mark).lstrip()
            if not text or any(mark.startswith(text) for mark in (self._calls.marks if self._calls else ())):
                return False
            if re.match(r"[\[\s]*\{|```\w*\s*[\[{]", text):
                self._text, self._state = text, "head"
                return True
            if re.fullmatch(r"`{1,2}|```\w*\s*|\[\s*", text):
                return False
        if think:
            self._text = text
        self._state = "content"
        return True

    def _reasoning(self, found: list[ReplyDelta]) -> bool:
        assert self._form.think is not None
        if not self._thought:
            self._text = self._text.lstrip()
        return self._until(self._form.think[1], "reasoning", found, then="start")

    def _content(self, found: list[ReplyDelta]) -> bool:
        trigger = self._calls.trigger if self._calls is not None else ""
        if not trigger:
            if self._text:
                found.append(ReplyDelta("content", self._text))
                self._text, self._said = "", True
            return False
        return self._until(trigger, "content", found, then="head", keep=True)

    def _until(self, tag: str, kind: Literal["reasoning", "content"], found: list[ReplyDelta], *, then: str, keep: bool = False) -> bool:
        """Give text up to a tag, without the white space before it."""
        at = self._text.find(tag)
        text = self._text[:at] if at >= 0 else self._text[: len(self._text) - held_length(self._text, tag)]
        shown = text.rstrip() if at >= 0 or kind == "content" else text
        if shown:
            found.append(ReplyDelta(kind, shown))
            self._said, self._thought = self._said or kind == "content", True
        if at < 0:
            self._text = self._text[len(shown) :]
            return False
        self._text, self._state = self._text[at + (0 if keep else len(tag)) :], then
        return True

    def _head(self, found: list[ReplyDelta]) -> bool:
        """A call has begun; wait until its name is complete."""
        assert self._calls is not None
        layout = self._calls.layout
        match = self._calls.head_pattern.match(self._text)
        if layout != "json":
            if match is None:
                return False
            self._begin(match[1], found)
            self._text, self._written, self._argument = self._text[match.end() :], 0, None
            self._schema = self._schemas.get(match[1], {})
            self._state = "gemma" if layout == "gemma" else "tagged"
            return True
        if match is None:
            if self._whole_call(found):  # the arguments stand before the name, for example
                return True
            if len(self._text) > _MAX_HEAD and self._json_calls:
                self._state, self._json_calls = "content", False
                return True
            return False
        self._begin(match[1], found, match.groupdict().get("id") or "")
        self._text, self._state = self._text[match.end() :], "arguments"
        self._depth, self._quoted, self._escaped = 0, False, False
        return True

    def _arguments(self, found: list[ReplyDelta]) -> bool:
        """JSON, up to the bracket that closes it."""
        for at, char in enumerate(self._text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    found.append(ReplyDelta("arguments", self._text[: at + 1], self._count - 1))
                    self._text, self._state = self._text[at + 1 :], "tail" if self._in_object else "after"
                    return True
        if self._text:
            found.append(ReplyDelta("arguments", self._text, self._count - 1))
            self._text = ""
        return False

    def _tail(self, found: list[ReplyDelta]) -> bool:
        """The rest of the object that a call is: further members, such as an id, and the brace that closes it."""
        match = re.match(r'\s*(?:,\s*"[^"]*"\s*:\s*(?:"[^"]*"|[^\s"{}\[\],]+)\s*)*', self._text)
        rest = self._text[match.end() if match is not None else 0 :]
        if rest.startswith(",") or not rest:
            return False
        self._text, self._state = rest, "after"
        return True

    def _tagged(self, found: list[ReplyDelta]) -> bool:
        """Arguments between tags, each given out as soon as it is complete."""
        assert self._calls is not None
        assert self._calls.tagged is not None
        tags = self._calls.tagged
        if self._argument is None:
            match = tags.opening.match(self._text)
            if match is not None:
                as_text = match["kind"] == "true" or (
                    not match["kind"] and is_text(self._schema.get("properties", {}).get(match["name"], {}))
                )
                self._argument, self._text, self._searched = (match["name"], as_text), self._text[match.end() :], 0
                return True
            return self._tagged_end(found)
        at = self._text.find(tags.end, self._searched)
        if at < 0:
            self._searched = max(0, len(self._text) - len(tags.end))
            return False
        name, as_text = self._argument
        raw = tags.value(self._text[:at])
        written = json.dumps(raw, ensure_ascii=False) if as_text else _json_text(raw)
        begin = ", " if self._written else "{"
        found.append(ReplyDelta("arguments", f"{begin}{json.dumps(name, ensure_ascii=False)}: {written}", self._count - 1))
        self._text, self._argument, self._written = self._text[at + len(tags.end) :], None, self._written + 1
        return True

    def _tagged_end(self, found: list[ReplyDelta]) -> bool:
        """Look for the end of a call whose arguments stand between tags."""
        assert self._calls is not None
        assert self._calls.tagged is not None
        before, begun = self._calls.tagged.before.strip(), self._text.lstrip()
        if begun.startswith(before) or before.startswith(begun):
            return False
        ends = [at for mark in self._calls.marks if (at := self._text.find(mark)) >= 0]
        if not ends:
            return False
        found.append(ReplyDelta("arguments", "}" if self._written else "{}", self._count - 1))
        self._text, self._state = self._text[min(ends) :], "after"
        return True

    def _gemma(self, found: list[ReplyDelta]) -> bool:
        """Arguments in the notation of Gemma 4, in one piece."""
        read = gemma_arguments.read(self._text)
        if read is None:
            return False
        found.append(ReplyDelta("arguments", json.dumps(read[0], ensure_ascii=False), self._count - 1))
        self._text, self._state = self._text[read[1] :], "after"
        return True

    def _after(self, found: list[ReplyDelta]) -> bool:
        """Between a call and what follows: brackets, commas and tags are left out."""
        assert self._calls is not None
        closing = self._calls.marks
        while True:
            text = self._text.lstrip(_CALL_SEPARATORS)
            mark = next((mark for mark in closing if text.startswith(mark)), None)
            self._text = text if mark is None else text[len(mark) :]
            if mark is None:
                break
        begins = [tag for tag in (self._calls.trigger, self._calls.next_call) if tag]
        if not text:
            return False
        if any(text.startswith(tag) for tag in begins) or (self._calls.bare and text[0] == "{"):
            self._state = "head"
            return True
        if any(tag.startswith(text) for tag in (*begins, *closing)):
            return False
        self._state = "content"
        return True

    # ---- calls

    def _begin(self, name: str, found: list[ReplyDelta], written_id: str = "") -> None:
        assert self._calls is not None
        found.append(ReplyDelta("call", name, self._count, written_id.strip() or self._calls.new_id(name, self._count)))
        self._count += 1

    def _whole_call(self, found: list[ReplyDelta]) -> bool:
        """A call that is read in one piece: JSON whose keys come in another order than the head expects."""
        assert self._calls is not None
        text = self._text
        start = text.find("{")
        try:
            value, end = json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
        except (ValueError, RecursionError):
            return False
        inner = value.get("function", value) if isinstance(value, dict) else None
        inner = inner if isinstance(inner, dict) else {}
        name = inner.get("name", inner.get("tool_name"))
        arguments = inner.get("arguments", inner.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            if self._json_calls:  # JSON that is an answer, not a call
                self._state, self._json_calls = "content", False
            return False
        self._begin(name, found)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(ReplyDelta("arguments", written, self._count - 1))
        self._text, self._state = text[end:], "after"
        return True


def is_text(schema: Any) -> bool:
    """Whether values of a property are texts, and so written bare between tags."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])] if isinstance(schema, Mapping) else []
    return kind == "string" or (kind is None and bool(choices) and all(isinstance(one, str) for one in choices))


def may_be_text(schema: Any) -> bool:
    """Whether values of a property can be texts, among others: they are then written bare, too."""
    if not isinstance(schema, Mapping) or not schema:
        return schema is not False
    if "$ref" in schema or "anyOf" in schema or "oneOf" in schema or "allOf" in schema:
        return True
    kind, choices = schema.get("type"), [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    if choices:
        return any(isinstance(one, str) for one in choices)
    return kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind)


def _json_text(raw: str) -> str:
    """A value that stands between tags as JSON text: as it is where it is JSON, otherwise as a string."""
    try:
        json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    return raw.strip()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
