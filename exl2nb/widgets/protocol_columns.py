"""The part of the protocol that CacheExplorer and Compare have: answers side by side, token by token. See `protocol` for the rules."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

from exl2nb.widgets.status import Status


class KlToken(NamedTuple):
    """One token of answer `cell`. prob: under what wrote it. reference_prob: under the reference, reading the same text. kl: nats.

    same: both find the same token most likely. favourite: the reference's where it is another one. null: not known.
    """

    cell: int
    text: str
    id: int
    prob: float | None
    reference_prob: float | None
    kl: float | None
    same: bool | None
    favourite: str | None


class CacheKind(NamedTuple):
    """A cache mode. note: what K and V are stored as. bits: a number on average. fits: tokens that free memory holds; null: not known."""

    mode: str
    title: str
    note: str
    bits: float
    token_bytes: int
    fits: int | None


class NeedleHit(NamedTuple):
    """The answer's probability under a mode; depth 0 to 1, null: the fact was not in the text. rank: of its first token."""

    mode: str
    depth: float | None
    prob: float
    rank: int


class NeedleText(TypedDict):
    """What was hidden and how it is asked for. tokens: of the text around it; 0: not read yet."""

    fact: str
    question: str
    answer: str
    tokens: int


class CachesState(TypedDict):
    """Synced traits of CacheExplorer. modes: the columns, "fp16" first. _tokens: set when a run ends; cell = place in `_run_modes`."""

    status: Status
    error: str
    height: str
    prompt: str
    modes: list[str]
    max_tokens: int
    stage: str
    _kinds: list[CacheKind]
    _run_modes: list[str]
    _run_prompt: str
    _tokens: list[KlToken]
    _needle: list[NeedleHit]
    _needle_modes: list[str]
    _needle_depths: list[float | None]
    _needle_text: NeedleText
    _verdict: str
    _free: int | None
    _context: int
    _model_label: str
    _has_model: bool
    _protocol: int
    _static: bool


class RunCaches(TypedDict):
    """The reader pressed Compare in CacheExplorer."""

    type: Literal["run"]
    prompt: str
    modes: list[str]
    max_tokens: int


class HideNeedle(TypedDict):
    """The reader pressed "Hide a needle"."""

    type: Literal["needle"]
    modes: list[str]


class CompareColumn(NamedTuple):
    """One column. note: its settings in words. nbytes, bpw: of the weights; null: not known."""

    label: str
    note: str
    nbytes: int | None
    bpw: float | None


class CellMeasure(NamedTuple):
    """What was measured of answer `cell` = prompt * columns + column, token by token. tps: tokens a second of decoding; 0: not known."""

    cell: int
    kl: list[float]
    reference_prob: list[float]
    same: list[bool]


class CellSpeed(NamedTuple):
    """How an answer went. ttft_s: seconds to its first token. reason: why it ended."""

    cell: int
    tps: float
    ttft_s: float | None
    reason: str


class CompareState(TypedDict):
    """Synced traits of Compare. _tokens: set once, when a run ends. _measured: KL of the answers that were measured so far."""

    status: Status
    error: str
    height: str
    prompts: list[str]
    view: Literal["kl", "difference"]
    stage: str
    _columns: list[CompareColumn]
    _run_prompts: list[str]
    _tokens: list[KlToken]
    _measured: list[CellMeasure]
    _speeds: list[CellSpeed]
    _note: str
    _has_model: bool
    _protocol: int
    _static: bool


class RunPrompts(TypedDict):
    """The reader pressed Run in Compare."""

    type: Literal["run"]
    prompts: list[str]
