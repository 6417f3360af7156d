"""The memory of a model before it is loaded: weights, cache, activations, logits, compared with free memory; from headers alone.

`Formula` holds a model's coefficients. `PLAN_TERMS` is the arithmetic, as data: `evaluate` computes it here, widgets/src/plan/formula.ts
computes the same terms in the browser. `exl2nb.llm.plan` reads a model's headers and the free memory and makes a `MemoryPlan` of them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exl2nb.cache.spec import CACHE_MODES, PAGE_SIZE, CacheSpec, parse_mode
from exl2nb.core.errors import DeviceError, OptionError
from exl2nb.core.show import size_text
from exl2nb.generator.gpu_draft import MAX_CAPTURED_ROUNDS
from exl2nb.model.config import ModelConfig
from exl2nb.model.gpu_forward import MAX_PROMPT_STEP_TOKENS, MAX_STEP_TOKENS_PER_SEQUENCE
from exl2nb.model.gpu_memory import kept_bytes
from exl2nb.model.inspection import Inspection
from exl2nb.ops.memory_ops import partial_sums_bytes

PREFILL_CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
"""Prompt tokens that a step takes at most."""
PRODUCTS_BYTES = 32 * 2**20  # what the library of matrix products keeps on the GPU
CODE_BYTES = 146 * 2**20  # kernels that CUDA loads when they are first used; H200, torch 2.11, 2026-11-21
DRAFT_ROWS = sum(
    range(2, MAX_STEP_TOKENS_PER_SEQUENCE + 1)
)  # of one sequence's captured steps with draft tokens: of 2 to MAX_STEP_TOKENS_PER_SEQUENCE rows
DRAFT_GRAPHS = 2 * MAX_CAPTURED_ROUNDS + 2 * (
    MAX_STEP_TOKENS_PER_SEQUENCE - 1
)  # rounds and their followers; verifying steps of one sequence and of several. Each has a pool
PREFILL_KEY_RUNS = 7  # of keys that prefill attends to apart: as many as 131,072 tokens need, one more for each doubling
GRAPH_BYTES = 8 * 2**20  # of the first captured step, whatever its model
DEFAULT_MULTIPROCESSORS = 132  # of the GPU that is assumed where there is none: an H100 or H200
MIB = 2**20
SEGMENT_BYTES = 2 * MIB
PLAN_PARTS = ("weights", "cache", "work", "graphs", "logits", "rounding", "adapters")
DEFAULT_CONTEXT_TOKENS = 4096  # as `load`, where the caller does not say and the model allows more
INPUT_LIMITS = {"context": 1 << 24, "batch": 1 << 16, "free": 1 << 60}
PART_COLOURS = {"weights": "#3b6ea8", "cache": "#52a37f", "work": "#d9a441", "graphs": "#8a6fb0", "logits": "#b5565e",
                "rounding": "#9a9a9a",
           "adapters": "#4aa3b8"}  # fmt: skip
PART_LABELS = {"weights": "weights", "cache": "cache", "work": "activations", "graphs": "graphs", "logits": "logits",
               "rounding": "rounding",
          "adapters": "adapters"}  # fmt: skip


Term = int | str | list[Any]
"""A number, the name of a value, or an operation with its operands: `["+", "weights", ["*", 2, "batch"]]`."""


def _step(value: int, *steps: int) -> int:
    """The value of the first limit that `value` does not exceed; `steps` are limit, value, limit, value, ..., otherwise."""
    return next((result for limit, result in zip(steps[::2], steps[1::2]) if value <= limit), steps[-1])


TERM_OPERATIONS: Mapping[str, Callable[..., int]] = {
    "+": lambda *values: sum(values),
    "*": lambda *values: math.prod(values),
    "min": min,
    "ceil": lambda a, b: -(-a // b),
    "floor": lambda a, b: a // b,
    "at": lambda table, key: table[key],
    "sum": lambda table, start, end: sum(table[start:end]),
    "most": lambda rows, *values: max((row[0] + sum(map(math.prod, zip(row[1:], values))) for row in rows), default=0),
    "step": _step,
}
"""What a term can do. The browser has the same operations in widgets/src/plan/formula.ts, where division is that of whole numbers too."""


def evaluate(terms: Sequence[tuple[str, Term]], known: Mapping[str, Any]) -> dict[str, Any]:
    """The known values and those of the terms, each of which may name those before it.

    Example:
        >>> evaluate([("tokens", ["*", "batch", 256]), ("bytes", ["+", "tokens", 1])], {"batch": 2})
        {'batch': 2, 'tokens': 512, 'bytes': 513}
    """
    found = dict(known)

    def value(term: Term) -> Any:
        if isinstance(term, list):
            return TERM_OPERATIONS[term[0]](*map(value, term[1:]))
        return found[term] if isinstance(term, str) else term

    for name, term in terms:
        found[name] = value(term)
    return found


def _rounding(size: str) -> list[Term]:
    """What torch takes from a GPU for one tensor beyond its size: for up to 1 MiB a segment of 2 MiB,
    for less than 10 MiB one of 20 MiB, for more a multiple of 2 MiB.
    """
    multiple: Term = ["*", SEGMENT_BYTES, ["ceil", size, SEGMENT_BYTES]]
    return [["step", size, MIB, SEGMENT_BYTES, 10 * MIB - 1, 20 * MIB, multiple], ["*", -1, size]]


PLAN_TERMS: Sequence[tuple[str, Term]] = (
    ("tokens", ["min", "chunk", ["*", "batch", "context"]]),
    ("cache", ["*", "batch", ["ceil", "context", "page_tokens"], ["at", "page_bytes", "mode"]]),  # every sequence has whole pages
    ("work", ["most", "stages", "tokens", "context"]),
    # A decode step is captured for a power of two up to 8 sequences, then for a multiple of 8, at most 64.
    ("graph_rows", ["min", 64, ["step", "batch", 1, 1, 2, 2, 4, 4, 8, 8, ["*", 8, ["ceil", "batch", 8]]]]),
    ("graphs", ["+", "graph_fixed", ["*", "graph_row", "graph_rows"]]),
    ("logits", ["*", "logits_row", "batch"]),
    ("rounding", ["*", ["min", 1, "segments"], ["+", *_rounding("weights"), *_rounding("cache")]]),
)
"""The parts of a plan from the fields of a `Formula`, `context`, `batch` and `mode`."""


class Stage(NamedTuple):
    """Bytes that one part of a step needs: fixed, per token of the step, per token of the longest sequence."""

    fixed: int
    token: int
    context: int


@dataclass(frozen=True, kw_only=True)
class Formula:
    """Bytes of a loaded model as a function of context, batch and cache mode.

    weights: in device layout. page_tokens: tokens of a cache page. page_bytes: cache mode -> bytes of a page, all layers. chunk: tokens
    that a step takes at most. stages: parts of a step, which run one after another: the largest counts. graph_fixed, graph_row: what decode
    steps keep: fixed, and per sequence, rounded up as in `PLAN_TERMS`. logits_row: logits of one sequence. longest: tokens of context that
    the model allows. segments: 1 where the device gives memory in segments, else 0. adapters: of the LoRA adapters that are loaded.

    Example:
        >>> some = Formula(weights=100, page_tokens=256, page_bytes={"fp16": 10}, chunk=512, stages=(Stage(5, 2, 1),), logits_row=1)
        >>> some.parts(context=300, batch=2, mode="fp16")
        {'weights': 100, 'cache': 40, 'work': 1329, 'graphs': 0, 'logits': 2, 'rounding': 0, 'adapters': 0}
    """

    weights: int
    page_tokens: int
    page_bytes: Mapping[str, int]
    chunk: int
    stages: tuple[Stage, ...] = ()
    graph_fixed: int = 0
    graph_row: int = 0
    logits_row: int = 0
    longest: int = 1 << 24
    segments: int = 0
    adapters: int = 0

    def parts(self, *, context: int, batch: int, mode: str) -> dict[str, int]:
        """Name -> bytes."""
        found = evaluate(PLAN_TERMS, {**vars(self), "context": context, "batch": batch, "mode": mode})
        return {name: found[name] for name in PLAN_PARTS}

    def total(self, *, context: int, batch: int, mode: str) -> int:
        """All parts together."""
        return sum(self.parts(context=context, batch=batch, mode=mode).values())

    def with_draft(self, draft: Formula) -> Formula:
        """With a draft model beside it: a cache of as many tokens; on a GPU captured rounds, too, each with logits of its own."""
        pages = {mode: size + draft.page_bytes[mode] for mode, size in self.page_bytes.items() if mode in draft.page_bytes}
        made = replace(self, weights=self.weights + draft.weights, page_bytes=pages, stages=(*self.stages, *draft.stages))
        if not self.segments:
            return made
        fixed = self.graph_fixed + draft.graph_fixed - CODE_BYTES + DRAFT_GRAPHS * SEGMENT_BYTES
        return replace(made, graph_fixed=fixed, graph_row=self.graph_row + draft.graph_row + MAX_CAPTURED_ROUNDS * draft.logits_row)

    def fitting_context(self, free: int, *, batch: int, mode: str) -> int:
        """The most tokens of context, whole pages, at which everything fits `free` bytes; 0 where not even one page does."""
        low, high = 0, -(-self.longest // self.page_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.total(context=middle * self.page_tokens, batch=batch, mode=mode) <= free
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * self.page_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        flat = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**flat, "page_bytes": dict(self.page_bytes), "stages": [list(stage) for stage in self.stages]}

    @classmethod
    def from_dict(cls, data: Any) -> Formula:
        """Back from `to_dict`.

        Raises:
            OptionError: a coefficient is missing, unknown or not a whole number of bytes.
        """
        names = [f.name for f in fields(cls)]
        if isinstance(data, Mapping):
            data = {"adapters": 0, **data}  # older ones do not have it
        if not isinstance(data, Mapping) or sorted(data) != sorted(names):
            got = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise OptionError(f"plan: the formula is {str(got)[:200]}; expected {', '.join(names)}")
        pages, stages = data["page_bytes"], data["stages"]
        good = isinstance(pages, Mapping) and bool(pages) and all(isinstance(mode, str) for mode in pages) and _are_tuples(stages, 3)
        numbers = [data[name] for name in names if name not in ("page_bytes", "stages")]
        if good:
            numbers += [*pages.values(), *(n for row in stages for n in row)]
        if not good or not all(_is_size(n) for n in numbers):
            raise OptionError("plan: the formula holds what is no number of bytes; expected whole numbers from 0, as to_dict gives them")
        if not data["page_tokens"] or not data["chunk"] or not data["longest"]:
            raise OptionError("plan: page_tokens, chunk and longest of the formula must be at least 1")
        return cls(**{**data, "page_bytes": dict(pages), "stages": tuple(Stage(*row) for row in stages)})


def _are_tuples(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(row, (list, tuple)) and len(row) == length for row in value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53  # exact in the browser too


def formula_of(
    config: ModelConfig,
    found: Inspection,
    device: str,
    modes: tuple[str, ...] = (),
    *,
    multiprocessors: int = DEFAULT_MULTIPROCESSORS,
    groups: bool = True,
) -> Formula:
    """The plan of a model on a device.

    Args:
        config: of the model. found: its headers. device: "cpu" or "cuda". modes: cache modes to know besides those with a name.
        multiprocessors: of the GPU. groups: torch's attention reads grouped heads there as they are.
    """
    pages = {mode: size for mode in (*CACHE_MODES, *modes) if (size := _page_bytes(config, mode)) is not None}
    common = {
        "page_tokens": PAGE_SIZE,
        "page_bytes": pages,
        "chunk": PREFILL_CHUNK_TOKENS[device],
        "longest": config.max_position_embeddings,
    }
    logits = 4 * config.vocab_size
    if device == "cpu":
        return Formula(weights=_cpu_weights(found), stages=(_cpu_stage(config),), logits_row=logits, **common)
    return Formula(
        weights=kept_bytes(config, found),
        segments=1,
        stages=(*_gpu_stages(config, groups), Stage(_prompt_bytes(config, multiprocessors), 0, 0)),
        graph_fixed=CODE_BYTES + GRAPH_BYTES + DRAFT_ROWS * _graph_row(config, multiprocessors) // 2,
        graph_row=_graph_row(config, multiprocessors),
        logits_row=logits,
        **common,
    )


def _page_bytes(config: ModelConfig, mode: str) -> int | None:
    """None where heads of this size cannot be kept so."""
    try:
        return CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 1, mode).page_bytes
    except OptionError:
        return None


def _inner(config: ModelConfig) -> int:
    """Outputs of the MLPs that a token visits at once."""
    if config.moe is None:
        return config.intermediate_size
    return max(config.intermediate_size, config.moe.intermediate_size * config.moe.top_k)


# ---- the CPU


def _cpu_weights(found: Inspection) -> int:
    """As in the files; a tied head is stored once more, in the layout of the kernels."""
    tied = found.embedding is not None and found.head is None
    return found.total_bytes + (found.embedding.nbytes if tied and found.embedding is not None else 0)


def _cpu_stage(config: ModelConfig) -> Stage:
    """A step in f32: residual and its norm, q, k, v and what attention gives, both halves of the MLP; and the rotation tables."""
    per_token = 2 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * _inner(config)
    return Stage(0, 4 * per_token, 0)


# ---- the GPU: model.gpu_memory says what the weights take; what ops.gpu_prefill holds at once, what generator.gpu_executor captures


def _gpu_stages(config: ModelConfig, groups: bool) -> tuple[Stage, ...]:
    """Residual f32, inputs fp16, room for the largest unpacked matrix; attention reads back what earlier chunks cached, in runs."""
    hidden, inner, q, kv = config.hidden_size, _inner(config), config.q_size, config.kv_size
    up, tables = inner * (2 if config.gated else 1), 4 * config.head_dim
    spread = 4 * q if config.q_per_kv > 1 and not groups else 0
    one = config.intermediate_size if config.moe is None else max(config.moe.intermediate_size, config.moe.shared_size or 0)
    fixed = PRODUCTS_BYTES + 2 * hidden * max(q + 2 * kv, one * (2 if config.gated else 1))
    holes = 2 * (q + 2 * kv) + 2 * q  # that torch's allocator leaves between them: about q, k, v and what attention read, gone by then
    return (
        Stage(fixed, 6 * hidden + 6 * (q + 2 * kv), tables),
        Stage(fixed, 4 * hidden + 2 * (q + 2 * kv) + 2 * q * (PREFILL_KEY_RUNS + 1), tables + 4 * kv + spread),
        Stage(fixed, 8 * hidden + 2 * inner, tables),
        Stage(fixed, 4 * hidden + 2 * up + max(2 * inner, 2 * hidden) + holes, tables),
    )


def _graph_row(config: ModelConfig, multiprocessors: int) -> int:
    """Workspace and logits of one sequence in the captured decode steps: of its batch size, of half of it, of half of that, and so on."""
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    up = _inner(config) * (2 if config.gated else 1)
    experts = 0 if config.moe is None else config.moe.num_experts + (config.moe.shared_size > 0)
    sums = partial_sums_bytes(torch.empty(0), 64, multiprocessors, hidden, experts) // 64
    return 2 * (sums + 8 * hidden + 2 * 2 * hidden + 4 * (q + 2 * kv) + 2 * 2 * _inner(config) + 4 * up + 4 * config.vocab_size)


def _prompt_bytes(config: ModelConfig, multiprocessors: int) -> int:
    """Workspace of the steps of short prompts, which mixtures do not have; attention's part as in csrc/cuda/attention/split_kv.cuh."""
    if config.moe is not None:
        return 0
    heads = config.num_kv_heads
    chunks = 64 if 64 * heads <= 264 else 6 if 6 * heads >= 264 else 264 // heads
    row = _graph_row(config, multiprocessors) // 2 - 4 * config.vocab_size + 4 * config.hidden_size
    return MAX_PROMPT_STEP_TOKENS * (row + config.num_heads * chunks * (4 * config.head_dim + 8))


