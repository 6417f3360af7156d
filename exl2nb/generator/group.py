"""Sequences of one request that run in step. Nothing schedules them together: whoever's row is in first waits, with nothing pending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from exl2nb.generator.request import Completion
    from exl2nb.generator.sequence import Sequence


class Fork(Protocol):
    """Makes the cache of `target` that of `source`: the same tokens computed, pages shared where they are full."""

    def __call__(self, source: Sequence, target: Sequence, /) -> None:
        """Both must belong to the same engine."""
        ...


class Group:
    """members: begin and end together; the first one has the channel. active: those that run in the next step.

    A member that has given its row is parked (`pending` is 0) until all have; then `step` chooses tokens for all of them. Preempting a
    parked member is harmless: it runs its ids again and gives the same row again.
    """

    def __init__(self, members: list[Sequence]) -> None:
        self.members = members
        self.active = list(members)
        self.lockstep = True  # they must fit the cache together
        self.shares_prompt = False  # the full pages of the prompt are the same for all
        self.fork: Fork | None = None  # set by the engine; without it a fork computes its ids again
        self._rows: dict[int, np.ndarray] = {}
        for member in members:
            member.group = self

    @property
    def leader(self) -> Sequence:
        """The member whose channel the caller holds."""
        return self.members[0]

    def receive(self, member: Sequence, row: np.ndarray) -> str | None:
        """The row of one member is there; once all are, the step. The finish reason when the answer is complete."""
        if member in self.active:
            self._rows[id(member)] = row.copy()
        if len(self._rows) < len(self.active):
            return None
        rows = [self._rows[id(one)] for one in self.active]
        self._rows = {}
        return self.step(rows)

    def step(self, rows: list[np.ndarray]) -> str | None:
        """Choose for every active member; one row each."""
        raise AssertionError("a group chooses by its own rule")

    def completion(self, reason: str) -> Completion:
        """The answer as it stands."""
        return self.leader.complete_alone(reason)

    def ready(self, member: Sequence) -> bool:
        """Whether this member is to run: it takes part, and its row is not in."""
        return member in self.active and id(member) not in self._rows
