"""What travels between a widget's Python half and its browser half, as types.

`python -m exl2nb.widgets.protocol FILE` writes the same types as TypeScript.
Must not import Jupyter: the generator and its test run on bare types.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from exl2nb.widgets.protocol_chat import ChatAgain, ChatEdit, ChatGo, ChatSend, ChatTurn
from exl2nb.widgets.protocol_columns import (
    CacheKind,
    CachesState,
    CellMeasure,
    CellSpeed,
    CompareColumn,
    CompareState,
    HideNeedle,
    KlToken,
    NeedleHit,
    NeedleText,
    RunCaches,
    RunPrompts,
)
from exl2nb.widgets.protocol_glasses import (
    LinePart,
    Look,
    MicroscopeState,
    PageCell,
    PageFrame,
    PageOwner,
    PageTableState,
    Run,
    Sample,
    SampleStep,
    SampleToken,
    ShowFrame,
    SpecStats,
    SpecToken,
    SpeculationState,
    WeightSlice,
    WeightsState,
)
from exl2nb.widgets.protocol_samplers import SAMPLERS, Sampler, SamplerValues
from exl2nb.widgets.protocol_stream import (
    Alternative,
    Delta,
    Done,
    Fates,
    LookAt,
    LookInto,
    Ping,
    Pong,
    Ready,
    Resync,
    Snapshot,
    Stats,
    Stop,
    TokenItem,
    Tops,
)
from exl2nb.widgets.status import Status
from exl2nb.widgets.typescript import module

PROTOCOL_VERSION = 1
"""Raised when a message changes its meaning; the browser half refuses another number with a readable line."""


class Settings(SamplerValues):
    """Sampling settings of the controls. top_k 0, top_p 1, min_p 0, repetition_penalty 1: that filter is off; seed null: a random one."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None


class Generate(TypedDict):
    """The reader pressed Generate. Carries everything, so it does not depend on the order of trait updates."""

    type: Literal["generate"]
    prompt: str
    settings: Settings


class PlaygroundState(SamplerValues):
    """Synced traits of Playground. text and _tokens are set once, when a run ends."""

    status: Status
    error: str
    height: str
    prompt: str
    chat: bool
    text: str
    view: Literal["plain", "probability", "rank"]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    n_tokens: int
    tokens_per_second: float
    ttft_s: float | None
    finish_reason: str
    _turns: list[ChatTurn]
    _run_prompt: str
    _tokens: list[TokenItem]
    _model_label: str
    _has_model: bool
    _protocol: int
    _static: bool


class Finished(NamedTuple):
    """A stage that is over."""

    stage: str
    elapsed_s: float
    state: str


class ProgressState(TypedDict):
    """Synced traits of ProgressView. total 0 = unknown; rate in units per second (0 = not known); eta_s null = not known."""

    status: Status
    error: str
    height: str
    title: str
    stage: str
    done: float
    total: float
    unit: str
    detail: str
    rate: float
    elapsed_s: float
    eta_s: float | None
    finished: list[Finished]
    cancellable: bool
    _protocol: int
    _static: bool


class BitPart(NamedTuple):
    """One matrix as its file has it, from the top row to the last. format: "exl2", "gptq", a dtype or "". runs: empty where not known."""

    name: str
    bpw: float
    format: str
    runs: list[Run]


class BitCell(NamedTuple):
    """One kind of matrix in one layer (-1: outside). experts: matrices folded into it. rows, columns: of one; 0 = not known.

    error: of the rounding on the calibration text. share: of the predicted KL, 0..1. null: not known.
    """

    layer: int
    matrix: str
    bpw: float
    nbytes: int
    weights: int
    rows: int
    columns: int
    experts: int
    error: float | None
    share: float | None
    parts: list[BitPart]


class BitMapState(TypedDict):
    """Synced traits of BitMap. selected: layer and matrix, or empty. _other: bits of a second model, cell by cell."""

    status: Status
    error: str
    height: str
    title: str
    metric: Literal["bpw", "error", "share", "difference"]
    selected: list[int | str]
    _metrics: list[str]
    _matrices: list[str]
    _layers: list[int]
    _cells: list[BitCell]
    _other: list[float | None]
    _other_title: str
    _protocol: int
    _static: bool


class CurvePoint(NamedTuple):
    """One allocation on the rate-distortion curve. kl: predicted, nats per token. bits: of each cell, in the order of `_cells`."""

    bpw: float
    nbytes: int
    kl: float
    bits: list[float]


class Mark(NamedTuple):
    """A bitrate whose KL was measured, nats per token."""

    bpw: float
    kl: float
    label: str


class ExplorerState(TypedDict):
    """Synced traits of BitrateExplorer. bpw: asked for; solved: the bitrate that cells and figures belong to. _free: bytes of a GPU."""

    status: Status
    error: str
    height: str
    bpw: float
    solved: float
    nbytes: int
    predicted_kl: float
    solve_ms: float
    prompt: str
    metric: Literal["bpw", "share"]
    selected: list[int | str]
    original: str
    made: str
    made_bpw: float
    stage: str
    progress: float
    _low: float
    _high: float
    _matrices: list[str]
    _layers: list[int]
    _cells: list[BitCell]
    _curve: list[CurvePoint]
    _marks: list[Mark]
    _can_make: bool
    _free: int | None
    _protocol: int
    _static: bool


