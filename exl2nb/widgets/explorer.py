"""BitrateExplorer: choose a bitrate, see which matrices lose bits and what it costs; convert, and read it beside the original."""

from __future__ import annotations

import html
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.cache.spec import parse_mode
from exl2nb.converter.convert_keywords import EFFORT_OPTIONS
from exl2nb.core.errors import ConversionError, Interrupted, OptionError
from exl2nb.core.progress import Progress
from exl2nb.core.show import size_text
from exl2nb.sampling.params import check_integer
from exl2nb.widgets import bitgrid
from exl2nb.widgets.background import Background, BackgroundWidget
from exl2nb.widgets.base import as_text
from exl2nb.widgets.bitgrid import BitGrid, grid_of
from exl2nb.widgets.protocol import CurvePoint, ExplorerState, Mark, Status

if TYPE_CHECKING:
    import pandas as pd

    from exl2nb.converter.allocation import Allocation
    from exl2nb.converter.measurement import Measurement

QUICK_OPTIONS = {"rows": 16, "length": 256, "report_rows": 8}
"""Calibration of a first look: a quarter of the tokens of the converter's default, which a model to keep deserves."""
ROUNDING_NOISE = 3.4
"""Growth of the KL by in_features / calibration tokens: rounding fits the Hessian of the tokens that it saw. Demo model at 3 and 4 bits,
2026-11-25: 1,024 tokens made 2.0 times the predicted KL, 4,096 tokens 1.14 times (3 bits), 16,384 tokens 0.90 and 0.97 times."""
UPDATE_S = 1 / 12


@dataclass(frozen=True)
class FinishedCopy:
    """A finished copy. measured_kl: on held-out rows, nats per token; None where none were kept."""

    label: str
    llm: Any
    measured_kl: float | None


class Maker:
    """Makes copies of one model, each bitrate once, in a temporary folder that goes with it."""

    def __init__(self, llm: Any, measurement: Measurement, *, demo: bool, options: Mapping[str, Any] | None) -> None:
        self._original, self._measurement, self._demo = llm, measurement, demo
        self._options = dict(QUICK_OPTIONS if options is None else options)
        self._ours: list[Any] = []
        self._made: dict[float, FinishedCopy] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def tokens(self) -> int:
        """Calibration tokens of a conversion."""
        effort = EFFORT_OPTIONS.get(self._options.get("effort", "quick"), EFFORT_OPTIONS["quick"])
        return (self._options.get("rows") or effort.rows) * (self._options.get("length") or effort.length)

    @property
    def factor(self) -> float:
        """KL of a copy over the predicted one, which holds for the calibration tokens of the measurement."""
        linears = self._measurement.linears.values()
        sizes = [(linear.in_features, linear.in_features * linear.out_features) for linear in linears]
        width = sum(rows * weights for rows, weights in sizes) / max(1, sum(weights for _, weights in sizes))
        known = self._measurement.calibration
        measured = int(known.get("rows") or 32) * int(known.get("length") or 512)
        return (1 + ROUNDING_NOISE * width / self.tokens) / (1 + ROUNDING_NOISE * width / measured)

    @property
    def possible(self) -> bool:
        """Whether there is an original to convert."""
        return self._demo or self._original is not None

    def make(self, bpw: float, stop: threading.Event, tell: Callable[[str, float], None]) -> FinishedCopy:
        """Convert and load.

        Raises:
            Interrupted: `stop` was set.
        """
        if bpw in self._made:
            return self._made[bpw]
        import exl2nb

        sink = _Sink(stop, tell)
        if self._original is None:
            self._original = exl2nb.demo(progress=sink)
            self._ours.append(self._original)
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="exl2nb-explorer-")
        target = Path(self._folder.name) / f"{bpw:g}bpw-{time.monotonic_ns()}"
        done = exl2nb.convert(self._original.path, target, bpw=bpw, measurement=self._measurement, progress=sink, **self._options)
        llm = exl2nb.load(target, context=min(self._original.context, 2048), progress=None)
        self._ours.append(llm)
        self._made[bpw] = FinishedCopy(f"{bpw:g} bpw, made here", llm, None if done.quality is None else done.quality.kl)
        return self._made[bpw]

    def read(self, made: FinishedCopy, prompt: str, max_tokens: int, stop: threading.Event, show: Callable[[str, str], None]) -> None:
        """Stream the most likely continuation from both; `show(original, copy)` some times a second and at the end."""
        texts, problems = ["", ""], []

        def run(place: int, llm: Any) -> None:
            try:
                stream = llm.stream(prompt, max_tokens=max_tokens, temperature=0)
                try:
                    for chunk in stream:
                        texts[place] += str(getattr(chunk, "text", chunk))
                        if stop.is_set():
                            break
                finally:
                    getattr(stream, "close", lambda: None)()
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate((self._original, made.llm))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(UPDATE_S / 2)
            threads[1].join(UPDATE_S / 2)
            show(*texts)
        show(*texts)
        if problems and not stop.is_set():
            raise problems[0]

    def close(self) -> None:
        """Free what was loaded and made here."""
        for llm in self._ours:
            llm.close()
        if any(llm is self._original for llm in self._ours):
            self._original = None
        self._ours, self._made = [], {}
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Sink:
    """Progress events as (stage, share), rate-limited; raises Interrupted after `stop`."""

    def __init__(self, stop: threading.Event, tell: Callable[[str, float], None]) -> None:
        self._stop, self._tell, self._last, self._stage = stop, tell, 0.0, ""

    def __call__(self, event: Progress, /) -> None:
        now = time.monotonic()
        if event.stage != self._stage or now - self._last >= UPDATE_S:
            self._tell(event.stage, event.fraction)
            self._last, self._stage = now, event.stage
        if self._stop.is_set() and event.state == "running":
            raise Interrupted("BitrateExplorer: stopped")


