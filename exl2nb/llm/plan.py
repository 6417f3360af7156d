"""What a model takes before it is loaded, on one device or on several, and which layers go where; from headers alone.

Devices run in the order in which they are named, the processor first: so the embedding, of which a step reads a few rows, stays in host
memory, and the head, which is read whole, is on a GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, overload

import torch

from exl2nb.cache.spec import parse_mode
from exl2nb.converter.sizes import parse_bytes
from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.core.show import size_text
from exl2nb.io.hub import display_name
from exl2nb.io.metadata import metadata_folder
from exl2nb.llm.load_keywords import PARALLEL_MODES
from exl2nb.llm.memory import (
    DEFAULT_CONTEXT_TOKENS,
    INPUT_LIMITS,
    MemoryPlan,
    Stage,
    formula_of,
    free_bytes,
    has_strips,
    multiprocessors,
    reads_groups,
)
from exl2nb.llm.split_plan import Holder, KindFormula, Share, Sizes, SplitFormula, SplitPlan
from exl2nb.model.config import ModelConfig
from exl2nb.model.gpu_memory import kept_by_layer
from exl2nb.model.inspection import Inspection, StoredMatrix, inspect
from exl2nb.model.layout import ATTENTION_ROLES, layer_linears
from exl2nb.model.loader import read_model_config
from exl2nb.model.lora import adapter_bytes
from exl2nb.model.split import STREAM_ROWS, LayerRange
from exl2nb.model.streaming import LAYER_BUFFERS, fits_experts
from exl2nb.model.vision.encoder import plan_encoder
from exl2nb.ops.host_prefill import UNPACK_CHUNK_WEIGHTS
from exl2nb.ops.memory_ops import read_memory
from exl2nb.sampling.params import check_integer

GPU_RESERVE_BYTES = 512 * 2**20  # bytes of a GPU that "auto" leaves to others
PART_BYTES = 2**20  # of a captured step of a few kernels, an estimate: what the driver keeps, and rounding of its workspace
UNPACK_BYTES = 8  # for each weight that is unpacked at a time
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


def experts_on_cpu(devices: DeviceChoice, *, where: str = "load") -> tuple[DeviceChoice, bool]:
    """What is left of `devices` without "cpu": "experts", and whether that was in it.

    Raises:
        OptionError: experts on a GPU, or no GPU for the rest.
    """
    if not isinstance(devices, Mapping) or "experts" not in devices.values():
        return devices, False
    rest = {name: size for name, size in devices.items() if size != "experts"}
    if devices.get("cpu") != "experts" or "experts" in rest.values() or not rest:
        raise OptionError(
            f"{where}: devices is {shown(devices)}; 'experts' is for the CPU, with GPUs for the rest: {{'cuda': 'rest', 'cpu': 'experts'}}"
        )
    return rest, True


def gpu_layers(count: int, *, where: str = "load") -> DeviceChoice:
    """So many layers on the GPU, the rest on the CPU, as `devices`."""
    check_integer(f"{where}: gpu_layers", count, 0, 1024)
    return {"cuda": f"{count} layers", "cpu": "rest"} if count else ["cpu"]


def _every_device() -> Mapping[str, str | int]:
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {**{gpu: max(0, (free_bytes(gpu) or 0) - GPU_RESERVE_BYTES) for gpu in gpus}, "cpu": "rest"}


def _name(name: object, where: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise OptionError(f"{where}: a device is {shown(name)}; expected cpu, cuda or cuda:<number>")
    return name


def _budget(name: object, size: object, where: str) -> Budget:
    device = _name(name, where)
    if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= INPUT_LIMITS["free"]:
        return Budget(device, size)
    if isinstance(size, str):
        if size == "rest":
            return Budget(device)
        layers = re.fullmatch(r"([0-9]{1,4}) layers?", size.strip())
        return Budget(device, layers=int(layers[1])) if layers else Budget(device, parse_bytes(size, where=f"{where}: {device}"))
    raise OptionError(f"{where}: {device} is to hold {shown(size)}; expected bytes, '20GiB', '12 layers' or 'rest'")


# ---- what each device holds


def kind_formula(
    config: ModelConfig, found: Inspection, kind: str, modes: tuple[str, ...] = (), *, experts: bool = True, streaming: bool = False
) -> KindFormula:
    """What the model takes on "cpu" or "cuda".

    modes: cache modes to know besides those with a name. experts: False leaves those out. streaming: prompts through layers on the CPU are
    computed there.
    """
    apart = {matrix.key for matrix in _experts(config, found)} if not experts else set[str]()
    if kind == "cuda":
        weights = kept_by_layer(config, found, experts=experts)
    else:
        weights = [0] * (config.num_layers + 2)
        for matrix in found.matrices:
            if matrix.layer is not None and matrix.key not in apart:
                weights[matrix.layer + 1] += matrix.nbytes
        weights[0] = 0 if found.embedding is None else found.embedding.nbytes
        head = found.head or found.embedding
        weights[-1] = 0 if head is None else head.nbytes
    formula = formula_of(config, found, kind, modes=modes, groups=reads_groups())
    if kind == "cuda" and not experts:  # a part for each sparse layer, with a captured step and its workspace; the last has the logits
        parts, logits = 1 + sum(config.experts(layer) is not None for layer in range(config.num_layers)), 2 * 4 * config.vocab_size
        fixed, row = formula.graph_fixed + (parts - 1) * PART_BYTES, parts * (formula.graph_row - logits) + logits
        formula = replace(formula, graph_fixed=fixed, graph_row=row)
    if streaming:
        formula = replace(formula, stages=tuple(_streaming_too(stage, config, found, not experts) for stage in formula.stages))
    return KindFormula(
        parts=tuple(weights),
        read=(0, *(round(size * share) for size, share in zip(weights[1:-1], _visited(config, found, experts))), weights[-1]),
        stream=4 * STREAM_ROWS[kind] * config.hidden_size,
        lent=PART_BYTES if streaming else 0,
        formula=formula,
    )


def _streaming_too(stage: Stage, config: ModelConfig, found: Inspection, apart: bool) -> Stage:
    """With what `model.streaming` holds on a GPU: copies of two layers and of their cache, a matrix in fp16 and what unpacks it.

    apart: of their experts alone.
    """
    layers, inner = [0] * config.num_layers, config.intermediate_size
    for matrix in _experts(config, found) if apart else found.matrices:
        if matrix.layer is not None:
            layers[matrix.layer] += matrix.nbytes
    if apart and not fits_experts(max(layers)):
        return stage
    if config.moe is not None:
        inner = max(0 if apart else inner, config.moe.intermediate_size, config.moe.shared_size or 0)
    widest = config.hidden_size * max(0 if apart else config.q_size + 2 * config.kv_size, inner * (2 if config.gated else 1))
    fixed = LAYER_BUFFERS * max(layers) + 2 * widest + UNPACK_BYTES * min(UNPACK_CHUNK_WEIGHTS, widest)
    return Stage(stage.fixed + fixed, stage.token, stage.context + (0 if apart else LAYER_BUFFERS * 4 * config.kv_size))


def _visited(config: ModelConfig, found: Inspection, experts: bool) -> list[float]:
    """Of each layer's bytes the share that a token reads; less than 1 where it has experts."""
    held, idle = [0] * config.num_layers, [0.0] * config.num_layers
    for matrix in found.matrices:
        if matrix.layer is not None:
            held[matrix.layer] += matrix.nbytes
    for matrix in _experts(config, found) if experts else ():
        idle[matrix.layer or 0] += _idle(config, matrix)
    return [1 - gone / max(1, size) for gone, size in zip(idle, held)]


