"""Conversion of any causal language model of Transformers, linear by linear, through hooks on its own modules.

For architectures that `model.archs` does not know. What is measured, how the bits are shared out and asymmetric calibration are as for
those that it knows; inputs are not refreshed inside a layer, and there is no equalization. The whole model is in memory, in fp32, and
twice while it is quantised. Code of a repository is never run.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from exl2nb.converter.allocation import Allocation
from exl2nb.converter.calibration import MIXED, SELF, Rows, check_like
from exl2nb.converter.gptq import dense, quantize_stored
from exl2nb.converter.hessian import Moments, block_of, couple, factorize
from exl2nb.converter.measurement import ANCHORS, FORMAT, Measured, Measurement, measure_linear
from exl2nb.converter.pipeline import REPORT, cut_rows
from exl2nb.converter.result import Conversion, Matrix, Quality, interval
from exl2nb.converter.sensitivity import Levels, Probe, blend, products_of
from exl2nb.converter.settings import Settings, describe_device
from exl2nb.converter.sizes import Other
from exl2nb.converter.weights import fingerprint_of
from exl2nb.converter.work import REVISION, hash_of
from exl2nb.core.errors import ConversionError, MissingDependency, OptionError, UnknownArchitecture
from exl2nb.core.progress import Meter, Sink
from exl2nb.io.hf_config import read_config
from exl2nb.io.shards import TensorStore
from exl2nb.model.layout import Linear
from exl2nb.model.writer import write_model
from exl2nb.quant.exl2 import MAX_IN_FEATURES, Exl2Tensors
from exl2nb.tokenizer.tokenizer import Tokenizer

STATISTICS_BYTES = 2 << 30  # of Hessians and couplings at once; more linears take more passes over the calibration rows
LOGITS_BYTES = 1 << 30  # of the dense model's logits on the rows of the report; more rows are left out
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A linear of the model: what it is called, its module, and whether the module stores the matrix transposed (Conv1D)."""

    linear: Linear
    module: nn.Module
    transposed: bool

    @property
    def weight(self) -> Tensor:
        """f32 `(N, K)`."""
        stored: Any = self.module.weight
        return (stored.detach().T if self.transposed else stored.detach()).float().contiguous()

    def put(self, weight: Tensor) -> None:
        """Compute with this f32 `(N, K)` from now on."""
        stored: Any = self.module.weight
        stored.data = (weight.T if self.transposed else weight).to(stored.dtype).contiguous()


