"""The conversion job: its stages in order. Knows nothing of how a stage does its work, or of how work in progress is filed."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from exl2nb.converter import calibrate, measure, self_text
from exl2nb.converter.calibrate import Source
from exl2nb.converter.gptq import dense
from exl2nb.converter.hessian import advance, factorize, input_of
from exl2nb.converter.layers import Rounding, Streams, quantize_head, quantize_layer
from exl2nb.converter.measure import Measured, Measurement
from exl2nb.converter.plan import Choice, Override, Plan
from exl2nb.converter.report import Quality, judge
from exl2nb.converter.result import Conversion, Matrix
from exl2nb.converter.sensitivity import LayerStatistics, sweep
from exl2nb.converter.sizes import CacheShape
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import HEAD, Work, hash_of, make_directory
from exl2nb.core.errors import ConversionError, DeviceError, Interrupted, OptionError
from exl2nb.core.options import check_range
from exl2nb.core.progress import Meter, Progress, Sink
from exl2nb.io import hub, safetensors
from exl2nb.io.hf_config import read_config
from exl2nb.model import reference
from exl2nb.model.layout import Linear, end_vectors, head_linear, layer_linears, layer_vectors
from exl2nb.model.loader import read_model_config
from exl2nb.model.store import ModelStore, open_store
from exl2nb.model.writer import write_model
from exl2nb.quant.bits import head_mix
from exl2nb.quant.exl2 import Exl2Tensors
from exl2nb.tokenizer.chat import render
from exl2nb.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
REVISION = 2  # of the algorithm: part of every hash, so that work of an older one is never taken over
HELD_STATISTICS = 256 << 20  # bytes of statistics that a measurement keeps in memory for further bitrates
REPORT_ROWS = 8
REPORT = "conversion.json"  # in the model directory


@dataclass(frozen=True)
class Effort:
    """How much calibration: rows and tokens per row."""

    rows: int
    length: int


EFFORTS = {"quick": Effort(32, 512), "full": Effort(80, 512), "thorough": Effort(128, 1024)}


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
        overrides, frozen: as in `Measurement.solve`: limits per layer, role or matrix, and choices that stay.
        calibration: a file (.txt, .jsonl, .json, also as .xz or .gz; .parquet), "dataset:owner/name" on the hub, a list of strings or of
            conversations, "self" for text that the model writes, or None for the text that comes with the package (samples of the demo
            model; give a model of yours text of its own kind).
        rows, length: calibration rows and tokens per row; None = what `effort` says.
        report_rows: further rows of the same text, never calibrated on, for the quality in the report; fewer where the text is short.
        seed: of the rows and of the sampled labels.
        effort: "quick", "full" or "thorough".
        work_dir: keeps work in progress and the measurement for later runs; None = a hidden folder beside `dst`, removed at the end.
        measurement: a Measurement, or a file written by its `save`, of the same model; None = measure.
        rounding: how codes are chosen (converter.layers.Rounding).
        device: "cpu" or "cuda": where Hessians, gradients and factors are computed; files differ in bits between the two.

    Raises:
        OptionError: an option out of range. ModelNotFound, ConfigError, UnknownArchitecture, FormatError: `src` is not a model that can be
        converted. ConversionError: `dst` exists and is not empty.
    """

    def __init__(
        self,
        src: str | os.PathLike[str],
        dst: str | os.PathLike[str],
        *,
        bpw: float | None = None,
        head_bits: int | str | None = None,
        target: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Override] | None = None,
        frozen: Mapping[str, Any] | None = None,
        calibration: Source = None,
        rows: int | None = None,
        length: int | None = None,
        report_rows: int = REPORT_ROWS,
        seed: int = 0,
        effort: str = "quick",
        work_dir: str | os.PathLike[str] | None = None,
        measurement: Measurement | str | os.PathLike[str] | None = None,
        rounding: Rounding | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if bpw is None and not target:
            raise OptionError("convert: bpw is None; expected a number from 2 to 8, or target={'bytes': ...} or target={'fits': ...}")
        if bpw is not None and target is not None:
            raise OptionError("convert: found bpw and target, expected one of them and not both")
        if bpw is not None:
            check_range("bpw", bpw, 2, 8, where="convert")
        if effort not in EFFORTS:
            raise OptionError(f"convert: effort is {effort!r}; expected one of {', '.join(EFFORTS)}")
        for name, value, low, high in (
            ("rows", rows, 1, 1 << 16),
            ("length", length, 16, 1 << 16),
            ("report_rows", report_rows, 0, 1 << 12),
            ("seed", seed, 0, (1 << 63) - 1),
        ):
            if value is not None and (type(value) is not int or not low <= value <= high):
                raise OptionError(f"convert: {name} is {value!r}; expected a whole number from {low} to {high}")
        if head_bits not in (None, "auto"):
            head_mix(head_bits)  # type: ignore[arg-type]
        self.dst = Path(dst)
        if self.dst.exists() and (not self.dst.is_dir() or any(self.dst.iterdir())):
            raise ConversionError(f"{self.dst}: exists and is not empty; choose another directory or remove it")
        given = {name: value for name, value in (("overrides", overrides), ("frozen", frozen)) if value}
        wanted = {"bpw": float(bpw)} if bpw is not None else dict(target or {})
        head_bits = head_bits if head_bits is not None else measure.HEAD_BITS if bpw is not None else "auto"
        self.wanted: dict[str, Any] = {**wanted, "head_bits": head_bits, **given}
        self.seed, self.calibration = seed, calibration
        self.src, self.rows = src, rows if rows is not None else EFFORTS[effort].rows
        self.report_rows, self.rounding = report_rows, rounding or Rounding()
        self._length = length if length is not None else EFFORTS[effort].length
        self._work_dir = Path(work_dir) if work_dir is not None else None
        self._measurement = measurement
        self.device = _device(device)
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
            except BaseException as error:  # goes to whoever iterates
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
            sink: takes the events of stages "calibrate", "measure", "allocate", "quantize" and "write".

        Raises:
            ConversionError: the target cannot be reached, the disk is full, a saved measurement belongs to another model.
            Interrupted: `cancel` was called. Whatever is raised, nothing is left under `dst`.
        """
        with self._opened(sink) as run:
            self.result = run.everything()
        return self.result

    def measure(self, sink: Sink | None = None) -> Measurement:
        """Only measure: what `run` would do first. Writes nothing under `dst`.

        Args:
            sink: takes the events of stages "calibrate" and "measure".
        """
        with self._opened(sink) as run:
            ids, _, name = run.calibrate()
            return run.measurement(ids, {"rows": len(ids), "length": run.length, "dataset": name})[0]

    @contextmanager
    def _opened(self, sink: Sink | None) -> Iterator[_Run]:
        src = hub.resolve(self.src, progress=sink)
        config = read_model_config(src)
        with open_store(config, src) as store, torch.inference_mode(False), torch.no_grad():
            weights = DenseWeights(config, store, self.device)
            make_directory(self.dst.absolute().parent)
            work = Work(self._work_dir or self.dst.absolute().parent / f".{self.dst.name}.work")
            yield _Run(self, src, weights, work, sink)
        if self._work_dir is None:
            shutil.rmtree(work.directory, ignore_errors=True)

    def check_cancelled(self) -> None:
        """Wait while paused; raise Interrupted after `cancel`."""
        self._go.wait()
        if self._cancelled:
            raise Interrupted(f"conversion to {self.dst} was cancelled; run it again to continue")


def _talk(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as the model's template writes it."""
    template = tokenizer.templates.pick()
    return render(messages, template, special_tokens=tokenizer.special_tokens, add_generation_prompt=False)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"convert: device is {device!r}; expected 'cpu' or 'cuda'") from error
    if found.type not in ("cpu", "cuda"):
        raise OptionError(f"convert: device is {device!r}; expected 'cpu' or 'cuda'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"convert: device is {device!r}, and no CUDA GPU can be used here; expected 'cpu'")
    return found


class _Run:
    """One run of a job: the stages in order."""

    def __init__(self, job: ConversionJob, src: Path, weights: DenseWeights, work: Work, sink: Sink | None) -> None:
        self.job, self.src, self.weights, self.config, self.work, self.sink = job, src, weights, weights.config, work, sink
        self.length = min(job._length, self.config.max_position_embeddings)
        self.fingerprint = weights.fingerprint()
        self.seconds: dict[str, float] = {}
        self.resumed = 0
        self.quality: Quality | None = None

    def everything(self) -> Conversion:
        """All stages."""
        ids, held_out, name = self._timed("calibrate", self.calibrate)
        calibration = {"rows": len(ids), "length": self.length, "dataset": name}
        measurement, key = self._timed("measure", lambda: self.measurement(ids, calibration))
        plan = self._timed("allocate", lambda: self.allocate(measurement))
        matrices, key = self._timed("quantize", lambda: self.quantize(ids, held_out, measurement, plan, key))
        result = self._result(measurement, plan, matrices, calibration)
        self._timed("write", lambda: self.write(result, key, calibration))
        return dataclasses.replace(result, nbytes=sum(path.stat().st_size for path in sorted(self.job.dst.glob("*.safetensors"))))

    def calibrate(self) -> tuple[Tensor, Tensor, str]:
        """Calibration rows int32 `(rows, length)`, rows for the report, and the name of their source."""
        with Meter("calibrate", total=1, unit="texts", sink=self.sink) as meter:
            tokenizer = Tokenizer.load(self.src)
            ids, held_out, name = self._rows(tokenizer)
            for found in (ids, held_out):
                if found.numel() and (int(found.max()) >= self.config.vocab_size or int(found.min()) < 0):
                    raise ConversionError(
                        f"{self.src}: the tokenizer gives id {int(found.max())}; expected 0 to {self.config.vocab_size - 1}: "
                        "it belongs to another model"
                    )
            meter.step(detail=f"{len(ids)} rows of {self.length} tokens from {name}, {len(held_out)} held out")
        return ids, held_out, name

    def _rows(self, tokenizer: Tokenizer) -> tuple[Tensor, Tensor, str]:
        job, source = self.job, self.job.calibration
        if source == calibrate.SELF:
            found = self_text.write(self.src, tokenizer, rows=job.rows + job.report_rows, length=self.length, seed=job.seed, sink=self.sink)
            return *calibrate.part(found, job.report_rows), "written by the model"
        template = "default" in tokenizer.templates.templates
        text, name = calibrate.read_calibration(source, functools.partial(_talk, tokenizer) if template else None)
        ids, held_out = calibrate.split_rows(tokenizer, text, rows=job.rows, extra=job.report_rows, length=self.length, seed=job.seed)
        calibrate.check_known(tokenizer, ids, name)
        return ids, held_out, name

    def measurement(self, ids: Tensor, calibration: dict[str, Any]) -> tuple[Measurement, str]:
        """The measurement given, the one in the work folder, or a new one; and the key of the statistics on these rows."""
        key = hash_of(REVISION, measure.FORMAT, self.fingerprint, ids.numpy().tobytes(), self.job.seed, measure.ANCHORS)
        given, layers = self.job._measurement, self.config.num_layers
        found = given if isinstance(given, Measurement) or given is None else Measurement.load(given)
        if found is not None:
            found.check_model(self.fingerprint, self.src)
        else:
            found = self.work.load_measurement(key)
        if found is not None and ((found.key == key and found.statistics) or self.work.has_statistics(key, layers)):
            return found, key
        measured = self._measure(ids, key, found, calibration)
        self.work.save_measurement(measured, layers)
        return measured, key

    def _measure(self, ids: Tensor, key: str, known: Measurement | None, calibration: dict[str, Any]) -> Measurement:
        """Sweep over the model: statistics for rounding, and every linear measured unless it is known."""
        linears: dict[str, Measured] = dict(known.linears) if known is not None else {}
        held: dict[str, Tensor] = {}
        visits: dict[str, list[int]] = {}
        with Meter("measure", total=2 * self.config.num_layers + 1, unit="layers", sink=self.sink) as meter:

            def step(detail: str) -> None:
                self.job.check_cancelled()
                meter.step(detail=detail)

            for statistics in sweep(self.weights, ids, seed=self.job.seed, step=step):
                if statistics.layer != HEAD:
                    tensors = statistics.tensors()
                    self.work.save_statistics(key, statistics.layer, tensors)
                    if sum(t.nbytes for t in held.values()) <= HELD_STATISTICS:
                        held |= tensors
                if statistics.visits:
                    visits[str(statistics.layer)] = list(statistics.visits)
                if known is None:
                    linears |= self._measure_layer(key, statistics)
        if known is not None:
            return dataclasses.replace(known, key=key if known.key == key else known.key, statistics=held if known.key == key else {})
        table = [linear for layer in range(self.config.num_layers) for linear in layer_linears(self.config, layer).values()]
        return Measurement(
            key=key,
            linears={linear.key: linears[linear.key] for linear in (*table, head_linear(self.config))},
            fingerprint=self.fingerprint,
            others=measure.others_of(self.config),
            cache=CacheShape(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim),
            calibration={**calibration, "seed": self.job.seed, **({"expert_tokens": visits} if visits else {})},
            statistics=held if sum(t.nbytes for t in held.values()) <= HELD_STATISTICS else {},
        )

    def _measure_layer(self, key: str, statistics: LayerStatistics) -> dict[str, Measured]:
        layer = statistics.layer
        done = self.work.load_part(key, layer)
        if done is not None:
            return done
        where = "head" if layer == HEAD else f"layer {layer}"
        linears = {"head": head_linear(self.config)} if layer == HEAD else layer_linears(self.config, layer)
        names = {"head": "head"} if layer == HEAD else input_of(linears)
        weights = {} if layer == HEAD else self.weights.layer(layer)
        done = {}
        for name, roles in itertools.groupby(linears, names.__getitem__):  # one factor in memory at a time
            hessian = statistics.hessians[name]
            factor = factorize(hessian, name=f"{where}, input of {name}")
            for linear in (linears[role] for role in roles):
                weight = self.weights.weight(linear) if layer == HEAD else weights[f"{linear.key}.weight"]
                done[linear.key] = measure.measure_linear(linear, weight, factor, hessian, statistics.gradients[linear.key])
        self.work.save_part(key, layer, done)
        return done

    def allocate(self, measurement: Measurement) -> Plan:
        """The plan within the budget."""
        with Meter("allocate", total=1, unit="plans", sink=self.sink) as meter:
            plan = measurement.solve(**self.job.wanted)
            meter.step(detail=repr(plan), bpw=plan.bpw, nbytes=plan.nbytes)
        return plan

    def quantize(self, ids: Tensor, held_out: Tensor, measurement: Measurement, plan: Plan, statistics: str) -> tuple[list[Matrix], str]:
        """Quantise layer by layer on the stream of what is quantised so far; one file per layer in the work folder."""
        key = hash_of(statistics, self.job.rounding, list(plan.groups().items()))
        choices = {choice.key: choice for choice in plan.choices}
        layers, ends = self.config.num_layers, self.weights.ends()
        tokens = torch.cat([ids, held_out]) if len(held_out) else ids
        x = reference.embed(self.config, ends, tokens.to(self.weights.device))
        streams = Streams(x, x, len(ids))
        matrices: list[Matrix] = []
        with Meter("quantize", total=layers + 1, unit="layers", sink=self.sink) as meter:
            for layer in range(layers):
                self.job.check_cancelled()
                done, weights, made = self._layer(key, layer, streams, measurement, choices, statistics)
                matrices += done
                if layer + 1 < layers or len(held_out) or not self.work.quantized(key, HEAD).is_file():
                    streams.dense, streams.made = (
                        advance(self.config, layer, w, s) for w, s in ((weights, streams.dense), (made, streams.made))
                    )
                meter.step(detail=f"layer {layer}", bpw=[round(m.bpw, 3) for m in done])
            self.job.check_cancelled()
            head, made = self._head(key, ends, streams, choices)
            matrices.append(head)
            if len(held_out):
                self.quality = judge(self.config, held_out, (ends, streams.dense[len(ids) :]), (made, streams.made[len(ids) :]))
            meter.step(detail="head" if self.quality is None else str(self.quality))
        return matrices, key

    def _layer(
        self, key: str, layer: int, streams: Streams, measurement: Measurement, choices: Mapping[str, Choice], statistics: str
    ) -> tuple[list[Matrix], dict[str, Tensor], dict[str, Tensor]]:
        """Quantise one layer, or take over its file: what was made, the dense tensors, and those that the loader will see."""
        weights, linears = self.weights.layer(layer), layer_linears(self.config, layer)
        packed = self.work.load(key, layer, linears)
        self.resumed += packed is not None
        if packed is None:
            known = measurement.statistics if measurement.key == statistics and measurement.statistics else None
            known = known or self.work.load_statistics(statistics, layer)
            if known is None:
                raise ConversionError(f"{self.work.directory}: the statistics of layer {layer} are gone; run the conversion again")
            groups = {linear.key: choices[linear.key].groups for linear in linears.values()}
            packed = quantize_layer(self.config, layer, weights, streams, known, groups, self.job.rounding)
            self.work.save(key, layer, packed)
        made = dict(weights)
        for linear in linears.values():
            made[f"{linear.key}.weight"] = dense(packed[linear.key][0], linear.out_features).to(self.weights.device)
        return [_matrix(linear, *packed[linear.key], choices[linear.key]) for linear in linears.values()], weights, made

    def _head(self, key: str, ends: dict[str, Tensor], streams: Streams, choices: Mapping[str, Choice]) -> tuple[Matrix, dict[str, Tensor]]:
        linear = head_linear(self.config)
        packed = self.work.load(key, HEAD, {"head": linear})
        self.resumed += packed is not None
        if packed is None:
            packed = {linear.key: quantize_head(self.config, ends, streams, choices[linear.key].groups, self.job.rounding)}
            self.work.save(key, HEAD, packed)
        made = {**ends, f"{linear.key}.weight": dense(packed[linear.key][0], linear.out_features).to(self.weights.device)}
        return _matrix(linear, *packed[linear.key], choices[linear.key]), made

    def write(self, result: Conversion, key: str, calibration: dict[str, object]) -> None:
        """Assemble the model directory from the work folder."""
        asked = self.job.wanted
        quantization = {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": asked.get("bpw", round(result.bpw, 4)),
            "head_bits": asked["head_bits"] if isinstance(asked["head_bits"], int) else round(result.head_bits),
            "calibration": calibration,
        }
        with Meter("write", total=len(result.matrices), unit="matrices", sink=self.sink) as meter:
            write_model(
                self.job.dst,
                self._tensors(key, meter),
                config=read_config(self.src),
                source_dir=self.src,
                quantization_config=quantization,
                extra={REPORT: (json.dumps(result.to_dict(), indent=1) + "\n").encode()},
            )
        self.work.forget(key, self.config.num_layers)

    def _tensors(self, key: str, meter: Meter) -> Iterator[tuple[str, Tensor]]:
        config = self.config
        for name in end_vectors(config):
            yield name, self.weights.stored(name)
        for layer in range(config.num_layers):
            for name, shape in layer_vectors(config, layer).items():
                yield name, self.weights.stored(name, shape)
            yield from self._packed(key, layer, layer_linears(config, layer), meter)
        yield from self._packed(key, HEAD, {"head": head_linear(config)}, meter)
        if isinstance(self.weights.store, ModelStore):
            for name in self.weights.store.untouched():
                yield name, self.weights.store.read_untouched(name)

    def _packed(self, key: str, layer: int, linears: dict[str, Linear], meter: Meter) -> Iterator[tuple[str, Tensor]]:
        with safetensors.SafetensorsFile(self.work.quantized(key, layer)) as file:
            for linear in linears.values():
                self.job.check_cancelled()
                yield from Exl2Tensors.read(file, linear.key).tensors(linear.key).items()
                meter.step(detail=linear.key)

    def _result(self, measurement: Measurement, plan: Plan, matrices: list[Matrix], calibration: dict[str, object]) -> Conversion:
        head_bits = self.job.wanted["head_bits"]
        return Conversion(
            path=self.job.dst,
            source=self.src,
            target_bpw=self.job.wanted.get("bpw", plan.bpw),
            bpw=plan.bpw,
            head_bits=head_bits if isinstance(head_bits, int) else round(plan.head_bpw, 2),
            nbytes=plan.nbytes,
            matrices=tuple(matrices),
            seconds=self.seconds,
            calibration=dict(calibration),
            resumed_layers=self.resumed,
            measurement=measurement,
            quality=self.quality,
        )

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        result = work()
        self.seconds[name] = time.monotonic() - begin
        return result


def _matrix(linear: Linear, tensors: Exl2Tensors, loss: float, choice: Choice) -> Matrix:
    shape = (linear.in_features, linear.out_features)
    return Matrix(linear.key, linear.role, linear.layer, *shape, tuple(tensors.groups), choice.predicted_kl, loss)
