"""The conversion job: one object to run, iterate over, pause, cancel and run again; and measurements alone. Knows nothing of the stages."""

from __future__ import annotations

import contextvars
import dataclasses
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from exl2nb.converter.convert_keywords import CONVERT_DEFAULTS, EFFORT_OPTIONS, ConvertOptions, ConvertParams, MeasureOptions
from exl2nb.converter.measurement import Measurement
from exl2nb.converter.memory_estimate import Asked, StageMemory, plan_cpu_memory, plan_gpu_memory
from exl2nb.converter.pipeline import Pipeline
from exl2nb.converter.result import Conversion
from exl2nb.converter.settings import check_settings
from exl2nb.converter.tuning import fit_to_device
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import Context, JobContext, Work, make_directory
from exl2nb.core.errors import ConversionError, Interrupted, OptionError, UnknownArchitecture
from exl2nb.core.options import make, spelled_out
from exl2nb.core.progress import Progress, Sink, showing
from exl2nb.io import hub
from exl2nb.io.atomic import check_writable
from exl2nb.model.loader import read_model_config
from exl2nb.model.store import open_store
from exl2nb.ops.bf16x3 import bf16x3_linears
from exl2nb.ops.placement import pick_device

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exl2nb.converter.generic import GenericPipeline


class ConversionJob:
    """Turns a dense model into an EXL2 model.

    Args:
        src: model directory or hub id.
        dst: directory to make; it appears when everything in it is complete.
        bpw: target bits per weight of the layers' matrices, 2 to 8, everything the layers store counted (scales, group tables,
            permutations, norms, biases). None: give `target`.
        head_bits: row of the head's table: 2, 3, 4, 5, 6 or 8; or "auto": the head shares the budget, and the files are as large as a 6-bit
            head would make them.
        target: instead of bpw, what `Measurement.solve` takes: {"bytes": ...} or {"fits": "24GiB", "context": 8192, "cache": "q8"}.
        overrides: limits per layer, role or matrix, as in `Measurement.solve`: {"layer 0": (6, 8.5), "v": 5, "*.down_proj": (3, 4)}.
        frozen: choices that stay: module key -> groups, an allocation, its JSON, or the directory of an EXL2 model
            (allocation.read_choices).
        calibration: a file (.txt, .jsonl, .json, also as .xz or .gz; .parquet), "dataset:owner/name" on the hub, a list of strings or of
            conversations, "self" for text that the model writes, "mixed" or "demo" for a text that comes with the package. None: "mixed"
            (prose, encyclopaedic text, code, mathematics, conversations in the model's own template, 25 scripts), for the demo model
            "demo". Text unlike the model's own gives a CalibrationWarning (calibration.check_like).
        rows, length: calibration rows and tokens per row; None = what `effort` says.
        report_rows: further rows of the same text, never calibrated on, for the quality in the report; fewer where the text is short.
        seed: of the rows and of the random changes that the sweep sends back.
        effort: "quick", "full" or "thorough": calibration rows and their length; "tuned": 256 rows of 512 (on a GPU 512; 128 where the
            text has no more), and what the file holds then learns from the dense model (converter.tuning), on more rows and on text that
            it writes (converter.writing); dense models that fit memory several times over.
        work_dir: keeps work in progress and the measurement for later runs; None = a hidden folder next to `dst`, removed at the end.
        measurement: a Measurement, or a file written by its `save`, of the same model; None = measure.
        rounding: how codes are chosen (converter.quantization.Rounding).
        polish: try several allocations, each by its true KL on a few rows, and keep the best (converter.polish); not for models with
            experts.
        vision_bits: of the linears of a vision tower's blocks, as `head_bits`, rounded to the nearest level; None = the tower is stored as
            it is. Loading makes fp16 or fp32 of them again: files become smaller, memory does not.
        tuning: what descends, what learns and from how much (converter.tuning.Tuning), with any effort; None: as `effort` says.
        device: "cpu", "cuda" or "auto": the GPU where there is one that can be used; None = the variable EXL2NB_DEVICE, or "auto". Files
            made on a GPU differ in bits from those made on the CPU, not in quality.
        generic: convert linear by linear through Transformers (converter.generic), for architectures that are not in our table; None: those
            alone. The model must fit memory in fp32.

    Raises:
        OptionError: an option out of range. ModelNotFound, ConfigError, UnknownArchitecture, FormatError: `src` is not a model that can be
        converted. ConversionError: `dst` exists and is not empty.
    """

    @spelled_out(ConvertOptions, CONVERT_DEFAULTS)
    def __init__(
        self,
        src: str | os.PathLike[str],
        dst: str | os.PathLike[str],
        *,
        bpw: float | None = None,
        **options: Unpack[ConvertOptions],
    ) -> None:
        asked = make(ConvertParams, {"bpw": bpw, **options}, where="convert")
        self._generic = asked.generic
        self.settings = check_settings(asked)
        if self.settings.tuning is not None and asked.generic:
            raise OptionError("convert: effort is 'tuned' and generic is True, expected one of them; use effort='thorough'")
        self.src = src
        self.dst = Path(os.path.realpath(dst)) if os.path.islink(dst) else Path(dst)
        if self.dst.exists() and (not self.dst.is_dir() or any(self.dst.iterdir())):
            raise ConversionError(f"{self.dst}: exists and is not empty; choose another directory or remove it")
        self._work_dir = Path(asked.work_dir) if asked.work_dir is not None else None
        work = self._work_dir.resolve() if self._work_dir is not None else None
        if work is not None and self.dst.resolve() in (work, *work.parents):
            raise ConversionError(f"work_dir {work} is inside {self.dst}, which will be the converted model; choose another directory")
        self.device = torch.device(pick_device(asked.device, where="convert", needs_engine=False))
        if self.settings.tuning is not None:
            self.settings = dataclasses.replace(self.settings, tuning=self.settings.tuning.on(self.device))
        more = EFFORT_OPTIONS[asked.effort].more.get(self.device.type, 0) if asked.rows is None else 0
        if more and self.settings.tuning is not None and self.settings.tuning.rows is not None:
            more = min(more, self.settings.tuning.rows)  # of all that is seen
        if more > self.settings.rows:
            self.settings = dataclasses.replace(self.settings, rows=more, least_rows=self.settings.rows)
        self._cancelled, self._go = False, threading.Event()
        self._go.set()
        self.result: Conversion | None = None

    def cancel(self) -> None:
        """Stop at the next step, from any thread: `run` raises Interrupted and leaves its work in progress for the next run."""
        self._cancelled = True
        self._go.set()

    def pause(self) -> None:
        """Wait at the next step, from any thread, until `resume` (or `cancel`)."""
        self._go.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._go.set()

    def __iter__(self) -> Iterator[Progress]:
        """Run on a thread of its own and yield every event; afterwards the conversion is in `result`. Leaving the loop cancels the job."""
        events: queue.SimpleQueue[Progress | BaseException | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                self.run(events.put)
                events.put(None)
            except BaseException as error:  # raised again in the iterating thread
                events.put(error)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="conversion", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    event = events.get(timeout=0.2)  # a short wait, so that an interrupt arrives
                except queue.Empty:
                    continue
                if event is None:
                    return
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.cancel()
            thread.join()

    def run(self, sink: Sink | None = None) -> Conversion:
        """Do it.

        Args:
            sink: takes the events of stages "calibrate", "equalize", "measure", "allocate", "polish", "quantize", "tune" and "write".

        Raises:
            ConversionError: the target cannot be reached, the disk is full, a saved measurement belongs to another model.
            Interrupted: `cancel` was called. Whatever is raised, nothing is left under `dst`.
        """
        with self._opened(sink) as run:
            self.result = run.everything()
        return self.result

    def memory(self) -> StageMemory:
        """The most memory that `run` takes on the CPU, before it begins; `.nbytes` is the bound."""
        return self._planned(plan_cpu_memory, torch.device("cpu"))

    def gpu_memory(self) -> StageMemory:
        """The same of a GPU's memory, where `run` uses one."""
        return self._planned(plan_gpu_memory, torch.device("cuda"))

    def _planned(self, plan: Callable[..., StageMemory], device: torch.device) -> StageMemory:
        asked = self.settings
        config = read_model_config(hub.resolve(self.src))
        tuning = (
            None
            if asked.tuning is None
            else fit_to_device(asked.tuning, config, device, min(asked.length, config.max_position_embeddings))[0]
        )
        work = Asked(
            rows=asked.rows,
            length=asked.length,
            report_rows=asked.report_rows,
            polish=asked.polish,
            tuned=tuning is not None and tuning.learns,
            descent=asked.sweeps > 0,
            blocks=tuning is not None and bool(tuning.blocks),
        )
        return plan(config, work)

    def measure(self, sink: Sink | None = None) -> Measurement:
        """Only measure: what `run` would do first. Writes nothing under `dst`.

        Args:
            sink: takes the events of stages "calibrate", "equalize" and "measure".
        """
        with self._opened(sink) as run:
            return run.measure()

    @contextmanager
    def _opened(self, sink: Sink | None) -> Iterator[Pipeline | GenericPipeline]:
        src = hub.resolve(self.src, progress=sink)
        try:
            config = None if self._generic else read_model_config(src)
        except UnknownArchitecture:
            if self._generic is False:
                raise
            config = None
        if config is None:
            from exl2nb.converter.generic import GenericPipeline

            if self.settings.tuning is not None:
                raise OptionError(f"{src}: its architecture is not in our table, and effort is 'tuned'; use effort='thorough'")
            with torch.inference_mode(False), torch.no_grad(), self._filed() as work:
                context = JobContext(work=work, sink=sink, check=self.check_cancelled)
                yield GenericPipeline(self.settings, src, self.dst, self.device, context)
            return
        fast = bf16x3_linears(self.device, config.hidden_size)
        with (
            open_store(config, src) as store,
            closing(DenseWeights(config, store, self.device)) as weights,
            torch.inference_mode(False),
            torch.no_grad(),
            fast,
            self._filed() as work,
        ):
            context = Context(weights=weights, work=work, sink=sink, check=self.check_cancelled)
            yield Pipeline(self.settings, src, self.dst, context)

    @contextmanager
    def _filed(self) -> Iterator[Work]:
        """The folder of work in progress; removed at the end if it is not the caller's own."""
        make_directory(self.dst.absolute().parent)
        work = Work(self._work_dir or self.dst.absolute().parent / f".{self.dst.name}.work")
        with closing(work):
            try:
                yield work
            except BaseException:
                work.leave()
                raise
            if self._work_dir is None:
                work.clear()

    def check_cancelled(self) -> None:
        """Wait while paused; raise Interrupted after `cancel`."""
        self._go.wait()
        if self._cancelled:
            raise Interrupted(f"conversion to {self.dst} was cancelled; run it again to continue")


DEMO_MEASUREMENT_FILE = Path(__file__).parent.parent / "demo_model" / "measurement.json"


@spelled_out(MeasureOptions, CONVERT_DEFAULTS)
def measure(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    progress: Sink | Literal["auto"] | None = "auto",
    **options: Unpack[MeasureOptions],
) -> Measurement:
    """Measure what every width would cost each matrix of a dense model: good for any bitrate.

    Args:
        src: model directory or hub id.
        out: JSON file to write; exllamav2 0.3.2 reads it too. Until then, work in progress is kept in a hidden folder next to
            it, from which the next call continues.
        progress: takes the events; "auto" and None as in `load`.
        options: calibration, rows, length, seed, effort, work_dir, device, as in `ConversionJob`.

    Raises:
        ConversionError: `out` is no name of a file that can be written. Otherwise as `ConversionJob`.

    Returns:
        The measurement: `.solve(bpw=...)`, and `convert(..., measurement=...)`.
    """
    with showing(progress, "measure") as sink, tempfile.TemporaryDirectory() as temporary:
        beside = None
        if out is not None:
            path = check_writable(out).absolute()
            if options.get("work_dir") is None:
                options["work_dir"] = beside = path.parent / f".{path.name}.work"
        found = ConversionJob(src, Path(temporary) / "none", bpw=8.0, **options).measure(sink)
        if out is not None:
            found.save(out)
        if beside is not None:
            with closing(Work(beside)) as work:
                work.clear()
    return found


def demo_measurement() -> Measurement:
    """The demo model's measurement that comes with the package: solves any bitrate in milliseconds, nothing is run."""
    return Measurement.load(DEMO_MEASUREMENT_FILE)