class Solve(TypedDict):
    """The slider moved."""

    type: Literal["solve"]
    bpw: float


class SolveSize(TypedDict):
    """The reader gave a size in bytes: of the files, or of a memory that holds a cache of `context` tokens in mode `cache` as well."""

    type: Literal["solve_size"]
    kind: Literal["bytes", "fits"]
    size: int
    context: int
    cache: str


class Make(TypedDict):
    """The reader pressed "Make it"."""

    type: Literal["make"]
    bpw: float
    prompt: str


class PlanStage(NamedTuple):
    """Bytes of one part of a step: always, per token of the step, per token of the longest text."""

    fixed: int
    token: int
    context: int


class PlanFormula(TypedDict):
    """The coefficients of a memory plan, exl2nb/llm/plan_formula.py."""

    weights: int
    page_tokens: int
    page_bytes: dict[str, int]
    chunk: int
    stages: list[PlanStage]
    graph_fixed: int
    graph_row: int
    logits_row: int
    longest: int
    segments: int


class PlanState(TypedDict):
    """Synced traits of MemoryPlan. free: bytes, null = not known. _modes: cache modes to choose from."""

    status: Status
    error: str
    height: str
    name: str
    device: Literal["cpu", "cuda"]
    context: int
    batch: int
    cache_mode: str
    free: int | None
    _formula: PlanFormula
    _modes: list[str]
    _protocol: int
    _static: bool


FromKernel = Delta | Snapshot | Done | Pong | Tops | Fates
ToKernel = (
    Ready
    | Resync
    | Ping
    | Stop
    | Generate
    | ChatSend
    | ChatAgain
    | ChatEdit
    | ChatGo
    | LookAt
    | LookInto
    | Solve
    | SolveSize
    | Make
    | Look
    | RunCaches
    | HideNeedle
    | RunPrompts
    | Sample
    | ShowFrame
)

_EXPORTED: dict[str, Any] = {
    "Status": Status,
    "Alternative": Alternative,
    "TokenItem": TokenItem,
    "Stats": Stats,
    "Delta": Delta,
    "Snapshot": Snapshot,
    "Done": Done,
    "Tops": Tops,
    "LookAt": LookAt,
    "Fates": Fates,
    "LookInto": LookInto,
    "Ready": Ready,
    "Resync": Resync,
    "Ping": Ping,
    "Pong": Pong,
    "Stop": Stop,
    "Sampler": Sampler,
    "SamplerValues": SamplerValues,
    "Settings": Settings,
    "Generate": Generate,
    "ChatTurn": ChatTurn,
    "ChatSend": ChatSend,
    "ChatAgain": ChatAgain,
    "ChatEdit": ChatEdit,
    "ChatGo": ChatGo,
    "PlaygroundState": PlaygroundState,
    "Finished": Finished,
    "ProgressState": ProgressState,
    "Run": Run,
    "BitPart": BitPart,
    "BitCell": BitCell,
    "BitMapState": BitMapState,
    "CurvePoint": CurvePoint,
    "Mark": Mark,
    "ExplorerState": ExplorerState,
    "Solve": Solve,
    "SolveSize": SolveSize,
    "Make": Make,
    "WeightSlice": WeightSlice,
    "WeightsState": WeightsState,
    "Look": Look,
    "PlanStage": PlanStage,
    "PlanFormula": PlanFormula,
    "PlanState": PlanState,
    "KlToken": KlToken,
    "CacheKind": CacheKind,
    "NeedleHit": NeedleHit,
    "NeedleText": NeedleText,
    "CachesState": CachesState,
    "RunCaches": RunCaches,
    "HideNeedle": HideNeedle,
    "CompareColumn": CompareColumn,
    "CellMeasure": CellMeasure,
    "CellSpeed": CellSpeed,
    "CompareState": CompareState,
    "RunPrompts": RunPrompts,
    "SampleStep": SampleStep,
    "SampleToken": SampleToken,
    "LinePart": LinePart,
    "MicroscopeState": MicroscopeState,
    "Sample": Sample,
    "PageCell": PageCell,
    "PageOwner": PageOwner,
    "PageFrame": PageFrame,
    "PageTableState": PageTableState,
    "ShowFrame": ShowFrame,
    "SpecToken": SpecToken,
    "SpecStats": SpecStats,
    "SpeculationState": SpeculationState,
    "FromKernel": FromKernel,
    "ToKernel": ToKernel,
}


def typescript() -> str:
    """The TypeScript module that `widgets/src/protocol.gen.ts` must equal."""
    return module(_EXPORTED, version=PROTOCOL_VERSION, lists={"SAMPLERS": ("Sampler", SAMPLERS)})


if __name__ == "__main__":
    import sys

    Path(sys.argv[1]).write_text(typescript(), encoding="utf-8")