def _experts(config: ModelConfig, found: Inspection) -> list[StoredMatrix]:
    """The matrices of sparse layers' MLPs, those of the shared expert included."""
    sparse = [layer for layer in range(config.num_layers) if config.experts(layer) is not None]
    keys = {one.key for layer in sparse for role, one in layer_linears(config, layer).items() if role not in ATTENTION_ROLES}
    return [matrix for matrix in found.matrices if matrix.layer is not None and matrix.key in keys]


def _idle(config: ModelConfig, matrix: StoredMatrix) -> float:
    """Bytes of an expert's matrix that a token does not read, on average."""
    assert config.moe is not None
    assert matrix.layer is not None
    shared = matrix.key in {config.names.at(matrix.layer, f"shared_{role}") for role in ("gate", "up", "down")}
    return 0.0 if shared else matrix.nbytes * (1 - config.moe.top_k / config.moe.num_experts)


def place_layers(
    budgets: Sequence[Budget], sizes: Mapping[str, Sizes], layers: int, *, lends: bool = False, where: str = "load"
) -> list[LayerRange]:
    """Spans without gaps that keep to the budgets.

    Args:
        budgets: in running order. sizes: of each kind of device, "cpu" and "cuda". layers: of the model. lends: as `SplitFormula` has it.

    Raises:
        OptionError: it does not fit; says what is missing.
    """
    if any(budget.share is not None for budget in budgets):
        return _by_shares(budgets, sizes, layers)
    rest = next((i for i, budget in enumerate(budgets) if budget[1:] == (None, None, None)), len(budgets))
    lends = lends and budgets[0].device == "cpu"
    first, last, held = 0, layers, [(0, 0)] * len(budgets)
    for i, budget in enumerate(budgets[:rest]):
        end = first
        while end < last and _holds(budget, sizes, first, end + 1):
            end += 1
        held[i], first = (first, end), end
    for i in range(len(budgets) - 1, rest, -1):
        start = last
        while start > first and _holds(budgets[i], sizes, start - 1, last, start - 1 if lends and i == 1 else 0):
            start -= 1
        held[i], last = (start, last), start
    if rest < len(budgets):
        held[rest] = first, last
    elif first < last:
        missing = sizes[_kind(budgets[-1].device)].total(first, last)
        raise OptionError(
            f"{where}: layers {first} to {last - 1} find no room in devices: {size_text(missing)} are missing; raise a budget, give one "
            "device 'rest', or take a smaller context= or cache='q4'"
        )
    return [LayerRange(budget.device, a, b) for budget, (a, b) in zip(budgets, held) if b > a]


