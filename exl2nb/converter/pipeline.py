"""One run of a conversion: calibrate, measure, allocate, polish, quantize, write; and what passes from one stage to the next."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from exl2nb.converter.allocation import Allocation, check_overrides
from exl2nb.converter.blockwise import Layerwise
from exl2nb.converter.calibration import (
    DEMO_TEXT,
    MAX_UNKNOWN,
    MIXED_TEXT,
    PACKAGED_TEXTS,
    SELF_TEXT,
    TEMPLATE_DATE,
    Rows,
    Source,
    calibration_rows,
    check_known,
    check_like,
    read_calibration,
    split_rows,
    take_spread_rows,
    tuning_rows,
    unknown_share,
    write_text,
)
from exl2nb.converter.equalization import equalize
from exl2nb.converter.hessian import factorize, role_inputs
from exl2nb.converter.measurement import ANCHOR_CODINGS, FORMAT_VERSION, Measured, Measurement, measure_linear, other_tensors
from exl2nb.converter.polish import Polished, polish
from exl2nb.converter.quantization import QuantizedLayers, layer_cost, quantize_model
from exl2nb.converter.result import Conversion
from exl2nb.converter.rounding import quantized_tower, tower_block_linears
from exl2nb.converter.sensitivity import LayerStatistics, sweep_layers
from exl2nb.converter.settings import ConversionSettings, describe_device
from exl2nb.converter.sizes import CacheShape
from exl2nb.converter.tuning import STEP_TOKENS, VALIDATION_ROWS, Tuned, fit_to_device, tune, with_rows_seen
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import ALGORITHM_REVISION, HEAD_LAYER, Context, JobContext, Work, hash_of
from exl2nb.core.errors import ConversionError, OptionError, TokenizerError
from exl2nb.core.progress import Forecast, Phase
from exl2nb.io.hf_config import read_config, read_json
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, end_vectors, head_linear, layer_linears, layer_vectors
from exl2nb.model.store import ModelStore
from exl2nb.model.writer import write_model
from exl2nb.ops.gpu import fast_products_on_cpu
from exl2nb.tokenizer.template import render
from exl2nb.tokenizer.tokenizer import Tokenizer

LEARNING_PASSES = {"cpu": 3, "cuda": 5}  # through all layers that learning from a token takes as long as
HELD_STATISTICS = 256 << 20  # bytes of statistics that a measurement keeps in memory for further bitrates


def get_measurement(
    context: Context, rows: Rows, seed: int, calibration: dict[str, Any], given: Measurement | None
) -> tuple[Measurement, str]:
    """The measurement given, the one in the work folder, or a new one; and the key of the statistics on these rows.

    A measurement given without statistics of these rows costs one sweep, in which no linear is measured again.

    Args:
        context: the model, and where measured layers and statistics are filed.
        calibration: what the measurement says of its rows.
    """
    weights, work = context.weights, context.work
    fingerprint, layers = weights.fingerprint(), weights.config.num_layers
    key = hash_of(
        ALGORITHM_REVISION, FORMAT_VERSION, fingerprint, rows.calibrating.numpy().tobytes(), rows.used, seed, ANCHOR_CODINGS, weights.scaled
    )
    found = given if given is not None else work.load_measurement(key)
    if found is not None and ((found.key == key and found.statistics) or work.has_statistics(key, layers)):
        return found, key
    made = _run_measurement(context, rows, key, found, {**calibration, "seed": seed})
    work.save_measurement(made, layers)
    return made, key


def _run_measurement(context: Context, rows: Rows, key: str, known: Measurement | None, calibration: dict[str, Any]) -> Measurement:
    weights, work, config, held, visits = context.weights, context.work, context.weights.config, _Held(), {}
    likeness: dict[str, float] = {}
    linears: dict[str, Measured] = dict(known.linears) if known is not None else {}
    steps = context.steps("measure", total=2 * config.num_layers + 1, unit="passes", phased=True)
    with fast_products_on_cpu(weights.device), steps as step:
        for statistics in sweep_layers(
            weights, rows.calibrating, used=rows.used, seed=calibration["seed"], step=step, directory=work.directory
        ):
            if statistics.layer != HEAD_LAYER:
                tensors = statistics.tensors()
                work.save_statistics(key, statistics.layer, tensors)
                held.add(tensors)
            if statistics.likeness is not None:
                check_like(*statistics.likeness, calibration["dataset"])
                likeness = dict(zip(("loss", "entropy"), statistics.likeness))
            if statistics.visits:
                visits[str(statistics.layer)] = list(statistics.visits)
            if known is None:
                linears |= _measure_layer(weights, work, key, statistics)
            del statistics  # its Hessians: the next layer's come while this name is still there
    if known is not None:
        return dataclasses.replace(known, statistics=held.tensors if known.key == key else {})
    table = [linear for layer in range(config.num_layers) for linear in layer_linears(config, layer).values()]
    return Measurement(
        key=key,
        linears={linear.key: linears[linear.key] for linear in (*table, head_linear(config))},
        fingerprint=weights.fingerprint(),
        others=other_tensors(config),
        cache=CacheShape(config.num_layers, config.num_kv_heads, config.head_dim),
        calibration={**calibration, **likeness, **({"expert_tokens": visits} if visits else {})},
        statistics=held.tensors,
    )


class _Held:
    """Statistics of all layers, or nothing once they are more than HELD_STATISTICS."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._nbytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Keep those of one layer."""
        self._nbytes += sum(tensor.nbytes for tensor in tensors.values())
        self.tensors = self.tensors | tensors if self._nbytes <= HELD_STATISTICS else {}


