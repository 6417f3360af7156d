"""Answers as messages on channels, as gpt-oss writes them (the Harmony format).

    <|channel|>analysis<|message|>The reasoning.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>The answer.<|return|>

The tags are special tokens. The prompt ends with `<|start|>assistant`, so an answer begins with the header of its first message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple


class ReplyDelta(NamedTuple):
    """What became certain: text of the reasoning, of the content, or of a call's arguments; or a "call" that begins.

    Attributes:
        kind: What the text belongs to.
        text: The text; for a "call", the name of the function.
        call: The number of the call in the answer, from 0.
        id: The id of the call, where it begins.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int = 0
    id: str = ""


def held_length(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`, which is not complete yet."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


ANALYSIS_CHANNEL = "<|channel|>analysis<|message|>"
FINAL_CHANNEL = "<|channel|>final<|message|>"
NEXT_MESSAGE = "<|start|>assistant"
CLOSING_TEXT = f"<|end|>{NEXT_MESSAGE}{FINAL_CHANNEL}"
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_END_TAGS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADER_STARTS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to=")
_RECIPIENT_PATTERN = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_MAX_HEADER = 512


class HarmonyParser:
    r"""Takes the text of one answer, with its tags, in pieces and gives `ReplyDelta`s.

    Args:
        new_id: Makes the id of a call from the name of its function and its number.
        thinking: Whether the prompt has opened a message on the channel "analysis".

    Example:
        >>> parser = HarmonyParser(lambda name, number: name)
        >>> found = parser.feed("<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|mes")
        >>> [(delta.kind, delta.text) for delta in found + parser.feed("sage|>4") + parser.finish()]
        [('reasoning', 'Easy.'), ('content', '4')]
    """

    def __init__(self, new_id: Callable[[str, int], str], *, thinking: bool = False) -> None:
        self._new_id = new_id
        self._text = ""
        self._body: Literal["", "reasoning", "content", "arguments"] = "reasoning" if thinking else ""  # "" while a header is read
        self._calls = 0
        self._said = False  # whether content came

    def feed(self, text: str) -> list[ReplyDelta]:
        """Take more text."""
        self._text += text
        found: list[ReplyDelta] = []
        while self._read_body(found) if self._body else self._read_header(found):
            pass
        return found

    def finish(self) -> list[ReplyDelta]:
        """Return what is still held: the answer is over."""
        text, self._text = self._text, ""
        if self._body:
            return [self._delta(text)] if text else []
        header = text.strip()
        return [ReplyDelta("content", text)] if header and not header.startswith(_HEADER_STARTS) else []

    def _read_header(self, found: list[ReplyDelta]) -> bool:
        header, tag, rest = self._text.partition("<|message|>")
        begun = header.lstrip()
        for end in ("<|end|>", "<|call|>", "<|return|>"):  # of a message that is over
            if begun.startswith(end):
                self._text = self._text.lstrip()[len(end) :]
                return True
        if not tag:
            known = (*_HEADER_STARTS, "<|end|>", "<|call|>", "<|return|>")
            is_header = not begun or any(begun.startswith(start) or start.startswith(begun) for start in known)
            if is_header and len(header) <= _MAX_HEADER:
                return False
            self._body = "content"  # a model that does not keep to the format
            return True
        self._text = rest
        recipient = _RECIPIENT_PATTERN.search(header)
        if recipient is not None:
            found.append(ReplyDelta("call", recipient[1], self._calls, self._new_id(recipient[1], self._calls)))
            self._calls += 1
            self._body = "arguments"
        else:
            self._body = "reasoning" if "<|channel|>analysis" in header else "content"
            if self._body == "content" and self._said:
                found.append(ReplyDelta("content", "\n\n"))
        return True

    def _read_body(self, found: list[ReplyDelta]) -> bool:
        places = [at for end in _END_TAGS if (at := self._text.find(end)) >= 0]
        cut = min(places) if places else len(self._text) - max(held_length(self._text, end) for end in _END_TAGS)
        if cut:
            found.append(self._delta(self._text[:cut]))
        self._text = self._text[cut:]
        if places:
            self._body = ""
        return bool(places)

    def _delta(self, text: str) -> ReplyDelta:
        if self._body == "arguments":
            return ReplyDelta("arguments", text, self._calls - 1)
        self._said = self._said or self._body == "content"
        return ReplyDelta("reasoning" if self._body == "reasoning" else "content", text)