def load(src: Path, device: torch.device) -> nn.Module:
    """The model as Transformers builds it, in fp32.

    Raises:
        MissingDependency: Transformers is not installed. UnknownArchitecture: it does not know the model, or only by its repository's code.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingDependency(
            f"{src}: converting this architecture needs Transformers ({error}); pip install 'transformers>=5'"
        ) from error
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "local_files_only": True, "use_safetensors": True}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(src, **options)
    except (ValueError, KeyError, ImportError, OSError) as error:
        raise UnknownArchitecture(
            f"{src}: neither exl2nb nor Transformers can build this model ({' '.join(str(error).split())[:300]}); code in its repository "
            "is never run: a newer Transformers may know it"
        ) from error
    model.requires_grad_(False)
    return nn.Module.to(model, device).eval()


def layer_of(name: str) -> int:
    """The first number in a module's name; -1 where it has none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def role_of(name: str) -> str:
    """What follows the layer's number: the same for the same place of every layer."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return "_".join(parts[at + 1 :])


def find_linears(model: Any, ids: Tensor) -> list[Found]:
    """The linears that a forward pass runs through, in that order, the head last.

    A linear is a module of class nn.Linear, a class derived from it, or Conv1D, whose output is x W^T + b in this pass. Left as they are: a
    matrix that EXL2 cannot hold (inputs no multiple of 32), one that two modules share, one whose module is not called (its weight is read
    directly, or it is an expert that no token visits), and matrices that are not in a linear at all.

    Args:
        model: of Transformers. ids: int `(1, S)`, to run.

    Raises:
        ConversionError: there is no head, or no other linear.
    """
    from transformers.pytorch_utils import Conv1D

    head, names = model.get_output_embeddings(), {}
    shared: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        shared[parameter.data_ptr()] = shared.get(parameter.data_ptr(), 0) + 1
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or not isinstance(module.weight, Tensor) or module.weight.dim() != 2:
            continue
        transposed = isinstance(module, Conv1D)
        rows, columns = module.weight.shape
        in_features, out_features = (rows, columns) if transposed else (columns, rows)
        fits = in_features % 32 == 0 and in_features <= MAX_IN_FEATURES
        if fits and (module is head or shared[module.weight.data_ptr()] == 1):
            role, layer = ("head", -1) if module is head else (role_of(name), layer_of(name))
            linear = Linear(name, role, layer, in_features, out_features, module.bias is not None)
            names[module] = Found(linear, module, transposed)
    called: list[nn.Module] = []

    def see(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and len(arguments) == 1:
            bias: Any = module.bias
            wanted = nn.functional.linear(arguments[0].float(), names[module].weight, None if bias is None else bias.float())
            if torch.allclose(output.float(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max() + 1e-6)):
                called.append(module)

    hooks = [module.register_forward_hook(see) for module in names]
    try:
        forward(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    found = [names[module] for module in dict.fromkeys(called)]
    if head not in called or len(found) < 2:
        raise ConversionError(
            f"{type(model).__name__}: found {len(found)} linears that can be quantised{'' if head in called else ', and no output head'}; "
            "expected a causal language model made of nn.Linear, with inputs that are multiples of 32"
        )
    return [*(one for one in found if one.module is not head), names[head]]


def forward(model: Any, ids: Tensor) -> Tensor:
    """Logits f32 `(B, S, V)` of ids int `(B, S)`."""
    return model(input_ids=ids.long().to(next(model.parameters()).device), use_cache=False).logits.float()


@dataclass
class Statistics:
    """Of some linears on the calibration rows, by key. An input is filed under the first linear that reads it.

    hessians: input -> f64 `(K, K)`. source: linear -> input. token_weights: input -> f32 `(tokens,)` of every row. gradients: linear -> f64
    `(N,)`. couplings: linear -> f32 `(N / B, B, B)`.
    """

    hessians: dict[str, Tensor] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    token_weights: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    couplings: dict[str, Tensor] = field(default_factory=dict)


class _Inputs:
    """Hooks that see what some linears read in one forward pass; equal inputs are one.

    Args:
        linears: watched. react: called with a linear, the name of its input, that input and the linear's output.
    """

    def __init__(self, linears: Sequence[Found], react: Callable[[Found, str, Tensor, Tensor], None]) -> None:
        self._react, self._names = react, dict[int, tuple[str, Tensor]]()
        self._hooks = [one.module.register_forward_hook(functools.partial(self._see, one)) for one in linears]

    def _see(self, one: Found, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        x = arguments[0].detach()
        name, _ = self._names.setdefault(x.data_ptr(), (one.linear.key, x))  # kept until the pass has ended: no other has this address
        self._react(one, name, x.flatten(0, -2).float(), output)

    def restart(self) -> None:
        """Another forward pass begins."""
        self._names.clear()

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()


def chunks(linears: Sequence[Found]) -> Iterator[list[Found]]:
    """Linears in their order, as many together as STATISTICS_BYTES allow, those of one layer always."""
    part: list[Found] = []
    size = 0
    for one in linears:
        k, n = one.linear.in_features, one.linear.out_features
        needed = 8 * k * k + 12 * n * block_of(n)
        if part and size + needed > STATISTICS_BYTES and one.linear.layer != part[-1].linear.layer:
            yield part
            part, size = [], 0
        part.append(one)
        size += needed
    yield part


def statistics_of(
    model: Any, linears: Sequence[Found], rows: Rows, seed: int, step: Callable[[str], None]
) -> tuple[Statistics, tuple[float, float]]:
    """One sweep over the calibration rows: forwards and backwards through the whole model (`sensitivity` says what for).

    Returns:
        The statistics; mean loss and mean entropy of the predictions, nats per token.
    """
    ids, used, found, moments, levels = rows.calibrating, rows.used, Statistics(), Moments(), Levels()
    count, judging = used * ids.shape[1], len(ids) - used or used
    seen: dict[int, tuple[str, Tensor, list[Tensor]]] = {}
    place, probe = 0, None
    values: dict[str, list[Tensor]] = {}
    generator, loss_sum, entropy_sum = torch.Generator().manual_seed(seed), 0.0, 0.0

    def react(one: Found, name: str, x: Tensor, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(gradient_of, one.linear.key, name, x))

    def gradient_of(key: str, name: str, x: Tensor, gradient: Tensor) -> None:
        flat = gradient.flatten(0, -2).float()
        if place >= used or used == len(ids):
            square = flat.square().sum(0, dtype=torch.float64)
            found.gradients[key] = found.gradients.get(key, torch.zeros_like(square)) + square
        if place < used:
            products = products_of(flat).double()
            found.couplings[key] = found.couplings.get(key, torch.zeros_like(products)) + products
            found.source[key] = name
            seen.setdefault(x.data_ptr(), (name, x, []))[2].append(flat.square().sum(1))

    watch = _Inputs(linears, react)
    opened = model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_(True))
    try:
        with torch.enable_grad():
            for place in range(len(ids)):
                watch.restart()
                seen.clear()
                row = ids[place : place + 1].to(next(model.parameters()).device)
                logprobs = forward(model, row)[0].log_softmax(-1)
                probs = logprobs.detach().exp()
                probe = Probe(probs.shape[-1], generator, probs.device) if probe is None else probe
                (logprobs * probe(probs)).sum().backward()
                known = logprobs.detach()[:-1]
                loss_sum -= float(known.gather(-1, row[0, 1:, None].long()).sum(dtype=torch.float64))
                entropy_sum -= float((probs[:-1] * known).sum(dtype=torch.float64))
                for name, x, parts in seen.values():
                    value = torch.stack(parts).sum(0)
                    levels.add(moments, name, x, value, count)
                    values.setdefault(name, []).append(value)
                step(f"row {place + 1}")
    finally:
        opened.remove()
        watch.close()
    found.hessians = moments.hessians()
    found.gradients = {key: square / (judging * ids.shape[1]) for key, square in found.gradients.items()}
    found.couplings = {key: (products / count).float() for key, products in found.couplings.items()}
    for name, parts in values.items():
        found.token_weights[name] = list(blend(torch.cat(parts)).split([len(part) for part in parts]))
    tokens = len(ids) * (ids.shape[1] - 1)
    return found, (loss_sum / tokens, entropy_sum / tokens)


class _Enough(Exception):
    """The rest of a forward pass is not needed."""


@dataclass
class Targets:
    """What rounding some linears needs. hessians, cross: input -> f64 `(K, K)`, the latter with what the dense model reads more, where all
    its tokens are the same ones. source: linear -> input.
    """

    hessians: dict[str, Tensor]
    cross: dict[str, Tensor]
    source: dict[str, str]


def targets_of(model: Any, dense_model: Any, linears: Sequence[Found], rows: Rows, token_weights: dict[str, list[Tensor]]) -> Targets:
    """Moments of what some linears read in the model as it is now, and in the dense one (None: that is not asked for)."""
    moments, cross, source = Moments(), Moments(), dict[str, str]()
    waiting, wanted, other_tokens = set[str](), dict[str, Tensor](), set[str]()
    place = 0

    def remember(one: Found, name: str, x: Tensor, _: Tensor) -> None:
        if name == one.linear.key:
            wanted[name] = x
        reached(one)

    def add(one: Found, name: str, x: Tensor, _: Tensor) -> None:
        source[one.linear.key] = name
        if name == one.linear.key:
            known = token_weights.get(name, [])  # of an expert: of other tokens, where the routing has changed
            weight = known[place] if place < len(known) and len(known[place]) == len(x) else None
            moments.add(name, x, weight)
            if name in wanted and len(wanted[name]) == len(x):
                cross.add_cross(name, x, wanted[name] - x, weight)
            else:
                other_tokens.add(name)
        reached(one)

    def reached(one: Found) -> None:
        waiting.discard(one.linear.key)
        if not waiting:
            raise _Enough

    there = [] if dense_model is None else [dataclasses.replace(one, module=dense_model.get_submodule(one.linear.key)) for one in linears]
    watches = [(dense_model, _Inputs(there, remember)), (model, _Inputs(linears, add))]
    try:
        for place in range(rows.used):
            wanted.clear()
            for one, watch in watches:
                watch.restart()
                waiting = {linear.linear.key for linear in linears}
                with suppress(_Enough):
                    if one is not None:
                        forward(one, rows.hessians[place : place + 1])
    finally:
        for _, watch in watches:
            watch.close()
    both = {name: found for name, found in cross.hessians().items() if name not in other_tokens}
    return Targets(moments.hessians(), both, source)


class GenericPipeline:
    """One run of such a conversion; the same calls as `pipeline.Pipeline`.

    Args:
        settings: what was asked for. src: directory of the model. dst: directory to make.
        device: where it is computed. sink: takes the events. check: raises to stop.
    """

    def __init__(
        self, settings: Settings, src: Path, dst: Path, device: torch.device, sink: Sink | None, check: Callable[[], None]
    ) -> None:
        if settings.polish:
            raise OptionError("convert: polish is True, which needs an architecture of exl2nb's own table; leave polish out")
        if settings.calibration == SELF:
            raise OptionError("convert: calibration is 'self', which needs an architecture of exl2nb's own table; give text")
        self.settings, self.src, self.dst, self.device = settings, src, dst, device
        self._sink, self._check = sink, check
        self.config = read_config(src)
        if self.config.get("quantization_config"):
            raise ConversionError(f"{src}: found a quantised model, expected a dense one; convert the model it was made from")
        self.seconds: dict[str, float] = {}
        with self._meter("calibrate", 1, "models") as meter:
            self.model: Any = load(src, device)
            what = f"{type(self.model).__name__} is not in exl2nb's table: converting it linear by linear, through Transformers"
            meter.step(detail=what)
        text: Any = self.model.config.get_text_config()
        self.length = min(settings.length, int(getattr(text, "max_position_embeddings", None) or settings.length))
        self._vocabulary = int(text.vocab_size)
        self._statistics = Statistics()

    def everything(self) -> Conversion:
        """All stages."""
        rows = self._timed("calibrate", self.calibrate)
        linears = find_linears(self.model, rows.hessians[:1])
        measurement = self._timed("measure", lambda: self._measured(rows, linears))
        allocation = self._timed("allocate", lambda: self._allocate(measurement))
        wanted = self._dense_logits(rows.report)
        packed, matrices = self._timed("quantize", lambda: self._quantize(rows, linears, allocation))
        quality = self._judge(rows.report, wanted) if len(wanted) else None
        result = self._result(measurement, allocation, matrices, rows, quality)
        self._timed("write", lambda: self._write(packed, result))
        return dataclasses.replace(result, nbytes=sum(path.stat().st_size for path in sorted(self.dst.glob("*.safetensors"))))

    def measure(self) -> Measurement:
        """Only the measurement."""
        rows = self.calibrate()
        return self._measured(rows, find_linears(self.model, rows.hessians[:1]))

    def calibrate(self) -> Rows:
        """Calibration rows, and rows for the report."""
        asked = self.settings
        with self._meter("calibrate", 1, "texts") as meter:
            source = MIXED if asked.calibration is None else asked.calibration
            rows = Rows.of(*cut_rows(Tokenizer.load(self.src), source, asked, self.length))
            highest = max(int(part.max()) for part in (rows.calibrating, rows.report) if part.numel())
            if highest >= self._vocabulary:
                raise ConversionError(
                    f"{self.src}: the tokenizer gives id {highest}; expected 0 to {self._vocabulary - 1}: it belongs to another model"
                )
            meter.step(detail=f"rows of {self.length} tokens from {rows.name}; computing on {describe_device(self.device)}")
        return rows

    def _measured(self, rows: Rows, linears: Sequence[Found]) -> Measurement:
        given = self.settings.measurement
        known = given if isinstance(given, Measurement) or given is None else Measurement.load(given)
        fingerprint = self._fingerprint()
        if known is not None:
            known.check_model(fingerprint, self.src)
        parts, measured, likeness = list(chunks(linears)), dict[str, Measured](), (0.0, 0.0)
        with self._meter("measure", len(parts) * len(rows.calibrating) + len(linears), "steps") as meter:

            def step(detail: str) -> None:
                self._check()
                meter.step(detail=detail)

            for part in parts:
                statistics, likeness = statistics_of(self.model, part, rows, self.settings.seed, step)
                self._statistics.couplings |= {key: value.cpu() for key, value in statistics.couplings.items()}
                self._statistics.token_weights |= statistics.token_weights
                factors: dict[str, Any] = {}
                for one in part:
                    key = one.linear.key
                    step(key)
                    if known is not None or key not in statistics.source or key not in statistics.gradients:
                        continue
                    name = statistics.source[key]
                    if name not in factors:
                        factors = {name: factorize(statistics.hessians[name], name=f"input of {name}")}
                    hessian, gradient = statistics.hessians[name], statistics.gradients[key]
                    measured[key] = measure_linear(one.linear, one.weight, factors[name], hessian, gradient)
        check_like(*likeness, rows.name)
        if known is not None:
            return known
        if linears[-1].linear.key not in measured or len(measured) < 2:
            raise ConversionError(f"{self.src}: no gradient reaches the model's linears; expected a decoder that reads input_ids")
        facts = {**rows.facts(), "split": rows.split(), "seed": self.settings.seed, "loss": likeness[0], "entropy": likeness[1]}
        return Measurement(
            key=hash_of(
                "generic", REVISION, FORMAT, fingerprint, rows.calibrating.numpy().tobytes(), rows.used, self.settings.seed, ANCHORS
            ),
            linears=measured,
            fingerprint=fingerprint,
            others=tuple(
                Other(name, tuple(tensor.shape), tensor.dim() == 1 and layer_of(name) >= 0) for name, tensor in self._others(measured)
            ),
            calibration=facts,
        )

    def _allocate(self, measurement: Measurement) -> Allocation:
        with self._meter("allocate", 1, "allocations") as meter:
            allocation = measurement.solve(**self.settings.wanted)
            meter.step(detail=repr(allocation), bpw=allocation.bpw, nbytes=allocation.nbytes)
        return allocation

    def _quantize(self, rows: Rows, linears: Sequence[Found], allocation: Allocation) -> tuple[dict[str, Exl2Tensors], list[Matrix]]:
        """Layer by layer, each on what the model quantised so far gives it; afterwards the model computes with what was made."""
        choices, rounding = {choice.key: choice for choice in allocation.choices}, self.settings.rounding
        packed, matrices = dict[str, Exl2Tensors](), list[Matrix]()
        layers: dict[int, list[Found]] = {}
        for one in linears:
            if one.linear.key in choices:
                layers.setdefault(10**9 if one.linear.role == "head" else one.linear.layer, []).append(one)
        weights = self._statistics.token_weights if rounding.weighted else {}
        dense_model = copy.deepcopy(self.model) if rounding.strength else None
        with self._meter("quantize", len(layers), "layers") as meter:
            for part in layers.values():
                self._check()
                targets = targets_of(self.model, dense_model, part, rows, weights)
                factors = {name: factorize(hessian, damping=rounding.damping, name=name) for name, hessian in targets.hessians.items()}
                for one in part:
                    linear, products = one.linear, self._statistics.couplings.get(one.linear.key) if rounding.coupled else None
                    coupling = None if products is None else couple(products.to(self.device))
                    bias: Any = one.module.bias
                    name = targets.source[linear.key]
                    stored = factors[name].stored(one.weight, targets.cross.get(name), rounding.strength)
                    half = None if bias is None else bias.detach().half()
                    made, loss = quantize_stored(stored, factors[name], choices[linear.key].groups, bias=half, coupling=coupling)
                    packed[linear.key] = made
                    matrices.append(
                        Matrix(
                            linear.key, linear.role, linear.layer, linear.in_features, linear.out_features, tuple(made.groups),
                            choices[linear.key].predicted_kl, loss,
                        )
                    )  # fmt: skip
                for one in part:  # together: they were rounded on the same inputs
                    self._put(one, packed[one.linear.key])
                meter.step(detail=f"layer {part[0].linear.layer}" if part[0].linear.role != "head" else "head")
        return packed, matrices

    def _put(self, one: Found, made: Exl2Tensors) -> None:
        if one.linear.role == "head":
            one.module.weight = nn.Parameter(one.module.weight.detach().clone(), requires_grad=False)  # type: ignore[operator]
        one.put(dense(made, one.linear.out_features, self.device))
        if made.bias is not None:
            bias: Any = one.module.bias
            bias.data = made.bias[: one.linear.out_features].float().to(self.device)

    def _dense_logits(self, ids: Tensor) -> list[Tensor]:
        fitting = LOGITS_BYTES // (4 * self.length * self._vocabulary)
        return [forward(self.model, ids[i : i + 1])[0].log_softmax(-1).cpu() for i in range(min(len(ids), fitting))]

    def _judge(self, ids: Tensor, wanted: Sequence[Tensor]) -> Quality:
        kls, same, nlls = [], 0, ([], [])
        for row, before in zip(ids, wanted):
            after = forward(self.model, row[None])[0].log_softmax(-1).cpu()
            kls.append(float((before.exp() * (before - after)).sum(-1).mean(dtype=torch.float64)))
            same += int((before.argmax(-1) == after.argmax(-1)).sum())
            for nll, logprobs in zip(nlls, (before, after)):
                nll.append(-float(logprobs[:-1].gather(-1, row[1:, None].long()).mean(dtype=torch.float64)))
        kl, low, high = interval(kls)
        source, own = (math.exp(min(700.0, sum(nll) / len(nll))) for nll in nlls)
        return Quality(len(wanted), ids.shape[1], kl, low, high, same / (len(wanted) * ids.shape[1]), own, source)

    def _others(self, linears: Any) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are stored as they are: each once, weights and biases of `linears` (by key) left out."""
        seen: set[int] = set()
        taken = {f"{key}.{part}" for key in linears for part in ("weight", "bias")}
        for name, tensor in self.model.state_dict().items():
            if name not in taken and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def _write(self, packed: dict[str, Exl2Tensors], result: Conversion) -> None:
        asked = self.settings.wanted
        quantization = {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": asked.get("bpw", round(result.bpw, 4)),
            "head_bits": asked["head_bits"] if isinstance(asked["head_bits"], int) else round(result.head_bits),
            "calibration": {name: result.calibration[name] for name in ("rows", "length", "dataset")},
        }

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._others(packed):
                half = tensor.half()
                exact = not tensor.is_floating_point() or not torch.isfinite(half).all()
                yield name, (tensor if exact else half).cpu().contiguous()
            for key, matrix in packed.items():
                yield from matrix.tensors(key).items()

        with self._meter("write", 1, "models") as meter:
            report = (json.dumps(result.to_dict(), indent=1) + "\n").encode()
            write_model(
                self.dst, tensors(), config=self.config, source_dir=self.src, quantization_config=quantization, extra={REPORT: report}
            )
            meter.step(detail=str(self.dst))

    def _result(
        self, measurement: Measurement, allocation: Allocation, matrices: Sequence[Matrix], rows: Rows, quality: Quality | None
    ) -> Conversion:
        head_bits = self.settings.wanted["head_bits"]
        return Conversion(
            path=self.dst,
            source=self.src,
            target_bpw=self.settings.wanted.get("bpw", allocation.bpw),
            bpw=allocation.bpw,
            head_bits=head_bits if isinstance(head_bits, int) else round(allocation.head_bpw, 2),
            nbytes=allocation.nbytes,
            matrices=tuple(matrices),
            seconds=self.seconds,
            calibration={**rows.facts(), "split": rows.split()},
            resumed_layers=0,
            measurement=measurement,
            quality=quality,
            device=self.device.type,
            asked={**self.settings.wanted, **({"frozen": True} if "frozen" in self.settings.wanted else {})},
        )

    def _fingerprint(self) -> str:
        with TensorStore(self.src) as store:
            return fingerprint_of(store.files, self.src)

    def _meter(self, stage: str, total: int, unit: str) -> Meter:
        return Meter(stage, total=total, unit=unit, sink=self._sink)

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        made = work()
        self.seconds[name] = time.monotonic() - begin
        return made
