"""What travels between a widget's Python half and its browser half, as types.

`widgets.typescript` writes the same types as TypeScript, in the order of this file. A widget may declare the types that are its own
beside its class; they are written too. This module must not import Jupyter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

from exl2nb.core.options import OptionField, options_of
from exl2nb.generator.request import Request
from exl2nb.sampling.filters import FILTER_SWITCHES
from exl2nb.sampling.params import SamplingParams

PROTOCOL_VERSION = 2
"""Raised when a message changes its meaning; the browser half refuses another number with a readable line."""


Status = Literal["idle", "loading", "running", "stopped", "done", "error"]


# ---- streams: tokens as they come, numbered; what a page asks for


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
    """New items of run `run`, without alternatives: the page requests them when the reader points at a token.

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
    """The reader points at a token whose alternatives were not sent."""

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
    """The reader points at a token of a finished run: what did the samplers remove there?"""

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
    """The reader pressed Stop."""

    type: Literal["stop"]


# ---- the playground: sampling options, chat


class SamplerControl(TypedDict):
    """The control of a sampling option. min, max, step: of its slider, step 0 = a switch. low, high: what may be typed.

    neutral: the value that does nothing. common: shown among the first. turns_on: another value turns a filter on.
    """

    name: str
    label: str
    hint: str
    min: float
    max: float
    step: float
    low: float
    high: float
    neutral: float | bool
    common: bool
    turns_on: bool


def _control(one: OptionField) -> SamplerControl:
    least, most, step = one.slider or (0, 1, 0)
    low, high = one.range or (0, 1)
    return SamplerControl(
        name=one.name,
        label=one.label,
        hint=one.hint,
        min=least,
        max=most,
        step=step,
        low=least if one.not_zero else low,
        high=high,
        neutral=one.default,
        common=one.common,
        turns_on=one.name in FILTER_SWITCHES,
    )


SAMPLER_FIELDS = [_control(one) for cls in (SamplingParams, Request) for one in options_of(cls).values() if one.label]
"""Every option that has a control."""
SLIDER_FIELDS = [_control(one) for one in options_of(SamplingParams).values() if one.label and one.one_row]
"""Those that act on one row of logits."""


class Generate(TypedDict):
    """The reader pressed Generate. Carries everything, so it does not depend on the order of trait updates."""

    type: Literal["generate"]
    prompt: str
    settings: dict[str, float | bool | None]


class ShownPicture(NamedTuple):
    """A picture of a turn. url: a small copy as a data URL. note: its size, and the tokens that the model reads of it."""

    url: str
    note: str


class ChatTurn(NamedTuple):
    """What one side said. version: which of the `versions` of this turn, from 0. reasoning: what the model thought. calls: of functions.

    images: that were shown with it.
    """

    id: int
    role: str
    text: str
    version: int
    versions: int
    reasoning: str
    calls: list[str]
    images: list[ShownPicture]


class ChatSend(TypedDict):
    """The reader sent a message. images: pictures with it, as data URLs. settings: as in Generate, here and below."""

    type: Literal["chat_send"]
    text: str
    images: list[str]
    settings: dict[str, float | bool | None]


class ChatAgain(TypedDict):
    """The reader wants another answer as a sibling of `turn`, or one to a message without an answer."""

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


class PlaygroundState(TypedDict):
    """Synced traits of Playground, beside one for each of `_samplers`. text and _tokens are set once, when a run ends.

    _defaults: the model's sampling defaults in words.
    """

    status: Status
    error: str
    height: str
    prompt: str
    chat: bool
    text: str
    view: Literal["plain", "probability", "rank"]
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
    _sees: bool
    _samplers: list[SamplerControl]
    _defaults: str
    _protocol: int
    _static: bool


# ---- progress


class Finished(NamedTuple):
    """A stage that is over."""

    stage: str
    elapsed_s: float
    state: str


class ProgressState(TypedDict):
    """Synced traits of ProgressView. total 0 = unknown; rate in units per second (0 = not known); share 0..1, eta_s: null = not known."""

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
    share: float | None
    elapsed_s: float
    eta_s: float | None
    finished: list[Finished]
    cancellable: bool
    _protocol: int
    _static: bool


# ---- bits: BitMap, BitrateExplorer, WeightBrowser


