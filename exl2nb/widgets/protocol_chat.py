"""The part of the protocol that a Playground in chat mode has: turns, and what a reader does with them. See `protocol` for the rules."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict


class ChatTurn(NamedTuple):
    """What one side said. version: which of the `versions` of this turn, from 0."""

    id: int
    role: str
    text: str
    version: int
    versions: int


class ChatSend(TypedDict):
    """The reader sent a message. settings: as in Generate, here and below."""

    type: Literal["chat_send"]
    text: str
    settings: dict[str, float | bool | None]


class ChatAgain(TypedDict):
    """The reader wants another answer beside `turn`, or one to a message that got none."""

    type: Literal["chat_again"]
    turn: int
    settings: dict[str, float | bool | None]


class ChatEdit(TypedDict):
    """The reader sent another version of message `turn`."""

    type: Literal["chat_edit"]
    turn: int
    text: str
    settings: dict[str, float | bool | None]


class ChatGo(TypedDict):
    """The reader wants to see version `index` of a turn."""

    type: Literal["chat_go"]
    turn: int
    index: int