def _measure_layer(weights: DenseWeights, work: Work, key: str, statistics: LayerStatistics) -> dict[str, Measured]:
    """Measure one layer, or the head, unless a run before this one did."""
    layer = statistics.layer
    done = work.load_part(key, layer)
    if done is not None:
        return done
    where = "head" if layer == HEAD_LAYER else f"layer {layer}"
    linears = {"head": head_linear(weights.config)} if layer == HEAD_LAYER else layer_linears(weights.config, layer)
    names = {"head": "head"} if layer == HEAD_LAYER else role_inputs(linears)
    dense = {} if layer == HEAD_LAYER else weights.layer(layer)
    done = {}
    for name, roles in itertools.groupby(linears, names.__getitem__):  # one factor in memory at a time
        hessian = statistics.hessians[name]
        factor = factorize(hessian, name=f"{where}, input of {name}")
        for linear in (linears[role] for role in roles):
            weight = weights.weight(linear) if layer == HEAD_LAYER else dense[f"{linear.key}.weight"]
            done[linear.key] = measure_linear(linear, weight, factor, hessian, statistics.gradients[linear.key])
    work.save_part(key, layer, done)
    return done


REPORT_FILE = "conversion.json"  # in the model directory


def write_output(
    context: Context,
    dst: Path,
    src: Path,
    key: str,
    result: Conversion,
    quantization: dict[str, Any],
    *,
    vectors: Mapping[str, Tensor] | None = None,
    vision_bits: int | None = None,
) -> None:
    """Write the directory; it appears when everything in it is complete.

    Args:
        context: the dense model's tensors that are stored as they are, and the folder of the quantised layers.
        src: the dense model's, for everything but weights.
        quantization: `quantization_config` of its config.json.
        vectors: tensors by name that take the place of the dense model's. vision_bits: of a tower's linears; None = as they are.
    """
    with context.steps("write", total=len(result.matrices), unit="matrices") as step:
        write_model(
            dst,
            _untouched_tensors(context, key, step, src, vectors or {}, vision_bits),
            config=read_config(src),
            source_dir=src,
            quantization_config=quantization,
            extra={REPORT_FILE: (json.dumps(result.to_dict(), indent=1) + "\n").encode()},
        )


