r"""llama.cpp's grammar language (GBNF), translated to the mask engine's (Lark).

The engine's own translation passes escapes on as they are, so that `\u00e9` fails in a text that the caller never wrote. Here every
character is written by its code point, an error names the line of the caller's grammar, and each rule keeps its line.

A rule that does not reach itself becomes a terminal, which the engine matches as one regex. If `root` is such a rule, then the whole
grammar is one regex. The engine matches terminals greedily one after the other: in `word "x"` a terminal of the word would take the x.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from exl2nb.core.errors import StructureError

MAX_DEPTH = 100  # of nested groups
MAX_REPEATS = 1 << 20
_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_RULE_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER_PATTERN = re.compile(r"[0-9]{1,9}")
_TOKEN_PATTERN = re.compile(r"<(?:\[[0-9]{1,9}\]|[^<>\s\"']{1,100})>")
_LARK_MARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*:(?!:=))")


def is_lark(text: str) -> bool:
    """Whether a grammar is written in the engine's own language."""
    return _LARK_MARK.search(text) is not None


def lark_of(text: str) -> str:
    r"""Translate a grammar.

    Args:
        text: rules of the form `name ::= ...`, among them `root`.

    Raises:
        StructureError: it breaks a rule of the language; names the line and shows it.

    Example:
        >>> lark_of('root ::= [a-c] "é"')
        'start: ROOT\nROOT: /[a-c]/ /\\x{E9}/'
    """
    rules = _GrammarParser(text).rules()
    terminal = _terminals(rules)
    names, taken = {}, {"start"}
    for name in rules:
        plain = re.sub("[^a-z0-9]", "_", name.lower()).strip("_") or "rule"
        plain = plain if plain[0].isalpha() else f"r{plain}"
        number, made = 2, plain
        while made in taken:
            number, made = number + 1, f"{plain}_{number}"
        taken.add(made)
        names[name] = made.upper() if name in terminal else made
    lines: dict[int, list[str]] = {}
    if "root" in terminal:
        lines.setdefault(0, []).append(f"start: {names['root']}")
    else:
        names["root"] = "start"
    for name, rule in rules.items():
        lines.setdefault(rule.line, []).append(f"{names[name]}: {_written(rule.body, names)}")
    return "\n".join("\n".join(lines.get(number, [""])) for number in range(0 if 0 in lines else 1, max(lines) + 1))


@dataclass
class _Rule:
    """A rule: the line that it begins in, from 1, and its alternatives."""

    line: int
    body: list[list[_Item]]


@dataclass
class _Item:
    """One item of a sequence: a regex, a token, the name of a rule or a group, and how often it may stand."""

    regex: str = ""
    token: str = ""
    name: str = ""
    group: list[list[_Item]] | None = None
    times: list[str] = field(default_factory=list)
    at: int = 0


