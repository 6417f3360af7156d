"""MemoryPlan: what a model takes, as a stacked bar against free memory, or on several devices with borders that can be moved; the page
answers its controls itself.
"""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.core.show import size_text
from exl2nb.llm.memory import INPUT_LIMITS, PART_COLOURS, PART_LABELS, Formula
from exl2nb.llm.memory import MemoryPlan as Planned
from exl2nb.llm.plan import DeviceChoice
from exl2nb.llm.plan import plan as plan_of
from exl2nb.llm.split_plan import DEVICE_COLOURS, Share, SplitFormula, SplitPlan, check_limit, check_speed
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.protocol import PlanState

SHOWN_MODES = ("fp16", "q8", "q6", "q4", "fp8", "fp32")


class MemoryPlan(ExlWidget):
    """A stacked bar of weights, cache, activations, graphs and logits against the memory that is free.

    Context, number of sequences, cache mode and free memory can be changed in the page, which answers without the kernel; from Python the
    same are traits, and `plan` is the `exl2nb.MemoryPlan` of what is shown.

    With several devices: the layers of each, with a border between two devices that is dragged or moved with the arrow keys; the memory of
    each against what it may hold, the most tokens a second, and the line of Python that loads the model so. `plan` is then what
    `exl2nb.plan(devices=...)` gives.

    Args:
        source: a model directory or hub id (headers are read, weights are not), a loaded model, the result of `exl2nb.plan`, or plain data
            as its `to_dict()` gives it.
        device: "cpu" or "cuda", for a directory or hub id. Default: the loaded model's, else "cpu".
        devices: several, in place of `device`, as in `exl2nb.load`; a GPU that is not here needs a size, as in
            {"cuda:0": "24GiB", "cpu": "rest"}.

    Traits, also keywords (synced with the page both ways):
        context: tokens of one sequence. batch: sequences. cache_mode: format of K and V. Default: those of `source`.
        free: bytes free, None where it is not known. Default: what the device says. With one device.
        borders: layers where each device but the last ends. limits: bytes that each may hold. speeds: bytes a second that each reads. In
            running order: the CPU, then the GPUs. None in limits and speeds: not known. Default: what `source` says.

    Example:
        >>> import exl2nb as ex
        >>> from pathlib import Path
        >>> MemoryPlan(Path(ex.__file__).parent / "demo_model", context=1024, free=10**9).plan.fits
        True
    """

    _bundle, _state_type = "plan", PlanState

    name = t.Unicode("").tag(sync=True)
    device = t.Enum(("cpu", "cuda"), "cpu").tag(sync=True)
    context = t.Int(1).tag(sync=True, option=True)
    batch = t.Int(1).tag(sync=True, option=True)
    cache_mode = t.Unicode("fp16").tag(sync=True, option=True)
    free = t.Int(None, allow_none=True).tag(sync=True, option=True)
    borders = t.List(t.Int()).tag(sync=True, option=True)
    limits = t.List(t.Int(allow_none=True)).tag(sync=True, option=True)
    speeds = t.List(t.Float(allow_none=True)).tag(sync=True, option=True)
    _split = t.Any(None).tag(sync=True)  # a Dict would turn None into {}
    _formula = t.Dict().tag(sync=True)
    _modes = t.List().tag(sync=True)

    def __init__(self, source: Any, *, device: str | None = None, devices: DeviceChoice | None = None, **kwargs: Any) -> None:
        planned = _planned(source, device, devices)
        self._base = planned
        known = {"context": planned.context, "batch": planned.batch, "cache_mode": planned.cache_mode}
        if isinstance(planned, Planned):
            formula = planned.formula
            known["free"] = planned.free
        else:
            split = planned.movable()
            formula = split.formula
            known["borders"] = [*planned.borders]
            known |= {"limits": [one.limit for one in split.devices], "speeds": [one.speed for one in split.devices]}
        modes = formula.page_bytes
        super().__init__(**{**known, **kwargs})
        with self.hold_sync():
            self.name, self._formula = planned.name, formula.to_dict()
            self._modes = [m for m in SHOWN_MODES if m in modes] + [m for m in modes if m not in SHOWN_MODES]
            if isinstance(planned, SplitPlan):
                split = planned.movable()
                self._split = wire(split, planned.load_source)
            else:
                self.device = planned.device

    @t.validate("context", "batch", "free")
    def _in_range(self, proposal: Mapping[str, Any]) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if value is not None and not 1 <= value <= INPUT_LIMITS[name]:
            raise OptionError(f"MemoryPlan: {name} is {value}; expected a whole number from 1 to {INPUT_LIMITS[name]}")
        return value

    @t.validate("cache_mode")
    def _known_mode(self, proposal: Mapping[str, Any]) -> str:
        return self._base.at(cache=proposal["value"]).cache_mode

    @t.validate("borders", "limits", "speeds")
    def _of_devices(self, proposal: Mapping[str, Any]) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if not isinstance(self._base, SplitPlan):
            if value:
                raise OptionError(f"MemoryPlan: {name} with one device; expected devices=, such as {{'cuda:0': '24GiB', 'cpu': 'rest'}}")
            return value
        split = self._base.movable()
        if name == "borders":
            return [*split.check(value)]
        check = check_limit if name == "limits" else check_speed
        if len(value) != len(split.devices) or not all(one is None or check(one) for one in value):
            raise OptionError(
                f"MemoryPlan: {name} is {shown(value)}; expected a number above 0 or None for each of {len(split.devices)} devices"
            )
        return value

    @property
    def plan(self) -> Planned | SplitPlan:
        """What is shown, as `exl2nb.plan` gives it."""
        sizes = {"context": self.context, "batch": self.batch, "cache": self.cache_mode}
        if isinstance(self._base, SplitPlan):
            names = [one.name for one in self._base.movable().devices]
            told = {"limits": dict(zip(names, self.limits)), "speeds": dict(zip(names, self.speeds))}
            return self._base.at(borders=self.borders, **told, **sizes)
        found = self._base.at(free=self.free, **sizes)
        return found if self.free is not None else found.unbounded()

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes; of several devices each one's."""
        plan = self.plan
        return {share.device: share.total for share in plan.shares} if isinstance(plan, SplitPlan) else plan.parts

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.plan.total

    def _summary(self) -> str:
        plan = self.plan
        held = [f"{share.device}: layers {share.first} to {share.last - 1}" for share in plan.shares] if isinstance(plan, SplitPlan) else []
        return f"MemoryPlan({'; '.join([*held, plan.verdict()])})"

    def _caption(self) -> str:
        return ""

    def _static_body(self) -> str:
        plan = self.plan
        if isinstance(plan, SplitPlan):
            line = f"<div><code>{html.escape(plan.load_line)}</code></div>"
            return f"{_layer_bar(plan)}{plan._repr_html_()}{line}"  # pyright: ignore[reportPrivateUsage]
        rows = "".join(
            f'<tr><td><span style="color:{PART_COLOURS[name]}">&#9632;</span> {PART_LABELS[name]}</td>'
            f'<td style="text-align:right;padding-left:2em">{size_text(size)}</td></tr>'
            for name, size in plan.parts.items()
            if size
        )
        first = html.escape(str(plan).split("\n", 1)[0])
        return f"<div><b>{first}</b></div>{_bar(plan)}<div>{html.escape(plan.verdict())}</div><table style='font-size:12px'>{rows}</table>"