def _untouched_tensors(
    context: Context, key: str, step: Callable[[str], None], src: Path, vectors: Mapping[str, Tensor], vision_bits: int | None
) -> Iterator[tuple[str, Tensor]]:
    weights, work, config = context.weights, context.work, context.weights.config
    for name in end_vectors(config):
        yield name, vectors[name] if name in vectors else weights.stored(name)
    for layer in (*range(config.num_layers), HEAD_LAYER):
        for name, shape in (layer_vectors(config, layer) if layer != HEAD_LAYER else {}).items():
            yield name, vectors[name] if name in vectors else weights.stored(name, shape)
        linears = layer_linears(config, layer) if layer != HEAD_LAYER else {"head": head_linear(config)}
        packed = work.load(key, layer, linears)
        if packed is None:
            raise ConversionError(f"{work.quantized(key, layer)}: was damaged or removed meanwhile; run the conversion again")
        for name, (matrix, _) in packed.items():
            yield from matrix.tensors(name).items()
            step(name)
    if isinstance(weights.store, ModelStore):
        store = weights.store
        if vision_bits is None:
            yield from ((name, store.read_untouched(name)) for name in store.untouched())
        else:
            yield from quantized_tower(store, tower_block_linears(config, src), vision_bits, context.check)


def forecast_costs(asked: ConversionSettings, config: ModelConfig, device: torch.device, *, last: str = "write") -> Forecast:
    """What the stages cost one beside the other, up to stage `last`: seconds on the demo model, 8 rows of 128 tokens, 2 cores."""
    layers, known = config.num_layers, asked.measurement is not None
    matrices = sum(len(layer_linears(config, layer)) for layer in range(layers)) + 1
    phases = [
        Phase("calibrate", 1, 0.1),
        Phase("equalize", layers if asked.rounding.folded else 0, 0.35),
        Phase("measure", layers, 0.5, name="forward"),
        Phase("measure", 1, 1.5, name="loss"),
        Phase("measure", layers, 1.7 if known else 6.0, name="backward"),
        Phase("allocate", 1, 0.1),
        Phase("polish", 2 * (layers + 1) if asked.polish else 0, 3.5),
        Phase("quantize", layers + 1, layer_cost(asked.sweeps, asked.blocks)),
        *_tuning_phases(asked, layers, device),
        Phase("write", matrices, 0.01),
    ]
    return Forecast(phases[: max(at for at, phase in enumerate(phases) if phase.stage == last) + 1])


def _tuning_phases(asked: ConversionSettings, layers: int, device: torch.device) -> tuple[Phase, ...]:
    """Writing text and tuning: a token that is written costs two passes through all layers, one that is learned from LEARNING_PASSES.

    As if the text gave all rows that it may; `Forecast.expect` says it better once they are there.
    """
    if asked.tuning is None or not asked.tuning.learns:
        return ()
    token, rows = 0.5 * layers / (asked.rows * asked.length), asked.tuning.most_rows(device)
    written, steps = asked.tuning.to_write(rows, device), asked.tuning.steps(rows, asked.length, device)
    return Phase("write text", written * (asked.length - 1), 2 * token), Phase(
        "tune", steps, LEARNING_PASSES[device.type] * STEP_TOKENS[device.type] * token
    )


T = TypeVar("T")


C = TypeVar("C", bound=JobContext)