BITRATE_STEP = 0.05
CURVE_POINTS = 25
CURVE_POINTS_LARGE = 9
EXPORT_POINTS = 60  # stops of the slider without a kernel: a few kB
LARGE_MODEL_MATRICES = 200  # matrices
HEAD_BITS = 6  # as in `Measurement.solve(bpw=...)`, so that sizes and the slider give the same models


class BitrateExplorer(BackgroundWidget):
    """A slider of bits per weight over a measurement: every move solves the allocation again, in milliseconds.

    The map shows where the bits are, the curve what they cost: predicted KL (nats per token) against the bitrate, with what was measured as
    marks. "Convert" converts to the chosen bitrate in the background and streams one prompt from the original and from the copy. The
    prediction holds for the calibration tokens of the measurement; a conversion with fewer loses more, which `expected_kl` says.

    Args:
        measurement: of `ex.measure`, or its JSON file; None: the packaged demo model's.
        llm: the original, as loaded; needed to make a model of a measurement of your own. None: the demo model, loaded when it is needed.
        measured: bitrates whose KL is known, as conversions or (bpw, kl) pairs.
        convert: options of `ex.convert` for "Convert". Default: 16 rows of 256 calibration tokens, which is quick.

    Traits, also keywords (synced with the page both ways):
        bpw: asked for, 2 to 8. Default 4. prompt: what both models continue. metric: "bpw" or "share". selected: [layer, matrix] or [].
        max_tokens: of each answer, 1 to 512. Default 64.
    Traits to read:
        solved: the bitrate shown. nbytes, predicted_kl, solve_ms: of its allocation. original, made: the two texts. made_bpw: of the copy.

    Example:
        >>> explorer = BitrateExplorer(bpw=4.0)
        >>> explorer.plan.nbytes < 8_000_000
        True
    """

    _bundle, _state_type = "explorer", ExplorerState

    bpw = t.Float(4.0).tag(sync=True, option=True)
    prompt = t.Unicode("It was a dark night, and the old man").tag(sync=True, option=True)
    metric = t.Enum(("bpw", "share"), "bpw").tag(sync=True, option=True)
    selected = t.List().tag(sync=True, option=True)
    max_tokens = t.Int(64).tag(option=True)
    solved = t.Float(0.0).tag(sync=True)
    nbytes = t.Int(0).tag(sync=True)
    predicted_kl = t.Float(0.0).tag(sync=True)
    solve_ms = t.Float(0.0).tag(sync=True)
    original = t.Unicode("").tag(sync=True)
    made = t.Unicode("").tag(sync=True)
    made_bpw = t.Float(0.0).tag(sync=True)
    stage = t.Unicode("").tag(sync=True)
    progress = t.Float(0.0).tag(sync=True)
    _low = t.Float(2.0).tag(sync=True)
    _high = t.Float(8.0).tag(sync=True)
    _matrices = t.List().tag(sync=True)
    _layers = t.List().tag(sync=True)
    _cells = t.List().tag(sync=True)
    _curve = t.List().tag(sync=True)
    _marks = t.List().tag(sync=True)
    _can_make = t.Bool(False).tag(sync=True)
    _free = t.Int(None, allow_none=True).tag(sync=True)
    _factor = t.Float(1.0).tag(sync=True)
    _tokens = t.Int(0).tag(sync=True)

    def __init__(
        self, measurement: Any = None, llm: Any = None, *, measured: Any = (), convert: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._background = Background("BitrateExplorer", busy="a conversion is running", error=ConversionError)  # first: `close` needs it
        self._guard = threading.RLock()
        self.measurement: Measurement = _measurement(measurement)
        self._maker = Maker(llm, self.measurement, demo=measurement is None, options=convert)
        super().__init__(**kwargs)
        if not 1 <= self.max_tokens <= 512:
            raise OptionError(f"BitrateExplorer: max_tokens is {self.max_tokens}; expected 1 to 512")
        low, high = self.measurement.range
        with self.hold_sync():
            self._low, self._high = math.ceil(low / BITRATE_STEP) * BITRATE_STEP, min(8.0, math.floor(high / BITRATE_STEP) * BITRATE_STEP)
            self._can_make, self._marks = self._maker.possible, [list(_mark(entry)) for entry in measured]
            self._free, self._factor, self._tokens = _free_of_card(llm), round(self._maker.factor, 4), self._maker.tokens
            self.solve(self.bpw)
            self._curve = [list(point) for point in self._walk()]

    # ---- allocating ----

    @property
    def plan(self) -> Allocation:
        """The allocation shown; `convert(..., frozen=explorer.plan.groups())` carries it out to the bit."""
        return self._plan

    @property
    def expected_kl(self) -> float:
        """KL that a copy made by "Convert" is expected to have, with its number of calibration tokens: nats per token."""
        return self.predicted_kl * self._factor

    @property
    def grid(self) -> BitGrid:
        """Its cells."""
        return self._grid

    def solve(
        self,
        bpw: float | None = None,
        *,
        bytes: int | str | None = None,
        fits: int | str | None = None,
        context: int = 0,
        cache: str = "fp16",
    ) -> Allocation:
        """Allocate and show it: at `bpw`, moved into what the model can reach, or at the largest bitrate for a size.

        Args:
            bpw, bytes, fits, context, cache: exactly one of the first three, as in `Measurement.solve`; the head keeps 6 bits.

        Raises:
            OptionError: not a number, not a size, or not exactly one. ConversionError: no allocation is that small; names the smallest.
        """
        if bytes is not None or fits is not None:
            options = {"bytes": bytes, "fits": fits, "context": context, "cache": cache}
            bpw = self.measurement.solve(bpw, head_bits=HEAD_BITS, **options).bpw
            bpw = math.floor(10_000 * bpw) / 10_000  # `solve` below rounds to four digits
        if isinstance(bpw, bool) or not isinstance(bpw, (int, float)) or not math.isfinite(bpw):
            raise OptionError(f"BitrateExplorer: bpw is {bpw!r}; expected a number from {self._low:g} to {self._high:g}")
        bpw = round(min(self._high, max(self._low, bpw)), 4)
        with self._guard:
            begun = time.perf_counter()
            plan = self._solved(bpw)
            spent = time.perf_counter() - begun
            self._plan, self._grid = plan, grid_of(plan)
            with self.hold_sync():
                self._matrices, self._layers = list(self._grid.matrices), list(self._grid.layers)
                self._cells = [cell._asdict() for cell in self._grid.cells]
                self.nbytes, self.predicted_kl, self.solve_ms = plan.nbytes, plan.predicted_kl, round(1000 * spent, 2)
                self.solved = bpw
                self.bpw = bpw
                if self.status == "error":
                    self.status, self.error = "idle", ""
        return plan

    def _solved(self, bpw: float) -> Allocation:
        """The plan at `bpw`; at the very edges the nearest that can be met."""
        try:
            return self.measurement.solve(bpw=bpw)
        except ConversionError:
            return self.measurement.solve(bpw=min(8.0, bpw + BITRATE_STEP))

    def _walk(self, count: int | None = None) -> list[CurvePoint]:
        """The curve: allocations at even steps of the bitrate."""
        count = count or (CURVE_POINTS if len(self.measurement.linears) <= LARGE_MODEL_MATRICES else CURVE_POINTS_LARGE)
        points = []
        for i in range(count):
            bpw = self._low + (self._high - self._low) * i / (count - 1)
            plan = self._solved(bpw)
            bits = [round(cell.bpw, 2) for cell in grid_of(plan).cells]
            points.append(CurvePoint(round(bpw, 4), plan.nbytes, float(f"{plan.predicted_kl:.5g}"), bits))
        return points

    @t.observe("bpw")
    def _follow(self, change: Mapping[str, Any]) -> None:
        if hasattr(self, "_plan") and abs(change["new"] - self.solved) > 1e-9:
            self.solve(change["new"])

    def _receive_solve(self, message: Mapping[str, Any]) -> None:
        self.solve(message.get("bpw"))  # type: ignore[arg-type]

    def _receive_solve_size(self, message: Mapping[str, Any]) -> None:
        kind, size = message.get("kind"), message.get("size")
        if kind not in ("bytes", "fits") or isinstance(size, bool) or not isinstance(size, int):
            raise OptionError(f"BitrateExplorer: the page sent {kind!r} of {size!r}; expected bytes or fits, and a whole number")
        context, cache = message.get("context", 0), message.get("cache", "fp16")
        check_integer("BitrateExplorer: context", context, 0, 1 << 24)
        self.solve(context=context, cache=parse_mode(cache, where="BitrateExplorer"), **{kind: size})

    # ---- converting ----

    def make(self, bpw: float | None = None) -> BitrateExplorer:
        """Convert to `bpw` (None: the one shown) and stream the prompt from both models; returns at once, `wait` waits.

        A bitrate that was made before is only loaded again.

        Raises:
            OptionError: there is no original to convert. ConversionError: one is being made.
        """
        if not self._maker.possible:
            raise OptionError("BitrateExplorer: the original is not known; make it with BitrateExplorer(measurement, llm)")
        if bpw is not None:
            self.solve(bpw)

        def starting() -> None:
            with self.hold_sync():
                self.status, self.error, self.stage, self.progress = "running", "", "starting", 0.0
                self.original, self.made, self.made_bpw = "", "", 0.0

        target, prompt = float(self.solved), str(self.prompt)
        self._background.begin(lambda stop: self._make(stop, target, prompt), self._end, before=starting)
        return self

    def close(self) -> None:
        """Stop, free the copies made (the original stays yours), remove the widget from the page."""
        self._background.close()
        maker = getattr(self, "_maker", None)
        if maker is not None:
            maker.close()
        super().close()

    def _make(self, stop: threading.Event, bpw: float, prompt: str) -> None:
        made = self._maker.make(bpw, stop, self._stage_of)
        kl = made.measured_kl
        with self.hold_sync():
            self.stage, self.made_bpw = "reading", bpw
            if kl is not None:
                self._marks = [*(m for m in self._marks if m[2] != made.label), list(Mark(bpw, kl, made.label))]
        self._maker.read(made, prompt, self.max_tokens, stop, self._texts)

    def _end(self, status: Status, problem: BaseException | None) -> None:
        with self.hold_sync():
            self.stage, self.status = "", status
            if problem is not None:
                self.error = as_text(problem)
        self._refresh_static()

    def _stage_of(self, stage: str, share: float) -> None:
        with self.hold_sync():
            self.stage, self.progress = stage, share

    def _texts(self, original: str, made: str) -> None:
        with self.hold_sync():
            self.original, self.made = original, made

    def _receive_make(self, message: Mapping[str, Any]) -> None:
        bpw, prompt = message.get("bpw"), message.get("prompt")
        if not isinstance(prompt, str) or len(prompt) > 20_000:
            raise OptionError("BitrateExplorer: the page sent no prompt, or one over 20,000 characters")
        if self._background.alive:
            return  # a second click in flight
        self.prompt = prompt
        self.make(bpw)

    def _receive_stop(self, _message: Mapping[str, Any]) -> None:
        self.stop()

    # ---- without the page ----

    def to_frame(self) -> pd.DataFrame:
        """The curve: bpw, nbytes, predicted_kl."""
        import pandas as pd

        return pd.DataFrame([{"bpw": p[0], "nbytes": p[1], "predicted_kl": p[2]} for p in self._curve])

    def _export_state(self) -> dict[str, Any]:
        curve = (
            self._curve if len(self.measurement.linears) > LARGE_MODEL_MATRICES else [list(point) for point in self._walk(EXPORT_POINTS)]
        )
        status = "stopped" if self.status == "running" else self.status
        return {**super()._export_state(), "_curve": curve, "status": status}

    def _summary(self) -> str:
        return f"BitrateExplorer({self.solved:g} bpw: {size_text(self.nbytes)}, predicted KL {self.predicted_kl:.4g})"

    def _static_body(self) -> str:
        head = f"{self.solved:g} bits per weight, {size_text(self.nbytes)}, predicted KL {self.predicted_kl:.4g}"
        parts = [bitgrid.table(self._grid, head), curve_svg(self._curve, self._marks, (self.solved, self.predicted_kl))]
        for name, text in (("original", self.original), (f"{self.made_bpw:g} bits per weight", self.made)):
            if text:
                words = html.escape(self.prompt + text)
                parts.append(f'<div style="margin-top:6px"><b>{name}</b><div style="white-space:pre-wrap">{words}</div></div>')
        return "".join(parts)


def curve_svg(curve: Sequence[Sequence[Any]], marks: Sequence[Sequence[Any]], now: tuple[float, float]) -> str:
    """The rate-distortion curve without scripts: KL on a logarithmic scale over bits per weight, rings for what was measured."""
    points = [(float(p[0]), float(p[2])) for p in curve if p[2] > 0]
    rings = [(float(m[0]), float(m[1])) for m in marks if m[1] > 0]
    if len(points) < 2:
        return ""
    left, right = points[0][0], points[-1][0]
    heights = [math.log10(kl) for _, kl in (*points, *rings)]
    low, high = min(heights) - 0.1, max(heights) + 0.1

    def at(bpw: float, kl: float) -> tuple[float, float]:
        height = math.log10(max(kl, 10**low))
        return round(46 + 284 * (bpw - left) / (right - left), 1), round(10 + 110 * (high - height) / (high - low), 1)

    path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in points))
    ticks = [(at(left, 10.0**power)[1], f"{10.0**power:g}") for power in range(math.ceil(low), math.floor(high) + 1)]
    parts = [f'<text x="40" y="{y + 4}" text-anchor="end">{name}</text>' for y, name in ticks]
    parts += [f'<line x1="46" x2="330" y1="{y}" y2="{y}" stroke="#8884"/>' for y, _ in ticks]
    parts += [
        f'<text x="{at(bits, 1)[0]}" y="134" text-anchor="middle">{bits}</text>' for bits in range(math.ceil(left), math.floor(right) + 1)
    ]
    parts.append(f'<polyline points="{path}" fill="none" stroke="#1769b8" stroke-width="2"/>')
    for places, style in ((rings, 'r="4" fill="none" stroke="#d32f2f" stroke-width="2"'), ([now], 'r="4" fill="currentColor"')):
        parts += [f'<circle cx="{x}" cy="{y}" {style}/>' for x, y in (at(*place) for place in places)]
    words = "KL, nats per token, over bits per weight; line: predicted, rings: measured"
    return (
        f'<div style="font-size:12px;margin-top:6px">{words}</div><svg viewBox="0 0 340 140" width="340" height="140" font-size="11" '
        f'fill="currentColor" role="img" aria-label="{words}">{"".join(parts)}</svg>'
    )