def _holds(budget: Budget, sizes: Mapping[str, Sizes], first: int, last: int, host: int = 0) -> bool:
    """host: so many layers of the CPU lend to it."""
    if budget.layers is not None:
        return last - first <= budget.layers
    return sizes[_kind(budget.device)].total(first, last, host=host) <= (budget.bytes or 0)


def _by_shares(budgets: Sequence[Budget], sizes: Mapping[str, Sizes], layers: int) -> list[LayerRange]:
    """Every device its share of weights and cache, a layer at least while there are as many."""
    here = sizes[_kind(budgets[0].device)]
    weight = [part + here.of(0, 1)["cache"] for part in here.known["parts"][1:-1]]
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
            spans.append(LayerRange(budget.device, first, last))
        first = last
    return spans


def _kind(device: str) -> str:
    return device.partition(":")[0]


# ---- the plan


def plan_split(
    path: str | os.PathLike[str],
    *,
    devices: DeviceChoice,
    context: int | None = None,
    cache: str = "fp16",
    batch: int = 1,
    revision: str | None = None,
    streaming: bool = True,
    where: str = "plan",
) -> SplitPlan:
    """Which layers `load(devices=...)` puts where, without loading anything.

    Args:
        devices: as in `load`. The others as in `plan`. streaming: GPUs have room for prompts through layers on the CPU.

    Raises:
        OptionError: a value out of range, or a model that does not fit. Otherwise as `plan`.
    """
    mode = parse_mode(cache, where=where)
    for what, value in (("context", 1 if context is None else context), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INPUT_LIMITS[what]:
            raise OptionError(f"{where}: {what} is {value!r}; expected a whole number from 1 to {INPUT_LIMITS[what]}")
    devices, apart = experts_on_cpu(devices, where=where)
    budgets = read_devices(devices, where=where)
    with metadata_folder(path, revision) as folder:
        config, found = read_model_config(folder), inspect(folder)
        name = display_name(folder) if Path(path).expanduser().exists() else f"{path}@{revision}" if revision else str(path)
    if apart and config.moe is None:
        raise OptionError(f"{where}: devices puts experts on the CPU, and {name} has none: it is dense; give cpu 'rest' or '12 layers'")
    tokens = min(config.max_position_embeddings, DEFAULT_CONTEXT_TOKENS) if context is None else context
    choice = {"context": tokens, "batch": batch, "mode": mode}
    free = {budget.device: free_bytes_on(budget.device) for budget in budgets}
    holders = [Holder(one.device, free[one.device] if one.bytes is None else one.bytes, _read_speed(one.device)) for one in budgets]
    streaming = streaming and (apart or len({holder.kind for holder in holders}) > 1)
    kinds = {
        holder.kind: kind_formula(
            config, found, holder.kind, modes=(mode,), experts=not apart, streaming=streaming and holder.kind == "cuda"
        )
        for holder in holders
    }
    formula = SplitFormula(devices=tuple(holders), kinds=kinds, lends=streaming and not apart)
    sizes = {kind: one.at(**choice) for kind, one in kinds.items()}
    ends, spans = [], place_layers(budgets, sizes, config.num_layers, lends=formula.lends, where=where)
    for budget in budgets:
        ends.append(spans.pop(0).last if spans and spans[0].device == budget.device else ends[-1] if ends else 0)
    shares = [replace(share, free=free[share.device]) for share in formula.shares(ends[:-1], **choice)]
    if apart:
        shares.append(_experts_share(config, found, **choice))
    about = {"name": name, "path": str(path), "revision": revision, "formula": None if apart else formula}
    return SplitPlan(context=tokens, batch=batch, cache_mode=mode, shares=tuple(shares), **about)


def _experts_share(config: ModelConfig, found: Inspection, *, context: int, batch: int, mode: str) -> Share:
    """All experts on the CPU."""
    matrices = _experts(config, found)
    weights = sum(matrix.nbytes for matrix in matrices)
    work = formula_of(config, found, "cpu", modes=(mode,)).parts(context=context, batch=batch, mode=mode)["work"]
    read = weights - round(sum(_idle(config, matrix) for matrix in matrices))
    sizes = {"weights": weights, "cache": 0, "work": work, "read": read}
    return Share(device="cpu", first=0, last=config.num_layers, free=free_bytes_on("cpu"), speed=_read_speed("cpu"), experts=True, **sizes)


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
    assert whole.formula is not None
    kept = whole.formula.kinds[kind].parts
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
            free=free_bytes_on(name),
            speed=_read_speed(name) if kind != "cpu" else _shared_speed(size),
        )
        for name in names
    ]
    return replace(whole, shares=tuple(shares), parallel="tensor", formula=None)