class _GrammarParser:
    """Reads a grammar from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text.replace("\r\n", "\n").replace("\r", "\n"), 0

    def rules(self) -> dict[str, _Rule]:
        """Every rule by its name."""
        found: dict[str, _Rule] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            at = self._at
            name = self._match(_RULE_NAME, "the name of a rule")
            self._skip()
            self._expect("::=")
            if name in found:
                self._fail(f"rule {name!r} is defined in line {found[name].line} already", at)
            self._skip(lines=True)
            found[name] = _Rule(self._line(at), self._alternatives(0))
            if self._at < len(self._text) and self._text[self._at] != "\n":
                self._fail(f"found {self._text[self._at]!r}; expected the end of the rule")
            self._skip(lines=True)
        if "root" not in found:
            self._fail("there is no rule 'root', with which an answer begins", 0)
        for rule in found.values():
            for item in _items(rule.body):
                if item.name and item.name not in found:
                    self._fail(f"rule {item.name!r} not found", item.at)
        return found

    def _alternatives(self, depth: int) -> list[list[_Item]]:
        made = [self._sequence(depth)]
        while self._begins_with_bar(depth):
            self._at += 1
            self._skip(lines=True)
            made.append(self._sequence(depth))
        return made

    def _begins_with_bar(self, depth: int) -> bool:
        """Whether another alternative follows, also in the next line."""
        at = self._at
        self._skip(lines=True)
        if self._text.startswith("|", self._at):
            return True
        self._at = at if not depth else self._at
        return False

    def _sequence(self, depth: int) -> list[_Item]:
        made: list[_Item] = []
        while True:
            self._skip(lines=depth > 0)
            here, at = self._text[self._at : self._at + 1], self._at
            if here == '"':
                made.append(_Item(regex=self._literal(), at=at))
            elif here == "[":
                made.append(_Item(regex=self._class(), at=at))
            elif here == ".":
                self._at += 1
                made.append(_Item(regex="(?s:.)", at=at))
            elif here == "(":
                made.append(_Item(group=self._group(depth), at=at))
            elif here == "<":
                made.append(_Item(token=self._match(_TOKEN_PATTERN, "a token, such as <[123]> or <think>"), at=at))
            elif _RULE_NAME.match(here) and not self._is_rule():
                made.append(_Item(name=self._match(_RULE_NAME, "the name of a rule"), at=at))
            elif here and here in "*+?{":
                if not made:
                    self._fail(f"{here!r} repeats nothing; expected an item before it")
                made[-1].times.append(self._times())
            else:
                return made

    def _is_rule(self) -> bool:
        """Whether a name begins another rule: inside a group that was not closed."""
        found = _RULE_NAME.match(self._text, self._at)
        return found is not None and re.compile(r"[ \t]*::=").match(self._text, found.end()) is not None

    def _group(self, depth: int) -> list[list[_Item]]:
        at = self._at
        if depth == MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep; use more rules")
        self._at += 1
        made = self._alternatives(depth + 1)
        self._skip(lines=True)
        if not self._text.startswith(")", self._at):
            self._fail("this group is not closed; expected ')'", at)
        self._at += 1
        return made

    def _times(self) -> str:
        here = self._text[self._at]
        self._at += 1
        if here != "{":
            return here
        self._skip(lines=True)
        least = most = self._number()
        self._skip(lines=True)
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(lines=True)
            most = None if self._text.startswith("}", self._at) else self._number()
            self._skip(lines=True)
        self._expect("}")
        if most is not None and most < least:
            self._fail(f"{{{least},{most}}} has a maximum below its minimum", self._at - 1)
        return f"{{{least},{'' if most is None else most}}}"

    def _number(self) -> int:
        at = self._at
        value = int(self._match(_NUMBER_PATTERN, "a number"))
        if value > MAX_REPEATS:
            self._fail(f"{value} repetitions; expected at most {MAX_REPEATS}", at)
        return value

    def _literal(self) -> str:
        """A text between quotes as a regex."""
        at, made = self._at, []
        self._at += 1
        while not self._text.startswith('"', self._at):
            made.append(_escaped(self._character("this text is not closed; expected '\"'", at)))
        self._at += 1
        return "".join(made)

    def _class(self) -> str:
        """A class of characters as a regex."""
        at, made, unclosed = self._at, [], "this class is not closed; expected ']'"
        self._at += 1
        negative = self._text.startswith("^", self._at)
        self._at += negative
        while not self._text.startswith("]", self._at):
            begin = self._at
            first = last = self._character(unclosed, at)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character(unclosed, at)
            if last < first:
                self._fail(f"the range {self._text[begin : self._at]!r} ends before it begins", begin)
            made.append(_escaped(first) + (f"-{_escaped(last)}" if last != first else ""))
        self._at += 1
        if not made and not negative:
            self._fail("this class has no characters", at)
        return f"[{'^' if negative else ''}{''.join(made)}]" if made else "(?s:.)"

    def _character(self, unclosed: str, opened: int) -> str:
        """One character or escape, inside a text or class that began at `opened`."""
        at, here = self._at, self._text[self._at : self._at + 1]
        if here in ("", "\n"):
            self._fail(unclosed, opened)
        self._at += 1
        if here != "\\":
            return here
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _SIMPLE_ESCAPES:
            return _SIMPLE_ESCAPES[kind]
        if kind not in _HEX_DIGITS:
            self._fail(rf"the escape \{kind} is not known; expected \n \r \t \\ \" \[ \] \xNN \uNNNN or \UNNNNNNNN", at)
        digits = self._text[self._at : self._at + _HEX_DIGITS[kind]]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX_DIGITS[kind]}}}", digits):
            self._fail(rf"the escape \{kind}{digits} needs {_HEX_DIGITS[kind]} hexadecimal digits", at)
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._fail(rf"the escape \{kind}{digits} is no character" + ("; write an emoji by one \\U escape" if code < 0xE000 else ""), at)
        return chr(code)

    # ---- places

    def _skip(self, *, lines: bool = False) -> None:
        """Go past spaces and comments."""
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif here in " \t" or (lines and here == "\n"):
                self._at += 1
            else:
                return

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            self._fail(f"found {self._text[self._at : self._at + 20]!r}; expected {expected}")
        self._at = found.end()
        return found[0]

    def _expect(self, mark: str) -> None:
        if not self._text.startswith(mark, self._at):
            self._fail(f"found {self._text[self._at : self._at + 20]!r}; expected {mark}")
        self._at += len(mark)

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1

    def _fail(self, why: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        begin = self._text.rfind("\n", 0, at) + 1
        line = self._text[begin:].partition("\n")[0]
        raise StructureError(f"line {self._line(at)}, column {at - begin + 1}: {why}; the line is {line[:200]!r}")


def _items(body: Sequence[Sequence[_Item]]) -> Iterator[_Item]:
    for sequence in body:
        for item in sequence:
            yield item
            yield from _items(item.group or [])


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Names of the rules that a regex can match: they need no tokens, and no rule that reaches itself."""
    found: set[str] = set()
    waiting = {name: [*_items(rule.body)] for name, rule in rules.items()}
    while ready := [name for name, items in waiting.items() if all(not one.token and (not one.name or one.name in found) for one in items)]:
        found.update(ready)
        for name in ready:
            del waiting[name]
    return found


def _written(body: Sequence[Sequence[_Item]], names: dict[str, str]) -> str:
    """Alternatives in the engine's language."""
    made = []
    for sequence in body:
        parts = []
        for item in sequence:
            if item.group is not None:
                part = f"({_written(item.group, names)})"
            else:
                part = item.token or names.get(item.name) or (f"/{item.regex}/" if item.regex else '""')
            for times in item.times:
                part = f"({part}){times}" if part[-1] in "*+?}" else f"{part}{times}"
            parts.append(part)
        made.append(" ".join(parts) or '""')
    return " | ".join(made)


def _escaped(character: str) -> str:
    """A regex for one character, also inside a class."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
