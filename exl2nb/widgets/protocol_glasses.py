"""Types on the wire of the widgets that look inside: weights, sampling, pages, guesses. See protocol.py."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

from exl2nb.widgets.status import Status


class Run(NamedTuple):
    """`groups` groups in a row, each of `rows` rows at `bits` bits."""

    bits: int
    rows: int
    groups: int


class WeightSlice(TypedDict):
    """32 stored rows of one column, from the words to the weights; the last stage is empty where the original is not known.

    words and scale_word: unsigned. zero: the code that stands for 0. weights, original: in stored order, as `rows` names them.
    """

    group: int
    unit: int
    column: int
    bits: int
    zero: int
    first_row: int
    first_word: int
    words: list[int]
    scale_word: int
    scale_index: int
    scale_max: float
    unit_step: float
    step: float
    codes: list[int]
    rows: list[int]
    weights: list[float]
    original: list[float]


class WeightsState(TypedDict):
    """Synced traits of WeightBrowser. value: which of the 32 is followed. _runs: groups of the matrix, from the top row to the last."""

    status: Status
    error: str
    height: str
    title: str
    layer: int
    matrix: str
    group: int
    unit: int
    column: int
    value: int
    _layers: list[int]
    _matrices: list[str]
    _runs: list[Run]
    _units: int
    _rows: int
    _columns: int
    _bpw: float
    _original: str
    _slice: WeightSlice
    _protocol: int
    _static: bool


class Look(TypedDict):
    """The reader went elsewhere in the weights. Numbers out of range are moved inside it."""

    type: Literal["look"]
    layer: int
    matrix: str
    group: int
    unit: int
    column: int


class SampleStep(NamedTuple):
    """One link of the sampling chain. mass: what it removed weighed. probs: of `_tokens` after it; null where removed."""

    name: str
    settings: str
    survivors: int
    removed: int
    mass: float
    temperature: float
    entropy_bits: float
    probs: list[float | None]


class SampleToken(NamedTuple):
    """A token worth looking at."""

    id: int
    text: str


class LinePart(NamedTuple):
    """A piece of the line of probabilities, in order of ids. id -1: several tokens together."""

    id: int
    text: str
    prob: float


class MicroscopeState(TypedDict):
    """Synced traits of SamplerMicroscope. settings: of the sliders. token: drawn; uniform null: greedy. _answer: what the text has."""

    status: Status
    error: str
    height: str
    at: int
    settings: dict[str, float]
    token: int
    token_text: str
    prob: float
    uniform: float | None
    seed: str
    _index: int
    _others: str
    _prompt: str
    _answer: list[SampleToken]
    _vocab: int
    _steps: list[SampleStep]
    _tokens: list[SampleToken]
    _line: list[LinePart]
    _protocol: int
    _static: bool


class Sample(TypedDict):
    """The reader moved a slider or chose a place; settings are the changed ones."""

    type: Literal["sample"]
    at: int
    settings: dict[str, float]


class PageCell(NamedTuple):
    """One page of the cache. parent: the page before it in its text, -1 none known. event: what happened since the frame before, or "".

    "new": taken from the free ones; "found": a cached page is used again; "joined": one more request holds it; "evicted": a cached page was
    given away; "freed": its last request let go; "cleared": what was cached is forgotten.
    """

    state: Literal["free", "cached", "used"]
    tokens: int
    owners: list[int]
    key: str
    parent: int
    event: Literal["", "new", "found", "joined", "evicted", "freed", "cleared"]


class PageOwner(NamedTuple):
    """One request. waiting: it has no pages now. reused: tokens of its prompt that were found in the cache."""

    number: int
    waiting: bool
    tokens: int
    computed: int
    reused: int
    pages: list[int]


class PageFrame(TypedDict):
    """The page table at one moment."""

    label: str
    page_size: int
    pages: list[PageCell]
    requests: list[PageOwner]
    evictions: int
    preemptions: int


class PageTableState(TypedDict):
    """Synced traits of PageTable. frame: of `_count`, -1: the last. _shown: the one that _frames holds first (an export holds all)."""

    status: Status
    error: str
    height: str
    title: str
    frame: int
    live: bool
    _count: int
    _shown: int
    _frames: list[PageFrame]
    _can_live: bool
    _protocol: int
    _static: bool


class ShowFrame(TypedDict):
    """The scrubber moved, or Live was pressed."""

    type: Literal["frame"]
    frame: int
    live: bool


class SpecToken(NamedTuple):
    """One token and where it comes from. step: pass of the model that decided it; -1: not known. wrong: guesses thrown away here."""

    text: str
    id: int
    source: Literal["target", "draft", "ngram", "forced", "rewound"]
    prob: float | None
    step: int
    wrong: list[str]


class SpecStats(TypedDict):
    """What speculation did. lengths: how often 0, 1, 2, ... guesses of a pass were right.

    plain_tps: tokens a second without guesses; same: whether the text is the same then; null where it was not run.
    """

    kind: str
    steps: int
    plain_steps: int
    proposed: int
    accepted: int
    lengths: list[int]
    tokens: int
    tps: float
    plain_tps: float | None
    same: bool | None


class SpeculationState(TypedDict):
    """Synced traits of Speculation."""

    status: Status
    error: str
    height: str
    title: str
    _prompt: str
    _tokens: list[SpecToken]
    _stats: SpecStats
    _protocol: int
    _static: bool