class ConversionRun(Generic[C]):
    """What every run of a conversion has.

    Args:
        settings: what was asked for. src: directory of the model. dst: directory to make.
        device: where it is computed. context: the folder of work in progress, where events go, what stops it.
    """

    def __init__(self, settings: ConversionSettings, src: Path, dst: Path, device: torch.device, context: C) -> None:
        self.settings, self.src, self.dst, self.device, self.context = settings, src, dst, device, context
        self.seconds: dict[str, float] = {}

    def given_measurement(self, fingerprint: str) -> Measurement | None:
        """What the settings name, which must be of this model."""
        given = self.settings.measurement
        found = given if isinstance(given, Measurement) or given is None else Measurement.load(given)
        if found is not None:
            found.check_model(fingerprint, self.src)
        return found

    def check_names(self, linears: Sequence[Linear]) -> None:
        """Refuse overrides and frozen choices that fit nothing, before the hours that measuring takes."""
        for name in ("overrides", "frozen"):
            check_overrides(linears, self.settings.wanted.get(name, {}), where=name)

    def allocate(self, measurement: Measurement) -> Allocation:
        """The allocation within the budget."""
        with self.context.meter("allocate", total=1, unit="allocations") as meter:
            allocation = measurement.solve(**self.settings.wanted)
            meter.step(detail=repr(allocation), bpw=allocation.bpw, nbytes=allocation.nbytes)
        return allocation

    def written(self, result: Conversion) -> dict[str, Any]:
        """The `quantization_config` of the finished model."""
        asked = self.settings.wanted
        return {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": asked.get("bpw", round(result.bpw, 4)),
            "head_bits": asked["head_bits"] if isinstance(asked["head_bits"], int) else round(result.head_bits),
            **({"vision_bits": self.settings.vision_bits} if self.settings.vision_bits is not None else {}),
            "calibration": {name: result.calibration[name] for name in ("rows", "length", "dataset")},
        }

    def result(
        self,
        measurement: Measurement,
        allocation: Allocation,
        made: QuantizedLayers,
        rows: Rows,
        polished: Polished | None = None,
        tuned: Tuned | None = None,
        learned: Layerwise | None = None,
    ) -> Conversion:
        """Before it is written."""
        head_bits = self.settings.wanted["head_bits"]
        return Conversion(
            path=self.dst,
            source=self.src,
            target_bpw=self.settings.wanted.get("bpw", allocation.bpw),
            bpw=allocation.bpw,
            head_bits=head_bits if isinstance(head_bits, int) else round(allocation.head_bpw, 2),
            nbytes=allocation.nbytes,
            matrices=tuple(made.matrices),
            seconds=self.seconds,
            calibration={**rows.facts(), "split": rows.split()},
            resumed_layers=made.resumed,
            measurement=measurement,
            quality=tuned.quality if tuned else made.quality,
            polished=polished,
            tuned=tuned,
            blocks=learned,
            device=self.device.type,
            descent=self.settings.sweeps,
            asked={**self.settings.wanted, **({"frozen": True} if "frozen" in self.settings.wanted else {})},
        )

    def finished(self, result: Conversion) -> Conversion:
        """With the bytes of the files."""
        return dataclasses.replace(result, nbytes=sum(path.stat().st_size for path in sorted(self.dst.glob("*.safetensors"))))

    def timed(self, name: str, work: Callable[[], T]) -> T:
        """Note the seconds of a stage."""
        begin = time.monotonic()
        result = work()
        self.seconds[name] = time.monotonic() - begin
        return result


