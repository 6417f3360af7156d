"""The turns of a conversation as a tree, and the tree as JSON. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from exl2nb.core.errors import ConfigError, OptionError

ROLES = ("system", "user", "assistant", "tool")
FORMAT, VERSION = "exl2nb-conversation", 1
MAX_TURNS = 100_000


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one side said.

    id: number within the conversation, in order of making. parent: the turn it answers, None for the first. seed, finish_reason: of a
    generated turn.
    """

    id: int
    parent: int | None
    role: str
    content: str
    finish_reason: str | None = None
    seed: int | None = None

    @property
    def message(self) -> dict[str, str]:
        """As chat templates read it."""
        return {"role": self.role, "content": self.content}

    def __str__(self) -> str:
        return self.content


class Tree:
    """Turns by id. A turn never changes; an edit is another turn beside it.

    Example:
        >>> tree = Tree()
        >>> hello = tree.add(None, "user", "Hello"); answer = tree.add(hello.id, "assistant", "Good day")
        >>> other = tree.add(None, "user", "Good morning")
        >>> [turn.content for turn in tree.path(answer.id)], len(tree.children(None))
        (['Hello', 'Good day'], 2)
    """

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}
        self._children: dict[int | None, list[int]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns.values())

    def __getitem__(self, number: int) -> Turn:
        if number not in self._turns:
            raise OptionError(f"conversation: no turn {number!r}; expected one of 0 to {len(self) - 1}")
        return self._turns[number]

    def add(self, parent: int | None, role: str, content: str, **details: Any) -> Turn:
        """Put a turn behind another one."""
        return self._put(Turn(id=len(self._turns), parent=parent, role=role, content=content, **details))

    def children(self, parent: int | None) -> list[Turn]:
        """What answers a turn; None: the first turns."""
        return [self._turns[i] for i in self._children.get(parent, [])]

    def path(self, last: int | None) -> list[Turn]:
        """From the first turn to this one."""
        found: list[Turn] = []
        while last is not None:
            found.append(self[last])
            last = found[-1].parent
        return found[::-1]

    def _put(self, turn: Turn) -> Turn:
        self._turns[turn.id] = turn
        self._children.setdefault(turn.parent, []).append(turn.id)
        return turn

    # ---- JSON

    def to_json(self) -> list[dict[str, Any]]:
        """The turns as plain data, in order of making."""
        return [asdict(turn) for turn in self]

    @classmethod
    def from_json(cls, value: Any, *, where: str) -> Tree:
        """Read turns back.

        Raises:
            ConfigError: names the turn, the field, what was found and what was expected.
        """
        if not isinstance(value, list) or len(value) > MAX_TURNS:
            raise ConfigError(f"{where}: turns is {str(value)[:60]!r}; expected a list of at most {MAX_TURNS} turns")
        tree = cls()
        for number, raw in enumerate(value):
            tree._put(_turn(raw, number, f"{where}: turn {number}"))
        return tree


def _turn(raw: Any, number: int, where: str) -> Turn:
    names = [f.name for f in fields(Turn)]
    if not isinstance(raw, dict) or not set(raw) <= set(names):
        raise ConfigError(f"{where} is {str(raw)[:80]!r}; expected an object with {', '.join(names)}")
    parent = raw.get("parent")
    checks = (
        ("id", raw.get("id") == number and not isinstance(raw.get("id"), bool), f"{number}: turns are numbered in order"),
        ("parent", "parent" in raw and (parent is None or (_integer(parent) and 0 <= parent < number)), "null or an earlier turn"),
        ("role", raw.get("role") in ROLES, f"one of {', '.join(ROLES)}"),
        ("content", isinstance(raw.get("content"), str), "a text"),
        ("finish_reason", isinstance(raw.get("finish_reason"), (str, type(None))), "a text or null"),
        ("seed", raw.get("seed") is None or _integer(raw["seed"]), "a number or null"),
    )
    for name, fine, expected in checks:
        if not fine:
            raise ConfigError(f"{where}: {name} is {str(raw.get(name))[:60]!r}; expected {expected}")
    return Turn(**raw)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
