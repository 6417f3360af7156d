"""One run of a conversion: the stages in order, and what passes from one to the next. Knows nothing of how a stage does its work."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from exl2nb.converter import calibrate, self_text
from exl2nb.converter.assemble import assemble
from exl2nb.converter.calibrate import Rows
from exl2nb.converter.context import Context
from exl2nb.converter.device import describe
from exl2nb.converter.folds import folds
from exl2nb.converter.measure import Measurement
from exl2nb.converter.measuring import measured
from exl2nb.converter.plan import Plan
from exl2nb.converter.polish import Polished, polish
from exl2nb.converter.quantizing import Made, quantize_model
from exl2nb.converter.result import Conversion
from exl2nb.converter.settings import Settings
from exl2nb.converter.work import REVISION, hash_of
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.tokenizer.chat import render
from exl2nb.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


class Run:
    """One run.

    Args:
        settings: what was asked for.
        src: the dense model's directory.
        dst: the directory to make.
        context: the dense model's tensors, the folder of work in progress, where events go, what stops it.
    """

    def __init__(self, settings: Settings, src: Path, dst: Path, context: Context) -> None:
        self.settings, self.src, self.dst, self.context = settings, src, dst, context
        self.weights, self.config = context.weights, context.weights.config
        self.length = min(settings.length, self.config.max_position_embeddings)
        self.seconds: dict[str, float] = {}

    def everything(self) -> Conversion:
        """All stages."""
        if self.settings.polish and any(map(self.config.experts, range(self.config.num_layers))):
            raise OptionError("convert: polish is True and the model has experts, expected a dense one; leave polish out")
        rows = self._timed("calibrate", self.calibrate)
        measurement, key = self._timed("measure", lambda: self.measurement(rows))
        plan = self._timed("allocate", lambda: self.allocate(measurement))
        polished = None
        if self.settings.polish:
            polished = self._timed("polish", lambda: self.polish(rows, measurement, plan))
            plan = polished.plan
        made = self._timed(
            "quantize",
            lambda: quantize_model(self.context, rows, measurement, plan, key, self.settings.rounding),
        )
        result = self._result(measurement, plan, made, rows, polished)
        self._timed(
            "write",
            lambda: assemble(self.context, self.dst, self.src, made.key, result, self._written(result)),
        )
        self.context.work.forget(made.key, self.config.num_layers)
        return dataclasses.replace(result, nbytes=sum(path.stat().st_size for path in sorted(self.dst.glob("*.safetensors"))))

    def measure(self) -> Measurement:
        """Only the measurement."""
        return self.measurement(self.calibrate())[0]

    def calibrate(self) -> Rows:
        """Calibration rows, and rows for the report."""
        with self.context.meter("calibrate", total=1, unit="texts") as meter:
            tokenizer = Tokenizer.load(self.src)
            rows = Rows.of(*self._rows(tokenizer))
            for found in (rows.calibrating, rows.report):
                if found.numel() and (int(found.max()) >= self.config.vocab_size or int(found.min()) < 0):
                    raise ConversionError(
                        f"{self.src}: the tokenizer gives id {int(found.max())}; expected 0 to {self.config.vocab_size - 1}: "
                        "it belongs to another model"
                    )
            what = ", ".join(f"{count} for {use}" for use, count in rows.split().items())
            meter.step(detail=f"rows of {self.length} tokens from {rows.name}: {what}; computing on {describe(self.weights.device)}")
        return rows

    def _rows(self, tokenizer: Tokenizer) -> tuple[Tensor, Tensor, str]:
        asked, source = self.settings, self.settings.calibration
        if source == calibrate.SELF:
            rows = asked.rows + asked.report_rows
            found = self_text.write(self.src, tokenizer, rows=rows, length=self.length, seed=asked.seed, sink=self.context.sink)
            return *calibrate.part(found, asked.report_rows), "written by the model"
        template = "default" in tokenizer.templates.templates
        text, name = calibrate.read_calibration(source, functools.partial(_talk, tokenizer) if template else None)
        ids, held_out = calibrate.split_rows(tokenizer, text, rows=asked.rows, extra=asked.report_rows, length=self.length, seed=asked.seed)
        calibrate.check_known(tokenizer, ids, name)
        return ids, held_out, name

    def measurement(self, rows: Rows) -> tuple[Measurement, str]:
        """The measurement given, the one in the work folder, or a new one; and the key of the statistics on these rows."""
        given = self.settings.measurement
        found = given if isinstance(given, Measurement) or given is None else Measurement.load(given)
        if found is not None:
            found.check_model(self.weights.fingerprint(), self.src)
        if self.settings.rounding.folded:
            self._fold(rows)
        facts = {**rows.facts(), "split": rows.split()}
        return measured(self.context, rows, self.settings.seed, facts, found)

    def _fold(self, rows: Rows) -> None:
        """Scale the dense model, unless a run before this one found out how."""
        weights, work = self.weights, self.context.work
        key = hash_of(REVISION, weights.fingerprint(), rows.hessians.numpy().tobytes())
        factors = work.load_folds(key)
        if factors is None:
            with self.context.meter("calibrate", total=self.config.num_layers, unit="layers") as meter:

                def step(detail: str) -> None:
                    self.context.check()
                    meter.step(detail=detail)

                factors = folds(weights, rows.hessians, step)
            work.save_folds(key, factors)
        weights.scale(factors)

    def allocate(self, measurement: Measurement) -> Plan:
        """The plan within the budget."""
        with self.context.meter("allocate", total=1, unit="plans") as meter:
            plan = measurement.solve(**self.settings.wanted)
            meter.step(detail=repr(plan), bpw=plan.bpw, nbytes=plan.nbytes)
        return plan

    def polish(self, rows: Rows, measurement: Measurement, plan: Plan) -> Polished:
        """The plan, or a better one within the same budget."""
        return polish(self.context, rows, measurement, plan, self.settings.wanted)

    def _written(self, result: Conversion) -> dict[str, Any]:
        """The `quantization_config` of the finished model."""
        asked = self.settings.wanted
        return {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": asked.get("bpw", round(result.bpw, 4)),
            "head_bits": asked["head_bits"] if isinstance(asked["head_bits"], int) else round(result.head_bits),
            "calibration": {name: result.calibration[name] for name in ("rows", "length", "dataset")},
        }

    def _result(self, measurement: Measurement, plan: Plan, made: Made, rows: Rows, polished: Polished | None) -> Conversion:
        head_bits = self.settings.wanted["head_bits"]
        return Conversion(
            path=self.dst,
            source=self.src,
            target_bpw=self.settings.wanted.get("bpw", plan.bpw),
            bpw=plan.bpw,
            head_bits=head_bits if isinstance(head_bits, int) else round(plan.head_bpw, 2),
            nbytes=plan.nbytes,
            matrices=tuple(made.matrices),
            seconds=self.seconds,
            calibration={**rows.facts(), "split": rows.split()},
            resumed_layers=made.resumed,
            measurement=measurement,
            quality=made.quality,
            polished=polished,
            device=self.weights.device.type,
            asked={**self.settings.wanted, **({"frozen": True} if "frozen" in self.settings.wanted else {})},
        )

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        result = work()
        self.seconds[name] = time.monotonic() - begin
        return result


def _talk(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as the model's template writes it."""
    template = tokenizer.templates.pick()
    return render(messages, template, special_tokens=tokenizer.special_tokens, add_generation_prompt=False)
