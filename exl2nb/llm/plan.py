"""What a model takes before it is loaded, on one device or on several, and which layers go where; from headers alone.

Devices run in the order in which they are named, the processor first: so the embedding, of which a step reads a few rows, stays in host
memory, and the head, which is read whole, is on a GPU.
"""

from __future__ import annotations

import html
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch

from exl2nb.cache.modes import parse_mode
from exl2nb.cache.spec import PAGE_SIZE, CacheSpec
from exl2nb.converter.sizes import parse_bytes
from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.core.show import size_text
from exl2nb.io.hub import display_name
from exl2nb.io.metadata import metadata_folder
from exl2nb.llm.keywords import PARALLEL
from exl2nb.llm.memory import CONTEXT, LIMITS, MemoryPlan, formula_of, free_bytes, multiprocessors
from exl2nb.model.config import ModelConfig
from exl2nb.model.gpu_memory import kept_by_layer
from exl2nb.model.inspect import Inspection, inspect
from exl2nb.model.loader import read_model_config
from exl2nb.model.lora import adapter_bytes
from exl2nb.model.split import STREAM_ROWS, Span
from exl2nb.model.vision.encoder import plan_encoder
from exl2nb.ops.memory import read_memory
from exl2nb.sampling.params import check_integer

RESERVE = 512 * 2**20  # bytes of a GPU that "auto" leaves to others
PROBE_BYTES = 256 * 2**20  # read to learn what the processor reads in a second
DeviceChoice = str | Sequence[str] | Mapping[str, str | int]


class Budget(NamedTuple):
    """What a device may hold: bytes of everything, a number of layers, or a share of what the model takes; none of them: the rest."""

    device: str
    bytes: int | None = None
    layers: int | None = None
    share: float | None = None


def read_devices(devices: DeviceChoice, *, where: str = "load") -> list[Budget]:
    """What was asked for, in running order.

    Args:
        devices: "auto", one name, names, or names with what each may hold: bytes, "20GiB", "12 layers" or "rest".

    Raises:
        OptionError: none of these. DeviceError: a GPU that is not there (asked when a list says no sizes).
    """
    if isinstance(devices, str):
        devices = _every_device() if devices == "auto" else [devices]
    if isinstance(devices, Mapping):
        budgets = [_budget(name, size, where) for name, size in devices.items()]
    elif isinstance(devices, Sequence):
        names = [_name(name, where) for name in devices]
        free = [free_bytes(name) or 1 for name in names]
        budgets = [Budget(name, share=size / sum(free)) for name, size in zip(names, free)]
    else:
        raise OptionError(f"{where}: devices is {shown(devices)}; expected 'auto', names, or {{'cuda:0': '20GiB', 'cpu': 'rest'}}")
    rest = [budget.device for budget in budgets if budget[1:] == (None, None, None)]
    if not budgets or len(rest) > 1:
        raise OptionError(f"{where}: devices has {len(rest)} that take the rest; expected one at most, and a device at least")
    return sorted(budgets, key=lambda budget: budget.device != "cpu")


def gpu_layers(count: int, *, where: str = "load") -> DeviceChoice:
    """So many layers on the GPU, the rest on the CPU, as `devices`."""
    check_integer(f"{where}: gpu_layers", count, 0, 1024)
    return {"cuda": f"{count} layers", "cpu": "rest"} if count else ["cpu"]


def _every_device() -> Mapping[str, str | int]:
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {**{gpu: max(0, (free_bytes(gpu) or 0) - RESERVE) for gpu in gpus}, "cpu": "rest"}