def _measurement(source: Any) -> Measurement:
    from exl2nb.converter.conversion_job import demo_measurement
    from exl2nb.converter.measurement import Measurement

    if source is None:
        return demo_measurement()
    if isinstance(source, (str, os.PathLike)):
        return Measurement.load(source)
    if not callable(getattr(source, "solve", None)):
        raise OptionError(
            f"BitrateExplorer: measurement is {type(source).__name__!r}; expected the result of exl2nb.measure, its JSON file, or None"
        )
    return source


def _free_of_card(llm: Any) -> int | None:
    """Bytes free on the GPU that the model is on; None on a CPU: free machine memory says nothing about a GPU."""
    device = getattr(getattr(llm, "model", None), "device", "cpu")
    if device == "cpu":
        return None
    from exl2nb.llm.memory import free_bytes

    return free_bytes(device)


def _mark(entry: Any) -> Mark:
    quality = getattr(entry, "quality", None)
    if quality is not None:
        return Mark(float(entry.bpw), float(quality.kl), f"{entry.bpw:.2f} bpw")
    try:
        bpw, kl = (float(value) for value in entry)
    except (TypeError, ValueError) as error:
        raise OptionError(f"BitrateExplorer: measured has {entry!r}; expected conversions with a quality, or (bpw, kl) pairs") from error
    if not 0 < bpw <= 16 or not 0 <= kl < 100:
        raise OptionError(f"BitrateExplorer: measured has bpw {bpw} and kl {kl}; expected up to 16 bits and less than 100 nats")
    return Mark(bpw, kl, f"{bpw:g} bpw")