class Pipeline(ConversionRun[Context]):
    """One run of a conversion, layer by layer from the files.

    Args:
        context: the dense model's tensors too.
    """

    def __init__(self, settings: ConversionSettings, src: Path, dst: Path, context: Context) -> None:
        self.weights, self.config = context.weights, context.weights.config
        if settings.tuning is not None:
            length = min(settings.length, self.config.max_position_embeddings)
            settings = dataclasses.replace(settings, tuning=with_rows_seen(settings.tuning, self.config, self.weights.device, length))
        whole = dataclasses.replace(context, forecast=forecast_costs(settings, self.config, context.weights.device))
        super().__init__(settings, src, dst, self.weights.device, whole)
        self.length = min(settings.length, self.config.max_position_embeddings)

    def everything(self) -> Conversion:
        """All stages."""
        if self.settings.polish and any(map(self.config.experts, range(self.config.num_layers))):
            raise OptionError("convert: polish is True and the model has experts, expected a dense one; leave polish out")
        if self.settings.vision_bits is not None and not (isinstance(self.weights.store, ModelStore) and self.weights.store.untouched()):
            raise OptionError(f"convert: vision_bits is {self.settings.vision_bits} and {self.src} has no vision tower; leave it out")
        alone = self._fit()
        linears = [linear for layer in range(self.config.num_layers) for linear in layer_linears(self.config, layer).values()]
        self.check_names([*linears, head_linear(self.config)])
        rows = self.timed("calibrate", self.calibrate)
        self._expect(rows)
        measurement, key = self.timed("measure", lambda: self.measurement(rows))
        allocation = self.timed("allocate", lambda: self.allocate(measurement))
        polished = None
        if self.settings.polish:
            polished = self.timed("polish", lambda: self.polish(rows, measurement, allocation))
            allocation = polished.allocation
        asked, tuning = self.settings, self.settings.tuning
        options = asked.rounding, asked.sweeps, asked.blocks
        quantize = functools.partial(quantize_model, self.context, rows, measurement, allocation, key, *options)
        made, tuned = self.timed("quantize", quantize), None
        if tuning is not None and tuning.learns:
            tuned = self.timed("tune", functools.partial(tune, self.context, rows, made, tuning, asked.seed))
        learned = Layerwise(asked.blocks.passes, tuple(made.learned), alone) if asked.blocks is not None else None
        result = self.result(measurement, allocation, made, rows, polished, tuned, learned)
        key, vectors = (made.key, made.vectors) if tuned is None else (tuned.key, tuned.vectors)
        written, bits = self.written(result), self.settings.vision_bits
        self.timed("write", lambda: write_output(self.context, self.dst, self.src, key, result, written, vectors=vectors, vision_bits=bits))
        for done in {made.key, key}:
            self.context.work.forget(done, self.config.num_layers)
        return self.finished(result)

    def _fit(self) -> str:
        """Leave out of tuning what this device cannot do; why, in words."""
        if self.settings.tuning is None:
            return ""
        tuning, why = fit_to_device(self.settings.tuning, self.config, self.device, self.length)
        self.settings = dataclasses.replace(self.settings, tuning=tuning)
        if why and self.settings.least_rows is not None:  # a large model's layers see every row several times: more take hours
            self.settings = dataclasses.replace(self.settings, rows=self.settings.least_rows, least_rows=None)
        self.context = dataclasses.replace(self.context, forecast=forecast_costs(self.settings, self.config, self.device))
        return why

    def measure(self) -> Measurement:
        """Only the measurement."""
        self.context = dataclasses.replace(self.context, forecast=forecast_costs(self.settings, self.config, self.device, last="measure"))
        self._fit()
        return self.measurement(self.calibrate())[0]

    def calibrate(self) -> Rows:
        """Calibration rows, and rows for the report."""
        with self.context.meter("calibrate", total=1, unit="texts") as meter:
            tokenizer = Tokenizer.load(self.src)
            rows = Rows.of(*self._rows(tokenizer)) if self.settings.tuning is None else self._tuning_rows(tokenizer)
            for found in (rows.calibrating, rows.report, rows.tuning, rows.choosing, rows.second):
                if found.numel() and (int(found.max()) >= self.config.vocab_size or int(found.min()) < 0):
                    raise ConversionError(
                        f"{self.src}: the tokenizer gives id {int(found.max())}; expected 0 to {self.config.vocab_size - 1}: "
                        "it belongs to another model"
                    )
            what = ", ".join(f"{count} for {use}" for use, count in rows.split().items())
            meter.step(detail=f"rows of {self.length} tokens from {rows.name}: {what}; computing on {describe_device(self.weights.device)}")
        return rows

    def _rows(self, tokenizer: Tokenizer) -> tuple[Tensor, Tensor, str]:
        asked, source = self.settings, self.settings.calibration
        if source == SELF_TEXT:
            rows = asked.rows + asked.report_rows
            found = write_text(self.src, tokenizer, rows=rows, length=self.length, seed=asked.seed, sink=self.context.sink)
            return *take_spread_rows(found, asked.report_rows), "written by the model"
        return cut_rows(tokenizer, self._source(), asked, self.length)

    def _source(self) -> Source:
        given = self.settings.calibration
        return given if given is not None else DEMO_TEXT if self.weights.fingerprint() == _demo_fingerprint() else MIXED_TEXT

    def _tuning_rows(self, tokenizer: Tokenizer) -> Rows:
        """The same, with rows to learn from, to choose by, and of a second text."""
        asked, tuning = self.settings, self.settings.tuning
        assert tuning is not None
        counts = {
            "rows": asked.rows,
            "least": asked.least_rows,
            "tuning": tuning.most_rows(self.device),
            "choosing": VALIDATION_ROWS,
            "extra": asked.report_rows,
        }
        if asked.calibration == SELF_TEXT:
            written = write_text(self.src, tokenizer, rows=asked.rows + 8 + asked.report_rows, length=self.length, seed=asked.seed)
            kept, report = take_spread_rows(written, asked.report_rows)
            learning, choosing = take_spread_rows(kept, 8)
            ids, name = learning, "written by the model"
        else:
            text, name = read_text(tokenizer, self._source())
            ids, learning, choosing, report = tuning_rows(tokenizer, text, **counts, length=self.length, seed=asked.seed)
            check_known(tokenizer, learning, name)
        rows = Rows.of(ids, report, name)
        second, found = second_rows(tokenizer, name, asked.report_rows, self.length)
        return dataclasses.replace(rows, tuning=learning, choosing=choosing, second=found, second_name=second)

    def _expect(self, rows: Rows) -> None:
        """Correct the forecast by the number of rows."""
        tuning, whole, (count, length) = self.settings.tuning, self.context.forecast, rows.tuning.shape
        if tuning is not None and whole is not None:
            whole.expect("write text", tuning.to_write(count, self.device) * (length - 1))
            whole.expect("tune", tuning.steps(count, length, self.device))

    def measurement(self, rows: Rows) -> tuple[Measurement, str]:
        """The measurement given, the one in the work folder, or a new one; and the key of the statistics on these rows."""
        found = self.given_measurement(self.weights.fingerprint())
        if self.settings.rounding.folded:
            self._equalize(rows)
        facts = {**rows.facts(), "split": rows.split()}
        return get_measurement(self.context, rows, self.settings.seed, facts, found)

    def _equalize(self, rows: Rows) -> None:
        """Scale the dense model, unless a run before this one found out how."""
        weights, work = self.weights, self.context.work
        key = hash_of(ALGORITHM_REVISION, weights.fingerprint(), rows.hessians.numpy().tobytes())
        factors = work.load_scales(key)
        if factors is None:
            with self.context.steps("equalize", total=self.config.num_layers, unit="layers") as step:
                factors = equalize(weights, rows.hessians, step)
            work.save_scales(key, factors)
        weights.scale(factors)

    def polish(self, rows: Rows, measurement: Measurement, allocation: Allocation) -> Polished:
        """The allocation, or a better one within the same budget."""
        return polish(self.context, rows, measurement, allocation, self.settings.wanted)


