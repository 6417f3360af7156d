"""The messages of a stream: tokens as they come, numbered, and what a page asks for. A part of `protocol`, under the same rules."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict


class Alternative(NamedTuple):
    """A token the model could have chosen at one place. prob: 0..1 under its own distribution, before temperature and filters."""

    text: str
    prob: float


class TokenItem(NamedTuple):
    """One generated token. prob is null when the source did not tell; rank 1 = the most likely token; top null = not sent yet."""

    text: str
    id: int
    prob: float | None
    rank: int | None
    top: list[Alternative] | None


class Stats(TypedDict):
    """Speed so far. n: tokens; tps: tokens per second of decoding (0: not known yet); ttft_s: seconds to the first token (null: none)."""

    n: int
    tps: float
    ttft_s: float | None


class Delta(TypedDict):
    """New items of run `run`, without alternatives: the page asks for those that somebody looks at.

    seq counts deltas of the run from 0; a hole means lost messages, and the browser asks for a snapshot.
    """

    type: Literal["delta"]
    run: int
    seq: int
    items: list[TokenItem]
    stats: Stats


class Snapshot(TypedDict):
    """All items of the run up to delta `seq` (-1: none yet). Answers `ready` and `resync`, and opens every run."""

    type: Literal["snapshot"]
    run: int
    seq: int
    prompt: str
    items: list[TokenItem]
    stats: Stats


class Done(TypedDict):
    """The run is over and `seq` was its last delta, so a lost tail is noticed too."""

    type: Literal["done"]
    run: int
    seq: int
    reason: str
    stats: Stats


class Tops(TypedDict):
    """Answers `look_at`: the alternatives at place `at` of run `run`."""

    type: Literal["tops"]
    run: int
    at: int
    top: list[Alternative]


class LookAt(TypedDict):
    """Somebody looks at a token whose alternatives were not sent."""

    type: Literal["look_at"]
    run: int
    at: int


class Fates(TypedDict):
    """Answers `look_into`. names: of each alternative "" where it could be drawn, else the sampler that removed it. left: of `of`."""

    type: Literal["fates"]
    run: int
    at: int
    names: list[str]
    left: int
    of: int


class LookInto(TypedDict):
    """Somebody looks at a token of a run that is over, and wants to know what the samplers removed there."""

    type: Literal["look_into"]
    run: int
    at: int


class Ready(TypedDict):
    """A browser half exists and wants a snapshot."""

    type: Literal["ready"]


class Resync(TypedDict):
    """Deltas were lost. Sent at most once a second."""

    type: Literal["resync"]


class Ping(TypedDict):
    """The page has heard nothing for a while and asks whether the kernel is there."""

    type: Literal["ping"]


class Pong(TypedDict):
    """It is."""

    type: Literal["pong"]


class Stop(TypedDict):
    """The reader pressed Stop (or Cancel)."""

    type: Literal["stop"]