def _name(name: object, where: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise OptionError(f"{where}: a device is {shown(name)}; expected cpu, cuda or cuda:<number>")
    return name


def _budget(name: object, size: object, where: str) -> Budget:
    device = _name(name, where)
    if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= LIMITS["free"]:
        return Budget(device, size)
    if isinstance(size, str):
        if size == "rest":
            return Budget(device)
        layers = re.fullmatch(r"([0-9]{1,4}) layers?", size.strip())
        return Budget(device, layers=int(layers[1])) if layers else Budget(device, parse_bytes(size, where=f"{where}: {device}"))
    raise OptionError(f"{where}: {device} is to hold {shown(size)}; expected bytes, '20GiB', '12 layers' or 'rest'")


# ---- what each device holds


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one device holds of a model, in bytes.

    device: its name. first, last: layers [first, last). weights: with the embedding or the head where they are there. cache: of these
    layers. work: activations, and on a GPU what CUDA and captured steps keep. read: weights that a step of one sequence reads. free: memory
    free now, None where it is not known. speed: bytes a second that it reads, None where it is not known.
    """

    device: str
    first: int
    last: int
    weights: int
    cache: int
    work: int
    read: int
    free: int | None
    speed: float | None

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.cache + self.work


class Sizes(NamedTuple):
    """Bytes on one kind of device: of the embedding, each layer, and head; of a layer's cache; of what a step needs besides."""

    parts: list[int]
    layer_cache: int
    work: int

    def of(self, first: int, last: int) -> tuple[int, int, int]:
        """Weights, cache and work of layers [first, last) with what goes with them; nothing where there are none."""
        if last <= first:
            return 0, 0, 0
        start, end = (0 if first == 0 else first + 1), (len(self.parts) if last == len(self.parts) - 2 else last + 1)
        return sum(self.parts[start:end]), self.layer_cache * (last - first), self.work


def sizes_of(config: ModelConfig, found: Inspection, kind: str, *, context: int, batch: int, mode: str) -> Sizes:
    """The sizes on "cpu" or "cuda" for `batch` sequences of `context` tokens in the cache."""
    formula = formula_of(config, found, kind, modes=(mode,))
    parts = formula.parts(context=context, batch=batch, mode=mode)
    spec = CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, max(1, batch * -(-context // PAGE_SIZE)), mode)
    work = sum(parts[name] for name in ("work", "graphs", "logits", "rounding")) + 4 * STREAM_ROWS[kind] * config.hidden_size
    if kind == "cuda":
        weights = kept_by_layer(config, found)
    else:
        weights = [0] * (config.num_layers + 2)
        for matrix in found.matrices:
            if matrix.layer is not None:
                weights[matrix.layer + 1] += matrix.nbytes
        weights[0] = 0 if found.embedding is None else found.embedding.nbytes
        head = found.head or found.embedding
        weights[-1] = 0 if head is None else head.nbytes
    return Sizes(weights, spec.total_bytes // config.num_layers, work)


def place_layers(budgets: Sequence[Budget], sizes: Mapping[str, Sizes], layers: int, *, where: str = "load") -> list[Span]:
    """Spans without gaps that keep to the budgets.

    Args:
        budgets: in running order. sizes: of each kind of device, "cpu" and "cuda". layers: of the model.

    Raises:
        OptionError: it does not fit; says what is missing.
    """
    if any(budget.share is not None for budget in budgets):
        return _by_shares(budgets, sizes, layers)
    rest = next((i for i, budget in enumerate(budgets) if budget[1:] == (None, None, None)), len(budgets))
    first, last, held = 0, layers, [(0, 0)] * len(budgets)
    for i, budget in enumerate(budgets[:rest]):
        end = first
        while end < last and _holds(budget, sizes, first, end + 1):
            end += 1
        held[i], first = (first, end), end
    for i in range(len(budgets) - 1, rest, -1):
        start = last
        while start > first and _holds(budgets[i], sizes, start - 1, last):
            start -= 1
        held[i], last = (start, last), start
    if rest < len(budgets):
        held[rest] = first, last
    elif first < last:
        missing = sum(sizes[_kind(budgets[-1].device)].of(first, last))
        raise OptionError(
            f"{where}: layers {first} to {last - 1} find no room in devices: {size_text(missing)} are missing; raise a budget, give one "
            "device 'rest', or take a smaller context= or cache='q4'"
        )
    return [Span(budget.device, a, b) for budget, (a, b) in zip(budgets, held) if b > a]


def _holds(budget: Budget, sizes: Mapping[str, Sizes], first: int, last: int) -> bool:
    if budget.layers is not None:
        return last - first <= budget.layers
    return sum(sizes[_kind(budget.device)].of(first, last)) <= (budget.bytes or 0)


def _by_shares(budgets: Sequence[Budget], sizes: Mapping[str, Sizes], layers: int) -> list[Span]:
    """Every device its share of weights and cache, a layer at least while there are as many."""
    weight = [a + b for a, b in zip(sizes[_kind(budgets[0].device)].parts[1:-1], [sizes[_kind(budgets[0].device)].layer_cache] * layers)]
    spans, first, passed, wanted = [], 0, 0, 0.0
    for i, budget in enumerate(budgets):
        wanted += (budget.share or 0.0) * sum(weight)
        last = first
        while last < layers and (last == first or passed + weight[last] / 2 <= wanted) and layers - last > len(budgets) - 1 - i:
            passed += weight[last]
            last += 1
        if i == len(budgets) - 1:
            last = layers
        if last > first:
            spans.append(Span(budget.device, first, last))
        first = last
    return spans


def _kind(device: str) -> str:
    return device.partition(":")[0]


# ---- the plan


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Bytes that a model takes on each of several devices; see `MemoryPlan` for one.

    name: of the model. context, batch, cache_mode: as there. shares: in running order. parallel: "layers" or "tensor", as in `load`; with
    "tensor" each device has a part of every layer.
    """

    name: str
    context: int
    batch: int
    cache_mode: str
    shares: tuple[Share, ...]
    parallel: str = "layers"

    @property
    def total(self) -> int:
        """All devices together."""
        return sum(share.total for share in self.shares)

    @property
    def fits(self) -> bool | None:
        """Whether every device has room; None if that is not known of one."""
        known = [share.total <= share.free for share in self.shares if share.free is not None]
        return False if not all(known) else True if len(known) == len(self.shares) else None

    @property
    def tokens_per_second(self) -> float | None:
        """What one sequence decodes at most: devices with whole layers read them one after the other, those with parts of all at the same
        time; None: a speed is not known.
        """
        times = [share.read / share.speed for share in self.shares if share.speed]
        spent = sum(times) if self.parallel == "layers" else max(times, default=0.0)
        return 1 / spent if len(times) == len(self.shares) and spent else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        shares = [{**vars(share), "total": share.total} for share in self.shares]
        names = ["name", "context", "batch", "cache_mode", "parallel", "total", "fits", "tokens_per_second"]
        return {**{name: getattr(self, name) for name in names}, "devices": shares}

    def verdict(self) -> str:
        """One line: does it fit, and how fast can it be."""
        over = [
            f"{share.device} by {size_text(share.total - share.free)}" for share in self.shares if share.free and share.total > share.free
        ]
        fits = f"too much for {', '.join(over)}" if over else "fits" if self.fits else "free memory is not known of every device"
        speed = self.tokens_per_second
        return f"{size_text(self.total)} in all: {fits}" + (f"; at most {speed:.3g} tokens/s, by bytes read" if speed else "")

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.batch} x {self.context} tokens, {self.cache_mode} cache"]
        most = max([1, *(max(share.total, share.free or 0) for share in self.shares)])
        for share in self.shares:
            free = "" if share.free is None else f" of {size_text(share.free)} free"
            bar = "#" * round(40 * share.total / most)
            lines.append(f"{share.device:<8} {self._held(share):<17} {size_text(share.total):>10}{free}  {bar}".rstrip())
        return "\n".join([*lines, self.verdict()])

    def _held(self, share: Share) -> str:
        return f"layers {share.first:>3} to {share.last - 1:<3}" if self.parallel == "layers" else f"1/{len(self.shares)} of each layer"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(share.device)}</td><td>{self._held(share).removeprefix('layers ')}</td>"
            f"<td>{size_text(share.weights)}</td><td>{size_text(share.cache)}</td><td>{size_text(share.work)}</td><td><b>{size_text(share.total)}</b></td>"
            f"<td>{'not known' if share.free is None else size_text(share.free)}</td></tr>"
            for share in self.shares
        )
        head = "".join(f"<th>{name}</th>" for name in ("device", "layers", "weights", "cache", "work", "in all", "free"))
        caption = html.escape(str(self).split("\n", 1)[0])
        return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table><div>{html.escape(self.verdict())}</div>"


def plan_split(
    path: str | os.PathLike[str],
    *,
    devices: DeviceChoice,
    context: int | None = None,
    cache: str = "fp16",
    batch: int = 1,
    revision: str | None = None,
    where: str = "plan",
) -> SplitPlan:
    """Which layers `load(devices=...)` puts where, without loading anything.

    Args:
        devices: as in `load`. The others as in `plan`.

    Raises:
        OptionError: a value out of range, or a model that does not fit. Otherwise as `plan`.
    """
    mode = parse_mode(cache, where=where)
    for what, value in (("context", 1 if context is None else context), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LIMITS[what]:
            raise OptionError(f"{where}: {what} is {value!r}; expected a whole number from 1 to {LIMITS[what]}")
    budgets = read_devices(devices, where=where)
    with metadata_folder(path, revision) as folder:
        config, found = read_model_config(folder), inspect(folder)
        name = display_name(folder) if Path(path).expanduser().exists() else f"{path}@{revision}" if revision else str(path)
    tokens = min(config.max_position_embeddings, CONTEXT) if context is None else context
    kinds = {_kind(budget.device) for budget in budgets}
    sizes = {kind: sizes_of(config, found, kind, context=tokens, batch=batch, mode=mode) for kind in kinds}
    shares = [
        _share(span, sizes[_kind(span.device)], config.num_layers) for span in place_layers(budgets, sizes, config.num_layers, where=where)
    ]
    return SplitPlan(name=name, context=tokens, batch=batch, cache_mode=mode, shares=tuple(shares))


def plan_ranks(
    path: str | os.PathLike[str],
    *,
    devices: DeviceChoice,
    context: int | None = None,
    cache: str = "fp16",
    batch: int = 1,
    revision: str | None = None,
    where: str = "plan",
) -> SplitPlan:
    """What `load(devices=..., parallel="tensor")` puts on each device, without loading anything; arguments and errors as `plan_split`."""
    from exl2nb.model.parallel import buffer_bytes, check_parallel  # with torch.distributed

    names = [_name(name, where) for name in devices] if isinstance(devices, Sequence) and not isinstance(devices, str) else []
    if len(names) < 2 or len({_kind(name) for name in names}) > 1:
        raise OptionError(f"{where}: parallel='tensor' with devices={shown(devices)}; expected at least two GPUs, or 'cpu' for each rank")
    size, kind = len(names), _kind(names[0])
    whole = plan_split(path, devices={names[0]: "rest"}, context=context, cache=cache, batch=batch, revision=revision, where=where)
    with metadata_folder(path, revision) as folder:
        config, found = read_model_config(folder), inspect(folder)
    check_parallel(config, {matrix.format for matrix in found.matrices}, size, where=where)
    kept = sizes_of(config, found, kind, context=whole.context, batch=batch, mode=whole.cache_mode).parts
    kept_whole = kept[0]  # every rank has the embedding, and of each layer the output matrix of attention
    for layer in range(config.num_layers):
        mine = [matrix for matrix in found.matrices if matrix.layer == layer]
        undivided = sum(matrix.nbytes for matrix in mine if matrix.key == config.names.at(layer, "o"))
        kept_whole += kept[layer + 1] * undivided // max(1, sum(matrix.nbytes for matrix in mine))
    [share] = whole.shares
    weights = kept_whole + -(-(share.weights - kept_whole) // size)
    buffers = buffer_bytes(config, size) if kind == "cuda" else 0
    shares = [
        replace(
            share,
            device=name,
            weights=weights,
            cache=share.cache // size,
            work=share.work + buffers,
            read=weights - kept[0],
            free=None if kind != "cpu" and not torch.cuda.is_available() else free_bytes(name),
            speed=_read_speed(name) if kind != "cpu" else _shared_speed(size),
        )
        for name in names
    ]
    return replace(whole, shares=tuple(shares), parallel="tensor")


def _shared_speed(size: int) -> float | None:
    """Of one of several ranks on the processor, which read its memory together."""
    speed = _read_speed("cpu")
    return speed and speed / size


def _share(span: Span, sizes: Sizes, layers: int) -> Share:
    weights, cache, work = sizes.of(span.first, span.last)
    free = None if span.device != "cpu" and not torch.cuda.is_available() else free_bytes(span.device)
    return Share(
        device=span.device,
        first=span.first,
        last=span.last,
        weights=weights,
        cache=cache,
        work=work,
        read=weights - (sizes.parts[0] if span.first == 0 else 0),
        free=free,
        speed=_read_speed(span.device),
    )


_speeds: dict[str, float | None] = {}


def _read_speed(device: str) -> float | None:
    """Bytes a second: of the processor as measured once, of a GPU from its clock and bus; None where that is not known."""
    if device not in _speeds:
        _speeds[device] = _host_speed() if device == "cpu" else _gpu_speed(device)
    return _speeds[device]


def _host_speed() -> float:
    data = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    read_memory(data)
    start = time.perf_counter()
    read_memory(data)
    return PROBE_BYTES / (time.perf_counter() - start)


def _gpu_speed(device: str) -> float | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)  # kHz, bits
    return 2 * clock * 1000 * width / 8 if clock and width else None


# ---- one device, or several


@overload
def plan(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    cache: str = "fp16",
    batch: int = 1,
    device: str = "cpu",
    devices: None = None,
    parallel: str = "layers",
    free: int | None = None,
    revision: str | None = None,
    loras: Sequence[str | os.PathLike[str]] = (),
) -> MemoryPlan: ...


@overload
def plan(
    path: str | os.PathLike[str],
    *,
    devices: DeviceChoice,
    parallel: str = "layers",
    context: int | None = None,
    cache: str = "fp16",
    batch: int = 1,
    revision: str | None = None,
    loras: Sequence[str | os.PathLike[str]] = (),
) -> SplitPlan: ...


def plan(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    cache: str = "fp16",
    batch: int = 1,
    device: str = "cpu",
    devices: DeviceChoice | None = None,
    parallel: str = "layers",
    free: int | None = None,
    revision: str | None = None,
    loras: Sequence[str | os.PathLike[str]] = (),
) -> MemoryPlan | SplitPlan:
    """Compute what a model will take, without loading it.

    Args:
        path: model directory or hub id, of which headers are read and nothing is downloaded. revision: branch, tag or commit on the hub.
        context: tokens of prompt and answer; None = what the model allows, at most 4096.
        cache: mode of the KV cache, as in `load`.
        batch: sequences of full length in the cache (`load(cache_tokens=batch * context)`).
        device: "cpu" or "cuda": whose free memory it is compared with. "cuda" where there is no GPU assumes an H100 and needs `free`.
        devices: several devices, as in `load`: the plan then says which layers lie where, as a `SplitPlan`. parallel: as in `load`.
        free: bytes to compare with; None queries the device.
        loras: adapters to be loaded, directories or hub ids; their headers are read. On one device.

    Raises:
        OptionError: a number out of range, an unknown mode or device. ModelNotFound, ConfigError, FormatError: the model cannot be read.
        DeviceError: device "cuda" without one.

    Example:
        >>> import exl2nb as ex
        >>> from pathlib import Path
        >>> ex.plan(Path(ex.__file__).parent / "demo_model", batch=4, free=10**9).fits
        True
    """
    if devices is not None:
        if loras:
            raise OptionError("plan: loras with devices; adapters need a model on one device: leave one of them out")
        if parallel not in PARALLEL:
            raise OptionError(f"plan: parallel is {shown(parallel)}; expected one of {', '.join(PARALLEL)}")
        of = plan_ranks if parallel == "tensor" else plan_split
        return of(path, devices=devices, context=context, cache=cache, batch=batch, revision=revision)
    if parallel != "layers":
        raise OptionError(f"plan: parallel={shown(parallel)} without devices; name them, as in devices=['cuda:0', 'cuda:1']")
    if device not in ("cpu", "cuda"):
        raise OptionError(f"plan: device is {device!r}; expected 'cpu' or 'cuda'")
    mode = parse_mode(cache, where="plan")
    with metadata_folder(path, revision) as folder:  # of a hub id the headers alone
        config, found = read_model_config(folder), inspect(folder)
        adapters = 0
        for one in loras:
            with metadata_folder(one, adapter=True) as place:
                adapters += adapter_bytes(place, config)
        tower = plan_encoder(folder, config, device=device)
        name = display_name(folder) if Path(path).expanduser().exists() else f"{path}@{revision}" if revision else str(path)
    formula = formula_of(config, found, device, modes=(mode,), multiprocessors=multiprocessors())
    made = MemoryPlan.of(
        replace(formula, weights=formula.weights + tower.nbytes, adapters=adapters),
        name=name,
        device=device,
        context=context if context is not None else min(config.max_position_embeddings, CONTEXT),
        batch=batch,
        cache=mode,
        free=free if free is not None else free_bytes(device),
    )
    return replace(made, tower=tower.nbytes, picture_tokens=tower.tokens)
