"""The conversion job: its stages in order. Knows nothing of how a stage does its work, or of how work in progress is filed."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from exl2nb.converter import calibrate, measure
from exl2nb.converter.allocate import allocate
from exl2nb.converter.calibrate import Source
from exl2nb.converter.gptq import dense, quantize
from exl2nb.converter.hessian import Moments, advance, factorize, input_of, layer_hessians
from exl2nb.converter.measure import Measurement
from exl2nb.converter.options import Option, menu
from exl2nb.converter.result import Conversion, Matrix
from exl2nb.converter.sensitivity import sweep
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import HEAD, Work, hash_of, make_directory
from exl2nb.core.errors import ConversionError, Interrupted, OptionError
from exl2nb.core.options import check_range
from exl2nb.core.progress import Meter, Sink
from exl2nb.io import hub, safetensors
from exl2nb.io.hf_config import read_config
from exl2nb.model import reference
from exl2nb.model.layout import Linear, end_vectors, head_linear, layer_linears, layer_vectors
from exl2nb.model.loader import read_model_config
from exl2nb.model.store import open_store
from exl2nb.model.writer import write_model
from exl2nb.quant.bits import head_mix
from exl2nb.quant.exl2 import Exl2Tensors
from exl2nb.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
REVISION = 1  # of the algorithm: part of every hash, so that work of an older one is never taken over


@dataclass(frozen=True)
class Effort:
    """How much calibration: rows and tokens per row."""

    rows: int
    length: int


EFFORTS = {"quick": Effort(32, 512), "thorough": Effort(128, 1024)}


class ConversionJob:
    """Turns a dense model into an EXL2 model.

    Args:
        src: model directory or hub id.
        dst: directory to make; it appears when everything in it is complete.
        bpw: target bits per weight of the layers' matrices, 2 to 8, everything the layers store counted (scales, group tables,
            permutations, norms, biases).
        head_bits: row of the head's table: 2, 3, 4, 5, 6 or 8.
        calibration: text file (.txt, .xz, .gz), list of strings, or None for the text that comes with the package (written for the demo
            model; give a model of yours text of its own kind).
        rows, length: calibration rows and tokens per row; None = what `effort` says.
        seed: of the rows and of the sampled labels.
        effort: "quick" or "thorough".
        work_dir: keeps work in progress and the measurement for later runs; None = a hidden folder beside `dst`, removed at the end.
        measurement: a Measurement, or a file written by its `save`, of the same model and calibration; None = measure.

    Raises:
        OptionError: an option out of range. ModelNotFound, ConfigError, UnknownArchitecture, FormatError: `src` is not a model that can be
        converted. ConversionError: `dst` exists and is not empty.
    """

    def __init__(
        self,
        src: str | os.PathLike[str],
        dst: str | os.PathLike[str],
        *,
        bpw: float,
        head_bits: int = 6,
        calibration: Source = None,
        rows: int | None = None,
        length: int | None = None,
        seed: int = 0,
        effort: str = "quick",
        work_dir: str | os.PathLike[str] | None = None,
        measurement: Measurement | str | os.PathLike[str] | None = None,
    ) -> None:
        check_range("bpw", bpw, 2, 8, where="convert")
        if effort not in EFFORTS:
            raise OptionError(f"convert: effort is {effort!r}; expected one of {', '.join(EFFORTS)}")
        for name, value, low, high in (("rows", rows, 1, 1 << 16), ("length", length, 16, 1 << 16), ("seed", seed, 0, (1 << 63) - 1)):
            if value is not None and (type(value) is not int or not low <= value <= high):
                raise OptionError(f"convert: {name} is {value!r}; expected a whole number from {low} to {high}")
        head_mix(head_bits)
        self.dst = Path(dst)
        if self.dst.exists() and (not self.dst.is_dir() or any(self.dst.iterdir())):
            raise ConversionError(f"{self.dst}: exists and is not empty; choose another directory or remove it")
        self.bpw, self.head_bits, self.seed, self.calibration = float(bpw), head_bits, seed, calibration
        self.src, self.rows = src, rows if rows is not None else EFFORTS[effort].rows
        self._length = length if length is not None else EFFORTS[effort].length
        self._work_dir = Path(work_dir) if work_dir is not None else None
        self._measurement = measurement
        self._cancelled = False

    def cancel(self) -> None:
        """Stop at the next step, from any thread: `run` raises Interrupted and leaves its work in progress for the next run."""
        self._cancelled = True

    def run(self, sink: Sink | None = None) -> Conversion:
        """Do it.

        Args:
            sink: takes the events of stages "calibrate", "measure", "allocate", "quantize" and "write".

        Raises:
            ConversionError: the target cannot be reached, the disk is full, a saved measurement belongs to another model or calibration.
            Interrupted: `cancel` was called. Whatever is raised, nothing is left under `dst`.
        """
        src = hub.resolve(self.src, progress=sink)
        config = read_model_config(src)
        with open_store(config, src) as store:
            weights = DenseWeights(config, store)
            make_directory(self.dst.absolute().parent)
            work = Work(self._work_dir or self.dst.absolute().parent / f".{self.dst.name}.work")
            result = _Run(self, src, weights, work, sink).everything()
        if self._work_dir is None:
            shutil.rmtree(work.directory, ignore_errors=True)
        return result

    def check_cancelled(self) -> None:
        """Raise Interrupted after `cancel`."""
        if self._cancelled:
            raise Interrupted(f"conversion to {self.dst} was cancelled; run it again to continue")


class _Run:
    """One run of a job: the stages in order."""

    def __init__(self, job: ConversionJob, src: Path, weights: DenseWeights, work: Work, sink: Sink | None) -> None:
        self.job, self.src, self.weights, self.config, self.work, self.sink = job, src, weights, weights.config, work, sink
        self.length = min(job._length, self.config.max_position_embeddings)
        self.seconds: dict[str, float] = {}
        self.resumed = 0

    def everything(self) -> Conversion:
        """All stages."""
        ids, name = self._timed("calibrate", self.calibrate)
        measurement = self._timed("measure", lambda: self.measurement(ids))
        options = self._timed("allocate", lambda: self.allocate(measurement))
        matrices, key = self._timed("quantize", lambda: self.quantize(ids, measurement, options))
        calibration = {"rows": self.job.rows, "length": self.length, "dataset": name}
        self._timed("write", lambda: self.write(matrices, key, calibration))
        return self._result(measurement, options, matrices, calibration)

    def calibrate(self) -> tuple[Tensor, str]:
        """Calibration rows int32 `(rows, length)` and the name of their source."""
        with Meter("calibrate", total=1, unit="texts", sink=self.sink) as meter:
            text, name = calibrate.read_calibration(self.job.calibration)
            tokenizer = Tokenizer.load(self.src)
            ids = calibrate.calibration_rows(tokenizer, text, rows=self.job.rows, length=self.length, seed=self.job.seed)
            if int(ids.max()) >= self.config.vocab_size or int(ids.min()) < 0:
                raise ConversionError(
                    f"{self.src}: the tokenizer gives id {int(ids.max())}; expected 0 to {self.config.vocab_size - 1}: "
                    "it belongs to another model"
                )
            meter.step(detail=f"{ids.shape[0]} rows of {ids.shape[1]} tokens from {name}")
        return ids, name

    def measurement(self, ids: Tensor) -> Measurement:
        """The measurement given, the one in the work folder, or a new one."""
        key = hash_of(REVISION, measure.FORMAT, self.weights.fingerprint(), ids.numpy().tobytes(), self.job.seed, measure.ANCHORS)
        given = self.job._measurement
        if given is not None:
            found = given if isinstance(given, Measurement) else Measurement.load(given)
            if found.key != key:
                raise ConversionError("the measurement belongs to another model, calibration text, rows, length or seed; measure again")
            return found
        found = self.work.load_measurement(key)
        if found is None:
            found = self._measure(ids, key)
            self.work.save_measurement(found, self.config.num_layers)
        return found

    def _measure(self, ids: Tensor, key: str) -> Measurement:
        layers = self.config.num_layers
        linears: dict[str, measure.Measured] = {}
        token_weights: dict[str, Tensor] = {}
        with Meter("measure", total=2 * layers + 1, unit="layers", sink=self.sink) as meter:

            def step(detail: str) -> None:
                self.job.check_cancelled()
                meter.step(detail=detail)

            for statistics in sweep(self.weights, ids, seed=self.job.seed, step=step):
                path = self.work.measured(key, statistics.layer)
                done = measure.load_layer(path)
                if done is None:
                    table = layer_linears(self.config, statistics.layer)
                    measured = measure.measure_layer(table, self.weights.layer(statistics.layer), statistics)
                    named = {f"{statistics.layer}.{name}": value for name, value in statistics.token_weights.items()}
                    measure.save_layer(path, measured, named)
                    done = measured, named
                linears |= done[0]
                token_weights |= done[1]
        ordered = {linear.key: linears[linear.key] for layer in range(layers) for linear in layer_linears(self.config, layer).values()}
        return Measurement(key=key, linears=ordered, token_weights=token_weights)

    def allocate(self, measurement: Measurement) -> dict[str, Option]:
        """Module key -> option, within the budget."""
        linears = [linear for layer in range(self.config.num_layers) for linear in layer_linears(self.config, layer).values()]
        with Meter("allocate", total=len(linears), unit="matrices", sink=self.sink) as meter:
            menus: list[list[Option]] = []
            for linear in linears:
                self.job.check_cancelled()
                anchors = measurement.linears[linear.key].anchors
                menus.append(menu(linear.in_features, linear.out_features, anchors, bias=linear.bias))
                meter.step(detail=linear.key)
            weights = sum(linear.in_features * linear.out_features for linear in linears)
            least = (sum(options[0].bits for options in menus) + self._norm_bits()) / weights
            most = (sum(options[-1].bits for options in menus) + self._norm_bits()) / weights
            if least > self.job.bpw:
                raise ConversionError(
                    f"bpw is {self.job.bpw:g}; this model reaches {least:.3f} to {most:.3f} bits per weight (scales, group tables, "
                    "permutations, norms and biases included): ask for more"
                )
            picks = allocate([[(o.bits, o.error) for o in options] for options in menus], int(self.job.bpw * weights) - self._norm_bits())
        return {linear.key: options[pick] for linear, options, pick in zip(linears, menus, picks)}

    def _norm_bits(self) -> int:
        """Bits of the layers' norm vectors: they count in the budget, so `bpw` times the weights is all that the layers store."""
        shapes = [shape for layer in range(self.config.num_layers) for shape in layer_vectors(self.config, layer).values()]
        return 16 * sum(math.prod(shape) for shape in shapes)

    def quantize(self, ids: Tensor, measurement: Measurement, options: dict[str, Option]) -> tuple[list[Matrix], str]:
        """Quantise layer by layer on the stream of what is quantised so far; one file per layer in the work folder."""
        key = hash_of(measurement.key, self.job.head_bits, [(name, option.groups) for name, option in options.items()])
        ends = self.weights.ends()
        x = reference.embed(self.config, ends, ids)
        matrices: list[Matrix] = []
        with Meter("quantize", total=self.config.num_layers + 1, unit="layers", sink=self.sink) as meter:
            for layer in range(self.config.num_layers):
                self.job.check_cancelled()
                done, used = self._layer(key, layer, x, measurement, options)
                matrices += done
                if layer + 1 < self.config.num_layers or not self.work.quantized(key, HEAD).is_file():
                    x = advance(self.config, layer, used, x)
                meter.step(detail=f"layer {layer}", bpw=[round(m.bpw, 3) for m in done])
            self.job.check_cancelled()
            matrices.append(self._head(key, ends, x))
            meter.step(detail="head")
        return matrices, key

    def _layer(
        self, key: str, layer: int, x: Tensor, measurement: Measurement, options: dict[str, Option]
    ) -> tuple[list[Matrix], dict[str, Tensor]]:
        """Quantise one layer, or take over its file: what was made, and the dense tensors as the loader will see them."""
        weights, linears = self.weights.layer(layer), layer_linears(self.config, layer)
        packed = self.work.load(key, layer, linears)
        self.resumed += packed is not None
        if packed is None:
            token_weights = {name: measurement.token_weights[f"{layer}.{name}"] for name in set(input_of(linears).values())}
            hessians = layer_hessians(self.config, layer, weights, x, token_weights)
            factors = {name: factorize(h, name=f"layer {layer}, input of {name}") for name, h in hessians.items()}
            packed = {}
            for role, linear in linears.items():
                bias = weights[f"{linear.key}.bias"].half() if linear.bias else None
                groups = options[linear.key].groups
                packed[linear.key] = quantize(weights[f"{linear.key}.weight"], factors[input_of(linears)[role]], groups, bias=bias)
            self.work.save(key, layer, packed)
        matrices = []
        for linear in linears.values():
            tensors, loss = packed[linear.key]
            weights[f"{linear.key}.weight"] = dense(tensors, linear.out_features)
            matrices.append(_matrix(linear, tensors, loss, options[linear.key].error))
        return matrices, weights

    def _head(self, key: str, ends: dict[str, Tensor], x: Tensor) -> Matrix:
        linear = head_linear(self.config)
        packed = self.work.load(key, HEAD, {"head": linear})
        self.resumed += packed is not None
        if packed is None:
            moments = Moments()
            for row in x:
                moments.add("head", reference.final_norm(self.config, ends, row))
            factor = factorize(moments.hessians()["head"], name="input of the head")
            groups = head_mix(self.job.head_bits).groups(linear.in_features)
            packed = {linear.key: quantize(ends[f"{linear.key}.weight"], factor, groups)}
            self.work.save(key, HEAD, packed)
        return _matrix(linear, *packed[linear.key], 0.0)

    def write(self, matrices: list[Matrix], key: str, calibration: dict[str, object]) -> None:
        """Assemble the model directory from the work folder."""
        quantization = {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": self.job.bpw,
            "head_bits": self.job.head_bits,
            "calibration": calibration,
        }
        with Meter("write", total=len(matrices), unit="matrices", sink=self.sink) as meter:
            write_model(
                self.job.dst,
                self._tensors(key, meter),
                config=read_config(self.src),
                source_dir=self.src,
                quantization_config=quantization,
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

    def _packed(self, key: str, layer: int, linears: dict[str, Linear], meter: Meter) -> Iterator[tuple[str, Tensor]]:
        with safetensors.SafetensorsFile(self.work.quantized(key, layer)) as file:
            for linear in linears.values():
                self.job.check_cancelled()
                yield from Exl2Tensors.read(file, linear.key).tensors(linear.key).items()
                meter.step(detail=linear.key)

    def _result(
        self, measurement: Measurement, options: dict[str, Option], matrices: list[Matrix], calibration: dict[str, object]
    ) -> Conversion:
        stack = matrices[:-1]
        bits = self._norm_bits() + sum(option.bits for option in options.values())
        return Conversion(
            path=self.job.dst,
            source=self.src,
            target_bpw=self.job.bpw,
            bpw=bits / sum(m.in_features * m.out_features for m in stack),
            head_bits=self.job.head_bits,
            nbytes=sum(path.stat().st_size for path in sorted(self.job.dst.glob("*.safetensors"))),
            matrices=tuple(matrices),
            seconds=self.seconds,
            calibration=dict(calibration),
            resumed_layers=self.resumed,
            measurement=measurement,
        )

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        result = work()
        self.seconds[name] = time.monotonic() - begin
        return result


def _matrix(linear: Linear, tensors: Exl2Tensors, loss: float, predicted: float) -> Matrix:
    shape = (linear.in_features, linear.out_features)
    return Matrix(linear.key, linear.role, linear.layer, *shape, tuple(tensors.groups), predicted, loss)