# ---- The plan


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a loaded model will take.

    name: of the model. device: "cpu" or "cuda". context: tokens of one sequence. batch: sequences. cache_mode: format of K and V. weights:
    in the layout of the kernels; a tied head is stored once more. tower: of them the vision tower's, 0 where the model sees nothing;
    picture_tokens: of the context that a picture of 1024 x 1024 pixels takes. cache: pages for `batch` sequences of full length. work:
    activations of the largest step. graphs: what captured decode steps and CUDA's own code keep, on a GPU. logits: one row per sequence.
    rounding: what the allocator of a GPU takes beyond the tensors. adapters: LoRA adapters in fp16. free: memory free now, None where it is
    not known. token_bytes: of the cache, per token. formula: gives these numbers for any other choice, see `at`.
    """

    name: str
    device: str
    context: int
    batch: int
    cache_mode: str
    weights: int
    cache: int
    work: int
    logits: int
    token_bytes: int
    formula: Formula = field(repr=False)
    graphs: int = 0
    rounding: int = 0
    adapters: int = 0
    free: int | None = None
    tower: int = 0
    picture_tokens: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        return {name: getattr(self, name) for name in PLAN_PARTS}

    def at(self, *, context: int | None = None, batch: int | None = None, cache: str | None = None, free: int | None = None) -> MemoryPlan:
        """The same model with other choices; None keeps a value.

        Raises:
            OptionError: a number out of range, or a cache mode that this model cannot have.

        Example:
            >>> import exl2nb as ex
            >>> from pathlib import Path
            >>> planned = ex.plan(Path(ex.__file__).parent / "demo_model", cache="fp16")
            >>> planned.at(cache="q4").cache < planned.cache / 3
            True
        """
        made = MemoryPlan.of(
            self.formula,
            name=self.name,
            device=self.device,
            context=self.context if context is None else context,
            batch=self.batch if batch is None else batch,
            cache=self.cache_mode if cache is None else cache,
            free=self.free if free is None else free,
        )
        return replace(made, tower=self.tower, picture_tokens=self.picture_tokens)

    def unbounded(self) -> MemoryPlan:
        """A copy with free memory not known."""
        return replace(self, free=None)

    @classmethod
    def of(cls, formula: Formula, *, name: str, device: str, context: int, batch: int, cache: str, free: int | None = None) -> MemoryPlan:
        """What a formula gives for one choice.

        Raises:
            OptionError: a number out of range, or a cache mode that the formula does not know.
        """
        for what, value in {"context": context, "batch": batch, **({} if free is None else {"free": free})}.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INPUT_LIMITS[what]:
                raise OptionError(f"plan: {what} is {value!r}; expected a whole number from 1 to {INPUT_LIMITS[what]}")
        mode = parse_mode(cache, where="plan")
        if mode not in formula.page_bytes:
            raise OptionError(f"plan: cache mode {mode!r} is not for this model; expected one of {', '.join(formula.page_bytes)}")
        return cls(
            name=name,
            device=device,
            context=context,
            batch=batch,
            cache_mode=mode,
            token_bytes=formula.page_bytes[mode] // formula.page_tokens,
            formula=formula,
            free=free,
            **formula.parts(context=context, batch=batch, mode=mode),
        )

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether it fits the free memory; None if that is not known."""
        return None if self.free is None else self.total <= self.free

    @property
    def longest(self) -> int | None:
        """Tokens of context that fit at this batch and the model allows; whole pages; None where free memory is not known."""
        if self.free is None:
            return None
        return self.formula.fitting_context(self.free, batch=self.batch, mode=self.cache_mode)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ["name", "device", "context", "batch", "cache_mode", "parts", "total", "token_bytes", "free", "fits", "longest"]
        return {**{name: getattr(self, name) for name in names}, "formula": self.formula.to_dict()}

    def verdict(self) -> str:
        """One line: does it fit, and what to do if not."""
        if self.free is None:
            return f"{size_text(self.total)} in all; free memory is not known"
        sizes, most = f"{size_text(self.total)} in all, {size_text(self.free)} free", self.formula.longest
        if self.fits and self.context > most:
            return f"{sizes}: there is memory, but the model itself reads {most} tokens at most; take context={most}"
        if self.fits:
            return f"{sizes}: fits, with memory for {self.longest} tokens of context"
        over = size_text(self.total - self.free)
        advice = f"try context={self.longest}" if self.longest else "use fewer bits per weight"
        smaller = "" if self.cache_mode == "q4" else " or cache='q4'"
        return f"{sizes}: {over} too much; {advice}{smaller}"

    def __str__(self) -> str:
        most = max(1, self.total, self.free or 0)
        lines = [f"{_plain(self.name)} on {self.device}, {self.batch} x {self.context} tokens, {self.cache_mode} cache"]
        for name, size in self.parts.items():
            if not size:
                continue  # no graphs on a CPU
            lines.append(f"{name:<8} {size_text(size):>10}  {'#' * round(40 * size / most)}".rstrip())
        if self.tower:
            lines.append(self._tower_text())
        return "\n".join([*lines, self.verdict()])

    def _tower_text(self) -> str:
        return f"{size_text(self.tower)} of the weights are the vision tower's; 1024 x 1024 pixels take {self.picture_tokens} tokens"

    def _repr_html_(self) -> str:
        most = max(1, self.total, self.free or 0)
        bars = "".join(
            f'<div title="{name}: {size_text(size)}" style="width:{100 * size / most:.2f}%;background:{PART_COLOURS[name]}"></div>'
            for name, size in self.parts.items()
            if size
        )
        names = " ".join(
            f'<span style="white-space:nowrap"><span style="color:{PART_COLOURS[name]}">&#9632;</span> {name} {size_text(size)}</span>'
            for name, size in self.parts.items()
            if size
        )
        first = html.escape(str(self).split("\n", 1)[0])
        seeing = f"<div>{self._tower_text()}</div>" if self.tower else ""
        return (
            f'<div style="font:13px/1.5 system-ui,sans-serif;max-width:46rem"><b>{first}</b>'
            f'<div style="display:flex;height:18px;border:1px solid rgba(128,128,128,.6)">{bars}</div>'
            f"<div>{names}</div>{seeing}<div>{html.escape(self.verdict())}</div></div>"
        )


def multiprocessors() -> int:
    """Of the GPU here, or of the one that is assumed."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else DEFAULT_MULTIPROCESSORS


def reads_groups() -> bool:
    """Whether torch's attention on the GPU here, or on the one that is assumed, reads grouped heads as they are."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def has_strips() -> bool:
    """Whether the GPU here, or the one that is assumed, keeps a second copy of adapters: from Hopper on."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


def free_bytes(device: str = "cpu") -> int | None:
    """Memory free now: of the machine or the container it is in, or of a GPU ("cuda", "cuda:1"); None where it cannot be asked.

    Raises:
        DeviceError: "cuda" without a GPU.
    """
    if device != "cpu":
        if not torch.cuda.is_available():
            raise DeviceError(
                "plan: device is 'cuda', but torch sees no GPU; use device='cpu', or free= with the bytes of the card in mind"
            )
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    known = [value for value in (_available(), _container()) if value is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _container() -> int | None:
    """Free memory of the control group, as on Binder."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        return None if limit == "max" else max(0, int(limit) - int((folder / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None


def _plain(name: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:80])