class Run(NamedTuple):
    """`groups` groups in a row, each of `rows` rows at `bits` bits."""

    bits: int
    rows: int
    groups: int


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
    """Synced traits of BitrateExplorer. bpw: requested; solved: the bitrate that cells and figures belong to. _free: bytes on a GPU.

    _factor: KL of a copy over the predicted one, with `_tokens` tokens of calibration.
    """

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
    _factor: float
    _tokens: int
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
    """The reader pressed "Convert"."""

    type: Literal["make"]
    bpw: float
    prompt: str


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


# ---- the memory plan


class PlanStage(NamedTuple):
    """Bytes of one part of a step: always, per token of the step, per token of the longest text."""

    fixed: int
    token: int
    context: int


class PlanFormula(TypedDict):
    """The coefficients of a memory plan, exl2nb/llm/memory.py."""

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
    adapters: int


class PlanDevice(TypedDict):
    """One of several devices. kind: "cpu" or "cuda"."""

    name: str
    kind: str


class PlanKind(TypedDict):
    """The values of a split on one kind of device, `KindFormula.known` in exl2nb/llm/split_plan.py."""

    layers: int
    parts: list[int]
    read: list[int]
    stream: int
    lent: int
    lent_counts: list[int]
    lent_read: list[int]
    formula: PlanFormula


class PlanSplit(TypedDict):
    """Devices in running order; whether the first, a CPU, lends layers; how the model's place is written in Python, with its revision."""

    devices: list[PlanDevice]
    kinds: dict[str, PlanKind]
    lends: bool
    source: str


class PlanState(TypedDict):
    """Synced traits of MemoryPlan. free: bytes, null = not known. _modes: cache modes to choose from.

    _split: null where there is one device. Of several: borders: layers where each but the last ends; limits: bytes that each may hold,
    speeds: bytes a second that each reads; null in them = not known.
    """

    status: Status
    error: str
    height: str
    name: str
    device: Literal["cpu", "cuda"]
    context: int
    batch: int
    cache_mode: str
    free: int | None
    borders: list[int]
    limits: list[int | None]
    speeds: list[float | None]
    _split: PlanSplit | None
    _formula: PlanFormula
    _modes: list[str]
    _protocol: int
    _static: bool


# ---- answers side by side: CacheExplorer, Compare


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
    """The hidden fact and its question. tokens: of the filler text; 0: not read yet."""

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
    """The reader pressed Generate in CacheExplorer."""

    type: Literal["run"]
    prompt: str
    modes: list[str]
    max_tokens: int


class HideNeedle(TypedDict):
    """The reader pressed "Run needle test"."""

    type: Literal["needle"]
    modes: list[str]


class CompareColumn(NamedTuple):
    """One column. note: its settings in words. nbytes, bpw: of the weights; null: not known."""

    label: str
    note: str
    nbytes: int | None
    bpw: float | None


class CellMeasure(NamedTuple):
    """What was measured of answer `cell` = prompt * columns + column, token by token. tps: tokens per second of decoding; 0: not known."""

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
    """The reader pressed Generate in Compare."""

    type: Literal["run"]
    prompts: list[str]


# ---- inspectors: SamplerMicroscope, PageTable, Speculation


SHOWN_TOKENS = 14
"""Tokens of the microscope's table: so many of the first step's best and of the last's, and the drawn one."""
LINE_PROB = 0.004
"""Probability below which neighbours on the microscope's line become one piece."""


class SampleStep(NamedTuple):
    """One step of the sampling chain. mass: probability that it removed. probs: of `_tokens` after it; null where removed."""

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
    """Synced traits of SamplerMicroscope. settings: of the sliders. token: drawn; uniform null: greedy. _answer: what the text has.

    _about: each step of a chain in words.
    """

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
    _samplers: list[SamplerControl]
    _about: dict[str, str]
    _protocol: int
    _static: bool


class Sample(TypedDict):
    """The reader moved a slider or chose a place; settings are the changed ones."""

    type: Literal["sample"]
    at: int
    settings: dict[str, float]


OWNER_COLOURS = (
    (46, 112, 190), (214, 120, 40), (62, 150, 92), (168, 84, 170), (196, 62, 78), (20, 140, 150), (140, 110, 40), (222, 110, 150),
)  # fmt: skip
"""Of the requests that hold pages, by number."""


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
    """One token and where it comes from. step: pass of the model that decided it; -1: not known. wrong: draft tokens rejected here."""

    text: str
    id: int
    source: Literal["target", "draft", "ngram", "forced", "rewound"]
    prob: float | None
    step: int
    wrong: list[str]