def _shared_speed(size: int) -> float | None:
    """Of one of several ranks on the processor, which read its memory together."""
    speed = _read_speed("cpu")
    return speed and speed / size


def free_bytes_on(device: str) -> int | None:
    """Return the free memory of a device, None for a GPU that this machine does not have."""
    return free_bytes(device) if device == "cpu" or is_present(device) else None


def is_present(gpu: str) -> bool:
    """Return whether this machine has the GPU."""
    return torch.cuda.is_available() and int(gpu.partition(":")[2] or 0) < torch.cuda.device_count()


_speeds: dict[str, float | None] = {}


def _read_speed(device: str) -> float | None:
    """Bytes a second: of the processor as measured once, of a GPU from its clock and bus; None where that is not known."""
    if device not in _speeds:
        _speeds[device] = _host_speed() if device == "cpu" else gpu_read_speed(device)
    return _speeds[device]


def _host_speed() -> float:
    data = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    read_memory(data)
    start = time.perf_counter()
    read_memory(data)
    return PROBE_BYTES / (time.perf_counter() - start)


def gpu_read_speed(device: str) -> float | None:
    """Return the bytes per second that a GPU reads, from its clock and bus width; None where they are not known."""
    if not is_present(device):
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
    draft: str | os.PathLike[str] | None = None,
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
    draft: str | os.PathLike[str] | None = None,
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
    draft: str | os.PathLike[str] | None = None,
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
        draft: a draft model, as in `load`: its directory or hub id. On one device, too.

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
        if draft is not None:
            raise OptionError("plan: draft with devices; plan the draft model by itself, on the last of them")
        if parallel not in PARALLEL_MODES:
            raise OptionError(f"plan: parallel is {shown(parallel)}; expected one of {', '.join(PARALLEL_MODES)}")
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
                adapters += adapter_bytes(place, config, strips=device == "cuda" and has_strips())
        tower = plan_encoder(folder, config, device=device)
        name = display_name(folder) if Path(path).expanduser().exists() else f"{path}@{revision}" if revision else str(path)
    options = {"modes": (mode,), "multiprocessors": multiprocessors(), "groups": reads_groups()}
    formula = formula_of(config, found, device, **options)
    if draft is not None:
        if draft == "self":
            raise OptionError("plan: draft is 'self', a copy that loading makes; plan with the directory of that copy")
        with metadata_folder(draft) as folder:
            formula = formula.with_draft(formula_of(read_model_config(folder), inspect(folder), device, **options))
            name = f"{name} with {display_name(folder) if Path(draft).expanduser().exists() else draft}"
    made = MemoryPlan.of(
        replace(formula, weights=formula.weights + tower.nbytes, adapters=adapters),
        name=name,
        device=device,
        context=context if context is not None else min(config.max_position_embeddings, DEFAULT_CONTEXT_TOKENS),
        batch=batch,
        cache=mode,
        free=free if free is not None else free_bytes(device),
    )
    return replace(made, tower=tower.nbytes, picture_tokens=tower.tokens)