def wire(split: SplitFormula, source: str = "") -> dict[str, Any]:
    """A formula as the page takes it, a `protocol.PlanSplit`. source: the model's place, as arguments in Python."""
    return {
        "devices": [{"name": one.name, "kind": one.kind} for one in split.devices],
        "kinds": {kind: {**one.known, "formula": one.formula.to_dict()} for kind, one in split.kinds.items()},
        "lends": split.lends,
        "source": source,
    }


def _coloured(plan: SplitPlan) -> list[tuple[Share, str]]:
    """Shares with the colours of their devices."""
    names = [one.name for one in plan.movable().devices]
    return [(share, DEVICE_COLOURS[names.index(share.device) % len(DEVICE_COLOURS)]) for share in plan.shares]


def _layer_bar(plan: SplitPlan) -> str:
    pieces = "".join(
        f'<div style="flex:{share.last - share.first};background:{colour};color:#fff;overflow:hidden;padding-left:4px;font-size:11px">'
        f"{html.escape(share.device)}</div>"
        for share, colour in _coloured(plan)
    )
    return f'<div style="display:flex;height:18px;border:1px solid rgba(128,128,128,.6);margin:4px 0">{pieces}</div>'


def _bar(plan: Planned) -> str:
    most = max(1, plan.total, plan.free or 0)
    pieces = "".join(
        f'<div title="{PART_LABELS[name]}: {size_text(size)}" style="width:{100 * size / most:.2f}%;background:{PART_COLOURS[name]}"></div>'
        for name, size in plan.parts.items()
        if size
    )
    return f'<div style="display:flex;height:18px;border:1px solid rgba(128,128,128,.6);margin:4px 0">{pieces}</div>'


def _planned(source: Any, device: str | None, devices: DeviceChoice | None) -> Planned | SplitPlan:
    if isinstance(source, (str, os.PathLike)):
        if devices is not None:
            if device is not None:
                raise OptionError("MemoryPlan: device and devices say the same thing; expected one of them")
            return plan_of(source, devices=devices)
        return plan_of(source, device=device or "cpu")
    if devices is not None:
        raise OptionError("MemoryPlan: devices needs a model directory or hub id; of a loaded model or a plan they are known")
    if isinstance(source, (Planned, SplitPlan)):
        return source
    if isinstance(source, Mapping):
        return SplitPlan.from_dict(source) if "devices" in source else _from_data(source)
    path, engine = getattr(source, "path", None), getattr(source, "engine", None)
    if path is None or engine is None:
        raise OptionError(
            f"MemoryPlan: got {type(source).__name__!r}; expected a model directory or hub id, a loaded model, the result of exl2nb.plan, "
            "or what its to_dict gives"
        )
    context, spec = source.context, engine.spec
    sizes = {"context": context, "cache": spec.mode, "batch": max(1, spec.num_tokens // context)}
    counts = Counter[str]()
    for span in source.model.spans:
        counts["cpu" if span.lent else span.device] += span.last - span.first
    if len(counts) > 1:
        return plan_of(path, devices={device: f"{count} layers" for device, count in counts.items()}, **sizes)
    return plan_of(path, device=source.model.device.partition(":")[0], **sizes)


def _from_data(data: Mapping[str, Any]) -> Planned:
    """A plan from `to_dict`, maybe out of a file."""
    missing = [key for key in ("name", "device", "context", "batch", "cache_mode", "formula") if key not in data]
    if missing:
        raise OptionError(f"MemoryPlan: the data has no {', '.join(missing)}; expected what exl2nb.plan(...).to_dict() gives")
    name, device = data["name"], data["device"]
    if not isinstance(name, str) or device not in ("cpu", "cuda"):
        raise OptionError(f"MemoryPlan: name is {str(name)[:80]!r} and device {str(device)[:20]!r}; expected a text, and 'cpu' or 'cuda'")
    return Planned.of(
        Formula.from_dict(data["formula"]),
        name=name,
        device=device,
        context=data["context"],
        batch=data["batch"],
        cache=data["cache_mode"],
        free=data.get("free"),
    )