class SpecStats(TypedDict):
    """What speculation did. lengths: how often 0, 1, 2, ... draft tokens of a pass were accepted.

    plain_tps: tokens per second without speculation; same: whether the text is the same then; null where it was not run.
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


# ---- ServerMonitor


class ServedRequest(NamedTuple):
    """One request of a server's client. state: "running", "done", "cancelled" or "error". ttft_s null = no token yet."""

    number: int
    route: str
    client: str
    state: str
    seconds: float
    ttft_s: float | None
    prompt_tokens: int
    new_tokens: int


class ServedClient(NamedTuple):
    """One client of a server, over its last requests. ttft_ms, token_ms: medians; null = none known."""

    client: str
    running: int
    ended: int
    ttft_ms: float | None
    token_ms: float | None


class ServerMonitorState(TypedDict):
    """Synced traits of ServerMonitor. tok_s: samples, the last one newest; times of the last ten seconds, null = none."""

    status: Status
    error: str
    height: str
    url: str
    model: str
    active: int
    queued: int
    max_queue: int
    pages: int
    pages_free: int
    tok_s: list[float]
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    requests: list[ServedRequest]
    clients: list[ServedClient]
    _protocol: int
    _static: bool


# ---- inside the model: one prompt read by several bitrates or caches, the first of them the reference


class ReadPrompt(TypedDict):
    """Read another prompt."""

    type: Literal["read"]
    prompt: str


class PatchedKl(NamedTuple):
    """Mean KL of model `side` when a layer runs with the reference's weights; side 1 is the first after the reference."""

    side: int
    layer: int
    kl: float


class FlowResult(TypedDict):
    """What ErrorFlow shows. labels: of all models, the reference first; the lists that follow are of the others.

    errors: relative, by model, row and layer. flow: of the residual stream, before the first layer, then after attention and MLP of each.
    cosines: by model, of attention and MLP, by layer: 1 = adds to the stream's error, -1 = cancels it. kl: mean over the tokens.
    """

    labels: list[str]
    rows: list[str]
    layers: int
    tokens: int
    errors: list[list[list[float | None]]]
    flow: list[list[float]]
    cosines: list[list[list[float]]]
    kl: list[float]
    patched: list[PatchedKl]


class InsideState(TypedDict):
    """Synced traits of every widget that looks inside. side: model that is compared; _share: of the running work that is done, 0 to 1."""

    status: Status
    error: str
    height: str
    prompt: str
    side: int
    _share: float
    _has_model: bool
    _protocol: int
    _static: bool


class ErrorFlowState(InsideState):
    """Synced traits of ErrorFlow. side: model of the map, from 1; layer: the chosen one, -1 = none."""

    layer: int
    _result: FlowResult


class PatchLayer(TypedDict):
    """Run a layer with the reference's weights; -1: all layers, one after the other."""

    type: Literal["patch"]
    layer: int


class LensResult(TypedDict):
    """What LayerLens shows; probabilities travel as whole numbers of 0.01 %. Flat lists have a row for each depth.

    Depths: the embedding, then each layer. texts: of the tokens. words: texts of predicted tokens, by number. top, prob: by model, three
    for each depth and token. target: what the reference finds most likely in the end, for each token; chance: of it, by model. kl: by model
    after the reference.
    """

    labels: list[str]
    layers: int
    texts: list[str]
    words: list[str]
    top: list[list[int]]
    prob: list[list[int]]
    target: list[int]
    chance: list[list[int]]
    kl: list[list[float]]


class LayerLensState(InsideState):
    """Synced traits of LayerLens. token: -1 = the last one."""

    token: int
    _result: LensResult


class LookedAt(TypedDict):
    """A picture of AttentionView: the data URL of what the model saw, and the tokens of its patches, row by row."""

    url: str
    rows: int
    columns: int
    tokens: list[int]


class AttentionResult(TypedDict):
    """What AttentionView shows besides patterns. size: rows and columns of a pattern; of fewer than tokens, each is a mean.

    names: of its rows and columns. distance: by model after the reference, layer and head: mean total variation, 0 to 1. pictures: in the
    prompt. answer: the token that the answer begins with; -1 = there is none.
    """

    labels: list[str]
    layers: int
    heads: int
    tokens: int
    size: int
    names: list[str]
    distance: list[list[list[float]]]
    pictures: list[LookedAt]
    answer: int


class Patterns(TypedDict):
    """Attention of some heads of a layer: base64 of heads x size x size bytes, by model; a byte b is a share of (b / 255) ** 2.

    rows: of each model that have been read so far.
    """

    layer: int
    head: int
    size: int
    rows: list[int]
    data: list[str]