@functools.cache
def _demo_fingerprint() -> str:
    """Of the packaged model, as its measurement says."""
    return str(read_json(Path(__file__).parent.parent / "demo_model" / "measurement.json")["exl2nb"]["fingerprint"])


def cut_rows(tokenizer: Tokenizer, source: Source, asked: ConversionSettings, length: int) -> tuple[Tensor, Tensor, str]:
    """Calibration rows, rows for the report and the text's name, of any source but SELF_TEXT."""
    text, name = read_text(tokenizer, source)
    ids, held_out = split_rows(tokenizer, text, rows=asked.rows, extra=asked.report_rows, length=length, seed=asked.seed)
    check_known(tokenizer, ids, name)
    return ids, held_out, name


def read_text(tokenizer: Tokenizer, source: Source) -> tuple[str, str]:
    """Text and name of any source but SELF_TEXT, conversations in the model's template."""
    template = "default" in tokenizer.templates.templates
    return read_calibration(source, functools.partial(_conversation_text, tokenizer) if template else None)


def second_rows(tokenizer: Tokenizer, name: str, rows: int, length: int) -> tuple[str, Tensor]:
    """Name and rows of a packaged text of another kind than text `name`, for the report; no rows where the tokenizer cannot read it."""
    none = torch.empty(0, length, dtype=torch.int32)
    if not rows:
        return "", none
    text, second = read_text(tokenizer, DEMO_TEXT if name == PACKAGED_TEXTS[MIXED_TEXT][0] else MIXED_TEXT)
    try:
        found = calibration_rows(tokenizer, text, rows=rows, length=length)
    except (OptionError, TokenizerError):
        return "", none
    return (second, found) if unknown_share(tokenizer, found) <= MAX_UNKNOWN else ("", none)


def _conversation_text(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as the model's template writes it."""
    template = tokenizer.templates.pick()
    return render(messages, template, special_tokens=tokenizer.special_tokens, add_generation_prompt=False, date_string=TEMPLATE_DATE)
