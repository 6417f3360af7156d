"""MemoryPlan: what a model takes, as a stacked bar against free memory; the page answers its controls itself."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.llm.memory import COLOURS, LABELS, LIMITS, Formula, size_text
from exl2nb.llm.memory import MemoryPlan as Planned
from exl2nb.llm.plan import plan as plan_of
from exl2nb.widgets import static
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.protocol import PlanState

SHOWN_MODES = ("fp16", "q8", "q6", "q4", "fp8", "fp32")
BAR_PX = 480


class MemoryPlan(ExlWidget):
    """A stacked bar of weights, cache, activations, graphs and logits against the memory that is free.

    Context, number of sequences, cache mode and free memory can be changed in the page, which answers without the kernel; from Python the
    same are traits, and `plan` is the `exl2nb.MemoryPlan` of what is shown.

    Args:
        source: a model directory or hub id (headers are read, weights are not), a loaded model, the result of `exl2nb.plan`, or plain data
            as its `to_dict()` gives it.
        device: "cpu" or "cuda", for a directory or hub id. Default: the loaded model's, else "cpu".

    Traits, also keywords (synced with the page both ways):
        context: tokens of one sequence. batch: sequences. cache_mode: format of K and V. Default: those of `source`.
        free: bytes free, None where it is not known. Default: what the device says.

    Example:
        >>> import exl2nb as ex
        >>> from pathlib import Path
        >>> MemoryPlan(Path(ex.__file__).parent / "demo_model", context=1024, free=10**9).plan.fits
        True
    """

    _esm = static.STATIC / "plan.js"
    _css = static.STATIC / "plan.css"
    _state_keys: ClassVar[tuple[str, ...]] = tuple(PlanState.__annotations__)
    _picture_key = "From the left: weights, cache, activations, graphs, logits; a black line: the memory that is free."

    name = t.Unicode("").tag(sync=True)
    device = t.Enum(("cpu", "cuda"), "cpu").tag(sync=True)
    context = t.Int(1).tag(sync=True, option=True)
    batch = t.Int(1).tag(sync=True, option=True)
    cache_mode = t.Unicode("fp16").tag(sync=True, option=True)
    free = t.Int(None, allow_none=True).tag(sync=True, option=True)
    _formula = t.Dict().tag(sync=True)
    _modes = t.List().tag(sync=True)

    def __init__(self, source: Any, *, device: str | None = None, **kwargs: Any) -> None:
        planned = _planned(source, device)
        modes = planned.formula.page_bytes
        self._base = planned
        known = {"context": planned.context, "batch": planned.batch, "cache_mode": planned.cache_mode, "free": planned.free}
        super().__init__(**{**known, **kwargs})
        with self.hold_sync():
            self.name, self.device = planned.name, planned.device
            self._formula = planned.formula.to_dict()
            self._modes = [m for m in SHOWN_MODES if m in modes] + [m for m in modes if m not in SHOWN_MODES]

    @t.validate("context", "batch", "free")
    def _in_range(self, proposal: Mapping[str, Any]) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if value is not None and not 1 <= value <= LIMITS[name]:
            raise OptionError(f"MemoryPlan: {name} is {value}; expected a whole number from 1 to {LIMITS[name]}")
        return value

    @t.validate("cache_mode")
    def _known_mode(self, proposal: Mapping[str, Any]) -> str:
        return self._base.at(cache=proposal["value"]).cache_mode

    @property
    def plan(self) -> Planned:
        """What is shown, as `exl2nb.plan` gives it."""
        found = self._base.at(context=self.context, batch=self.batch, cache=self.cache_mode, free=self.free)
        return found if self.free is not None else found.unbounded()

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        return self.plan.parts

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.plan.total

    def _summary(self) -> str:
        return f"MemoryPlan({self.plan.verdict()})"

    def _caption(self) -> str:
        return ""

    def _static_body(self) -> str:
        plan = self.plan
        rows = "".join(
            f'<tr><td><span style="color:{COLOURS[name]}">&#9632;</span> {LABELS[name]}</td>'
            f'<td style="text-align:right;padding-left:2em">{size_text(size)}</td></tr>'
            for name, size in plan.parts.items()
            if size
        )
        first = html.escape(str(plan).split("\n", 1)[0])
        return f"<div><b>{first}</b></div>{_bar(plan)}<div>{html.escape(plan.verdict())}</div><table style='font-size:12px'>{rows}</table>"

    def _picture(self) -> static.Pixels | None:
        plan = self.plan
        most = max(1, plan.total, plan.free or 0)
        line: list[static.RGB] = []
        for name, size in plan.parts.items():
            red, green, blue = bytes.fromhex(COLOURS[name][1:])
            line += [(red, green, blue)] * round(BAR_PX * size / most)
        line = (line + [(236, 236, 236)] * BAR_PX)[:BAR_PX]
        if plan.free is not None and plan.free < most:
            at = round(BAR_PX * plan.free / most)
            line[at : at + 2] = [(0, 0, 0)] * len(line[at : at + 2])
        return [line] * 16


def _bar(plan: Planned) -> str:
    most = max(1, plan.total, plan.free or 0)
    pieces = "".join(
        f'<div title="{LABELS[name]}: {size_text(size)}" style="width:{100 * size / most:.2f}%;background:{COLOURS[name]}"></div>'
        for name, size in plan.parts.items()
        if size
    )
    return f'<div style="display:flex;height:18px;border:1px solid rgba(128,128,128,.6);margin:4px 0">{pieces}</div>'


def _planned(source: Any, device: str | None) -> Planned:
    if isinstance(source, Planned):
        return source
    if isinstance(source, Mapping):
        return _from_data(source)
    if isinstance(source, (str, os.PathLike)):
        return plan_of(source, device=device or "cpu")
    path, engine = getattr(source, "path", None), getattr(source, "engine", None)
    if path is None or engine is None:
        raise OptionError(
            f"MemoryPlan: got {type(source).__name__!r}; expected a model directory or hub id, a loaded model, the result of exl2nb.plan, "
            "or what its to_dict gives"
        )
    context, spec = source.context, engine.spec
    return plan_of(path, device=source.model.device, context=context, cache=spec.mode, batch=max(1, spec.num_tokens // context))


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