class AttentionViewState(InsideState):
    """Synced traits of AttentionView. token: whose attention is shown on the pictures, from the end where it is negative.

    _heads: all heads of the chosen layer, small; _one: the chosen head; _stored: in an export, all.
    """

    layer: int
    head: int
    token: int
    _result: AttentionResult
    _heads: list[Patterns]
    _one: list[Patterns]
    _stored: list[Patterns]


class GroupHistogram(TypedDict):
    """The group of one model that the chosen row lies in, all its columns.

    first: stored row that it begins with. before, after: how many values of the original (empty where it is not known) and of the model lie
    in each of equal bins from low to high. codes: how often each code is stored; nearest: how often it would be, were every original value
    rounded to the nearest level. scales: columns by scale index. error: relative, of the group (null: not known). clipped: share of
    original values beyond the last level. entropy: of the codes, bits.
    """

    label: str
    bits: int
    group: int
    groups: int
    rows: int
    columns: int
    first: int
    low: float
    high: float
    before: list[int]
    after: list[int]
    codes: list[int]
    nearest: list[int]
    scales: list[int]
    error: float | None
    clipped: float | None
    entropy: float


class LoraCell(NamedTuple):
    """What an adapter does to a matrix: Frobenius norms of the change at scale 1, and of the matrix. layer: -1 outside the layers."""

    layer: int
    matrix: str
    rank: int
    change: float
    weight: float


class LoraResult(TypedDict):
    """What LoraExplorer shows. scale: of the answer. base, adapted: tokens of the answers without and with it; kl: mean over `adapted`."""

    name: str
    model: str
    matrices: list[str]
    layers: list[int]
    cells: list[LoraCell]
    scale: float
    base: list[KlToken]
    adapted: list[KlToken]
    kl: float | None


class LoraExplorerState(InsideState):
    """Synced traits of LoraExplorer. scale: of the slider. selected: layer and matrix, or empty."""

    scale: float
    selected: list[int | str]
    _result: LoraResult


class ScaleTo(TypedDict):
    """Answer again with the adapter at another scale."""

    type: Literal["scale"]
    scale: float


class WeightHistogramState(TypedDict):
    """Synced traits of WeightHistogram. row: of the original matrix."""

    status: Status
    error: str
    height: str
    layer: int
    matrix: str
    row: int
    _layers: list[int]
    _matrices: list[str]
    _rows: int
    _original: str
    _groups: list[GroupHistogram]
    _protocol: int
    _static: bool


class ShowGroup(TypedDict):
    """Show the group of another row."""

    type: Literal["place"]
    layer: int
    matrix: str
    row: int


class Massive(NamedTuple):
    """A massive activation of the residual stream. ratio: over the median magnitude of its layer."""

    side: int
    layer: int
    token: int
    channel: int
    value: float
    ratio: float


class OutlierResult(TypedDict):
    """What OutlierMap shows. points: by name. bins: columns of a map, by point; each holds `channels / bins` channels, its largest counts.

    activations: by point and model, base64 of layers x bins bytes; weights: the same, of the matrix that reads the point. A byte b is
    lows[point] * 10 ** (b * spans[point] / 255), that of weights with weight_lows and weight_spans; 0 is nothing.
    """

    labels: list[str]
    layers: int
    texts: list[str]
    points: list[str]
    channels: list[int]
    bins: list[int]
    activations: list[list[str]]
    lows: list[float]
    spans: list[float]
    weights: list[list[str]]
    weight_lows: list[float]
    weight_spans: list[float]
    massive: list[Massive]


class GroupEffect(TypedDict):
    """What one channel does to its group of 128: relative rounding error of the others at `bits`, with it and without it."""

    layer: int
    point: int
    channel: int
    bits: int
    activation: float
    weight: float
    activations: list[float]
    weights: list[float]


class OutlierMapState(InsideState):
    """Synced traits of OutlierMap. point: number in `points`; channel: -1 = none is chosen."""

    point: int
    layer: int
    channel: int
    _result: OutlierResult
    _effect: list[GroupEffect]


# ---- the two directions


FromKernel = Delta | Snapshot | Done | Pong | Tops | Fates


RECORD_TYPES = (ChatTurn, BitCell, CacheKind, SampleStep)
"""NamedTuples that travel as objects (`_asdict`). The others travel as lists: rows of tokens, points and pages, of which there are many."""
