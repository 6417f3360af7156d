"""Conversion of any causal language model of Transformers, linear by linear, through hooks on its own modules.

For architectures that `model.archs` does not know. What is measured, how the bits are shared out and asymmetric calibration are as for
those that it knows; inputs are not refreshed inside a layer, and there is no equalization. Loading takes the whole model in fp32 once;
after that its linears are kept in 16 bits where that is exact, and are fp32 one at a time. Code of a repository is never run.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exl2nb.converter.allocation import Allocation, MatrixChoice
from exl2nb.converter.calibration import MIXED_TEXT, SELF_TEXT, Rows, check_like
from exl2nb.converter.hessian import Moments, couple_outputs, coupled_block, factorize
from exl2nb.converter.measurement import ANCHOR_CODINGS, FORMAT_VERSION, Measured, Measurement, measure_linear
from exl2nb.converter.pipeline import REPORT_FILE, ConversionRun, cut_rows
from exl2nb.converter.quantization import QuantizedLayers
from exl2nb.converter.result import Conversion, Quality, QuantizedMatrix, mean_interval
from exl2nb.converter.rounding import dense_weight, quantize_stored
from exl2nb.converter.sensitivity import Levels, Probe, blend_weights, block_products
from exl2nb.converter.settings import ConversionSettings, describe_device
from exl2nb.converter.sizes import Other
from exl2nb.converter.weights import files_fingerprint
from exl2nb.converter.work import ALGORITHM_REVISION, JobContext, Packed, hash_of
from exl2nb.core.errors import ConversionError, MissingDependency, OptionError, UnknownArchitecture
from exl2nb.io.hf_config import read_config
from exl2nb.io.shards import TensorStore
from exl2nb.model.layout import Linear
from exl2nb.model.writer import write_model
from exl2nb.quant.exl2 import MAX_IN_FEATURES, Exl2Tensors
from exl2nb.tokenizer.tokenizer import Tokenizer

STATISTICS_BYTES = 2 << 30  # of Hessians and couplings at once; more linears take more passes over the calibration rows
HALF_BYTES = 2 << 30  # of quantised matrices that are kept in fp16; further ones are reconstructed whenever they are used


@dataclass(eq=False)
class Found:
    """A linear of the model.

    linear: what it is called. module: of Transformers. transposed: whether the module stores the matrix transposed (Conv1D). packed: the
    matrix quantised. half: the same as f16 `(N, K)`.
    """

    linear: Linear
    module: nn.Module
    transposed: bool
    packed: Exl2Tensors | None = None
    half: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Dense, f32 `(N, K)`."""
        stored: Any = self.module.weight
        return (stored.detach().T if self.transposed else stored.detach()).float().contiguous()

    @property
    def bias(self) -> Tensor | None:
        """Dense, f32 `(N,)`."""
        stored: Any = self.module.bias
        return None if stored is None else stored.detach().float()

    def made(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The quantised matrix as f32 `(N, K)` and its bias."""
        assert self.packed is not None
        weight = dense_weight(self.packed, self.linear.out_features, device) if self.half is None else self.half.float()
        bias = None if self.packed.bias is None else self.packed.bias[: self.linear.out_features].float().to(device)
        return weight, bias

    def shrink(self) -> None:
        """Keep the dense matrix in 16 bits, if it came from there."""
        stored: Any = self.module.weight
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal((small := stored.data.to(dtype)).float(), stored.data):
                stored.data = small
                return

    def grow(self) -> None:
        """Undo `shrink`."""
        stored: Any = self.module.weight
        stored.data = stored.data.float()


class _Product(torch.autograd.Function):
    """x W^T + b, whose matrix exists only while it is used, forwards and backwards; its own gradient is not asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, used: Callable[[], tuple[Tensor, Tensor | None]]) -> Tensor:
        ctx.used = used
        return nn.functional.linear(x, *used())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ ctx.used()[0], None


class HubWeights:
    """A model and the same one with linears quantised, in the modules of the former; `quantised` says as which of the two it computes.

    Args:
        model: of Transformers, in fp32; its linears are changed. linears: of it. ids: int `(1, S)`, to try.
    """

    def __init__(self, model: Any, linears: Sequence[Found], ids: Tensor) -> None:
        self.model, self.quantised, self._half_bytes = model, False, 0
        self._device = next(model.parameters()).device
        shared, small = shared_parameters(model), list[Found]()
        for one in linears:
            stored: Any = one.module.weight
            if shared[stored.data_ptr()] == 1:
                one.shrink()
                small.append(one)
            one.module.forward = functools.partial(self._forward, one)
        try:
            forward_layers(model, ids)
        except RuntimeError:  # a matrix is also read directly, by code that expects fp32
            for one in small:
                one.grow()

    def _forward(self, one: Found, x: Tensor) -> Any:
        return _Product.apply(x, functools.partial(self._used, one))

    def _used(self, one: Found) -> tuple[Tensor, Tensor | None]:
        return one.made(self._device) if self.quantised and one.packed is not None else (one.weight, one.bias)

    def put(self, one: Found, packed: Exl2Tensors) -> None:
        """Quantise a linear of the second model."""
        one.packed = packed
        nbytes = 2 * one.linear.in_features * one.linear.out_features
        if self._half_bytes + nbytes <= HALF_BYTES:
            self._half_bytes += nbytes
            one.half = one.made(self._device)[0].half()  # exact: EXL2's matrices are fp16

    def logits(self, ids: Tensor, *, quantised: bool) -> Tensor:
        """f32 `(B, S, V)` of one of the two for ids int `(B, S)`."""
        self.quantised = quantised
        try:
            return forward_layers(self.model, ids)
        finally:
            self.quantised = False


def shared_parameters(model: Any) -> Counter[int]:
    """How many names each parameter's memory has."""
    return Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))


def load_with_transformers(src: Path, device: torch.device) -> nn.Module:
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
    shared = shared_parameters(model)
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
        forward_layers(model, ids)
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


def forward_layers(model: Any, ids: Tensor) -> Tensor:
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

    def tensors(self, layer: Sequence[Found], likeness: tuple[float, float]) -> dict[str, Tensor]:
        """What rounding a layer needs of them, to be filed; and `likeness`."""
        found = {f"{one.linear.key}.coupling": self.couplings[one.linear.key] for one in layer if one.linear.key in self.couplings}
        for one in layer:
            if parts := self.token_weights.get(one.linear.key):
                found[f"{one.linear.key}.tokens"] = torch.cat(parts)
                found[f"{one.linear.key}.lengths"] = torch.tensor([len(part) for part in parts])
        return {**found, "likeness": torch.tensor(likeness, dtype=torch.float64)}


def token_weights_of(filed: Mapping[str, Tensor], key: str) -> list[Tensor]:
    """What was filed of an input: f32 `(tokens,)` of every row; none where it was not read."""
    tokens, lengths = filed.get(f"{key}.tokens"), filed.get(f"{key}.lengths")
    return [] if tokens is None or lengths is None else list(tokens.split(lengths.tolist()))


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


def layers_of(linears: Sequence[Found]) -> list[list[Found]]:
    """Linears in their order, those of one layer together."""
    return [list(part) for _, part in itertools.groupby(linears, lambda one: (one.linear.layer, one.linear.role == "head"))]


def row_chunks(layers: Sequence[list[Found]]) -> Iterator[range]:
    """Layers by their place, as many together as STATISTICS_BYTES allow."""
    first = size = 0
    for place, layer in enumerate(layers):
        needed = sum(8 * one.linear.in_features**2 + 12 * one.linear.out_features * coupled_block(one.linear.out_features) for one in layer)
        if place > first and size + needed > STATISTICS_BYTES:
            yield range(first, place)
            first, size = place, 0
        size += needed
    yield range(first, len(layers))


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
            products = block_products(flat).double()
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
                logprobs = forward_layers(model, row)[0].log_softmax(-1)
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
        found.token_weights[name] = list(blend_weights(torch.cat(parts)).split([len(part) for part in parts]))
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


def targets_of(twin: HubWeights, linears: Sequence[Found], rows: Rows, filed: Mapping[str, Tensor] | None, *, asymmetric: bool) -> Targets:
    """Moments of what some linears read in the model as it is quantised so far, and with `asymmetric` in the dense one too.

    filed: what `Statistics.tensors` made of them; None: all tokens count alike.
    """
    moments, cross, source = Moments(), Moments(), dict[str, str]()
    waiting, wanted, other_tokens = set[str](), dict[str, Tensor](), set[str]()
    place = 0

    def react(one: Found, name: str, x: Tensor, _: Tensor) -> None:
        if name == one.linear.key:
            if twin.quantised:
                add(name, x)
            else:
                wanted[name] = x
        if twin.quantised:
            source[one.linear.key] = name
        waiting.discard(one.linear.key)
        if not waiting:
            raise _Enough

    def add(name: str, x: Tensor) -> None:
        known = token_weights_of(filed or {}, name)  # of an expert: of other tokens, where the routing has changed
        weight = known[place].to(x.device) if place < len(known) and len(known[place]) == len(x) else None
        moments.add(name, x, weight)
        if name in wanted and len(wanted[name]) == len(x):
            cross.add_cross(name, x, wanted[name] - x, weight)
        else:
            other_tokens.add(name)

    watch = _Inputs(linears, react)
    try:
        for place in range(rows.used):
            wanted.clear()
            for quantised in (False, True) if asymmetric else (True,):
                watch.restart()
                waiting = {one.linear.key for one in linears}
                with suppress(_Enough):
                    twin.logits(rows.hessians[place : place + 1], quantised=quantised)
    finally:
        watch.close()
    both = {name: found for name, found in cross.hessians().items() if name not in other_tokens}
    return Targets(moments.hessians(), both, source)


class GenericPipeline(ConversionRun[JobContext]):
    """One run of such a conversion; the same calls as `pipeline.Pipeline`."""

    def __init__(self, settings: ConversionSettings, src: Path, dst: Path, device: torch.device, context: JobContext) -> None:
        super().__init__(settings, src, dst, device, context)
        if settings.vision_bits is not None:
            raise OptionError(f"convert: vision_bits is {settings.vision_bits}, which needs a vision tower that exl2nb knows; leave it out")
        if settings.polish:
            raise OptionError("convert: polish is True, which needs an architecture of exl2nb's own table; leave polish out")
        if settings.calibration == SELF_TEXT:
            raise OptionError("convert: calibration is 'self', which needs an architecture of exl2nb's own table; give text")
        self.config = read_config(src)
        if self.config.get("quantization_config"):
            raise ConversionError(f"{src}: found a quantised model, expected a dense one; convert the model it was made from")
        with context.meter("calibrate", total=1, unit="models") as meter:
            self.model: Any = load_with_transformers(src, device)
            what = f"{type(self.model).__name__} is not in exl2nb's table: converting it linear by linear, through Transformers"
            meter.step(detail=what)
        text: Any = self.model.config.get_text_config()
        self.length = min(settings.length, int(getattr(text, "max_position_embeddings", None) or settings.length))
        self._vocabulary = int(text.vocab_size)

    def everything(self) -> Conversion:
        """All stages."""
        rows = self.timed("calibrate", self.calibrate)
        twin, layers = self._found(rows)
        self.check_names([one.linear for layer in layers for one in layer])
        measurement, key = self.timed("measure", lambda: self._measured(rows, layers))
        allocation = self.timed("allocate", lambda: self.allocate(measurement))
        made = self.timed("quantize", lambda: self._quantize(rows, twin, layers, allocation, key))
        result = self.result(measurement, allocation, made, rows)
        self.timed("write", lambda: self._write([one for layer in layers for one in layer if one.packed is not None], result))
        self.context.work.forget(made.key, len(layers))
        return self.finished(result)

    def measure(self) -> Measurement:
        """Only the measurement."""
        rows = self.calibrate()
        return self._measured(rows, self._found(rows)[1])[0]

    def calibrate(self) -> Rows:
        """Calibration rows, and rows for the report."""
        asked = self.settings
        with self.context.meter("calibrate", total=1, unit="texts") as meter:
            source = MIXED_TEXT if asked.calibration is None else asked.calibration
            rows = Rows.of(*cut_rows(Tokenizer.load(self.src), source, asked, self.length))
            highest = max(int(part.max()) for part in (rows.calibrating, rows.report) if part.numel())
            if highest >= self._vocabulary:
                raise ConversionError(
                    f"{self.src}: the tokenizer gives id {highest}; expected 0 to {self._vocabulary - 1}: it belongs to another model"
                )
            meter.step(detail=f"rows of {self.length} tokens from {rows.name}; computing on {describe_device(self.device)}")
        return rows

    def _found(self, rows: Rows) -> tuple[HubWeights, list[list[Found]]]:
        linears = find_linears(self.model, rows.hessians[:1])
        return HubWeights(self.model, linears, rows.hessians[:1]), layers_of(linears)

    def _measured(self, rows: Rows, layers: Sequence[list[Found]]) -> tuple[Measurement, str]:
        """The measurement given, the one in the work folder, or a new one; and the key of the statistics on these rows."""
        work, seed = self.context.work, self.settings.seed
        fingerprint = self._fingerprint()
        known = self.given_measurement(fingerprint)
        ids = rows.calibrating.numpy().tobytes()
        key = hash_of("generic", ALGORITHM_REVISION, FORMAT_VERSION, fingerprint, ids, rows.used, seed, ANCHOR_CODINGS)
        known = work.load_measurement(key) if known is None else known
        if known is not None and work.has_statistics(key, len(layers)):
            return known, key
        measured, likeness = dict[str, Measured](), (0.0, 0.0)
        parts = list(row_chunks(layers))
        total = len(parts) * len(rows.calibrating) + sum(map(len, layers))
        with self.context.steps("measure", total=total, unit="steps") as step:
            for part in parts:
                found = self._measure(rows, [layers[place] for place in part], part, key, step, again=known is None)
                measured |= found[0]
                likeness = found[1]
        check_like(*likeness, rows.name)
        if known is not None:
            return known, key
        if layers[-1][-1].linear.key not in measured or len(measured) < 2:
            raise ConversionError(f"{self.src}: no gradient reaches the model's linears; expected a decoder that reads input_ids")
        facts = {**rows.facts(), "split": rows.split(), "seed": seed, "loss": likeness[0], "entropy": likeness[1]}
        made = Measurement(
            key=key,
            linears=measured,
            fingerprint=fingerprint,
            others=tuple(
                Other(name, tuple(tensor.shape), tensor.dim() == 1 and layer_of(name) >= 0) for name, tensor in self._others(measured)
            ),
            calibration=facts,
        )
        work.save_measurement(made, len(layers))
        return made, key

    def _measure(
        self, rows: Rows, layers: Sequence[list[Found]], places: range, key: str, step: Callable[[str], None], *, again: bool
    ) -> tuple[dict[str, Measured], tuple[float, float]]:
        """Some layers and what the text is like; those that a run before this one filed are taken over.

        again: measure; otherwise only the statistics are needed.
        """
        work, count = self.context.work, len(rows.calibrating) + sum(map(len, layers))
        filed = [work.load_statistics(key, place) for place in places]
        done = [work.load_part(key, place) if again else {} for place in places]
        whole = [(tensors, linears) for tensors, linears in zip(filed, done) if tensors is not None and linears is not None]
        if len(whole) == len(layers):
            for _ in range(count):
                step("taken over")
            loss, entropy = whole[0][0]["likeness"].tolist()
            return {name: one for _, linears in whole for name, one in linears.items()}, (loss, entropy)
        statistics, likeness = statistics_of(self.model, [one for layer in layers for one in layer], rows, self.settings.seed, step)
        made = dict[str, Measured]()
        for place, layer in zip(places, layers):
            work.save_statistics(key, place, statistics.tensors(layer, likeness))
            here, factors = dict[str, Measured](), dict[str, Any]()
            for one in layer:
                name = one.linear.key
                step(name)
                if not again or name not in statistics.source or name not in statistics.gradients:
                    continue
                source = statistics.source[name]
                if source not in factors:
                    factors = {source: factorize(statistics.hessians[source], name=f"input of {source}")}
                hessian, gradient = statistics.hessians[source], statistics.gradients[name]
                here[name] = measure_linear(one.linear, one.weight, factors[source], hessian, gradient)
            if again:
                work.save_part(key, place, here)
            made |= here
        return made, likeness

    def _quantize(
        self, rows: Rows, twin: HubWeights, layers: Sequence[list[Found]], allocation: Allocation, statistics: str
    ) -> QuantizedLayers:
        """Layer by layer, each on what the model quantised so far gives it; those in the work folder are taken over."""
        work, choices = self.context.work, {choice.key: choice for choice in allocation.choices}
        made = QuantizedLayers(hash_of("generic", statistics, self.settings.rounding, list(allocation.groups().items())))
        with self.context.meter("quantize", total=len(layers), unit="layers") as meter:
            for place, layer in enumerate(layers):
                self.context.check()
                chosen = [one for one in layer if one.linear.key in choices]
                packed = work.load(made.key, place, {one.linear.key: one.linear for one in chosen})
                if packed is None:
                    packed = self._quantize_layer(rows, twin, chosen, choices, work.load_statistics(statistics, place))
                    work.save(made.key, place, packed)
                else:
                    made.resumed += 1
                for one in chosen:  # together: they were rounded on the same inputs
                    linear, (tensors, loss) = one.linear, packed[one.linear.key]
                    twin.put(one, tensors)
                    shape = (linear.in_features, linear.out_features)
                    predicted_kl = choices[linear.key].predicted_kl
                    made.matrices.append(
                        QuantizedMatrix(linear.key, linear.role, linear.layer, *shape, tuple(tensors.groups), predicted_kl, loss)
                    )
                meter.step(detail=f"layer {layer[0].linear.layer}" if layer[0].linear.role != "head" else "head")
        if len(rows.report):
            made.quality = self._judge(twin, rows.report)
        return made

    def _quantize_layer(
        self, rows: Rows, twin: HubWeights, layer: Sequence[Found], choices: Mapping[str, MatrixChoice], filed: Mapping[str, Tensor] | None
    ) -> Packed:
        if filed is None:
            raise ConversionError(f"{self.context.work.directory}: statistics of a layer are gone; run the conversion again")
        rounding, packed = self.settings.rounding, Packed()
        targets = targets_of(twin, layer, rows, filed if rounding.weighted else None, asymmetric=bool(rounding.strength))
        factors = {name: factorize(hessian, damping=rounding.damping, name=name) for name, hessian in targets.hessians.items()}
        for one in layer:
            key, name = one.linear.key, targets.source[one.linear.key]
            products = filed.get(f"{key}.coupling") if rounding.coupled else None
            coupling = None if products is None else couple_outputs(products.to(self.device))
            bias = None if one.bias is None else one.bias.half()
            stored = factors[name].stored(one.weight, targets.cross.get(name), rounding.strength)
            packed[key] = quantize_stored(stored, factors[name], choices[key].groups, bias=bias, coupling=coupling)
        return packed

    def _judge(self, twin: HubWeights, ids: Tensor) -> Quality:
        kls, same, nlls = [], 0, ([], [])
        for row in ids:
            self.context.check()
            before, after = (twin.logits(row[None], quantised=one)[0].log_softmax(-1).cpu() for one in (False, True))
            kls.append(float((before.exp() * (before - after)).sum(-1).mean(dtype=torch.float64)))
            same += int((before.argmax(-1) == after.argmax(-1)).sum())
            for nll, logprobs in zip(nlls, (before, after)):
                nll.append(-float(logprobs[:-1].gather(-1, row[1:, None].long()).mean(dtype=torch.float64)))
        kl, low, high = mean_interval(kls)
        source, own = (math.exp(min(700.0, sum(nll) / len(nll))) for nll in nlls)
        return Quality(len(ids), ids.shape[1], kl, low, high, same / ids.numel(), own, source)

    def _others(self, linears: Any) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are stored as they are: each once, weights and biases of `linears` (by key) left out."""
        seen: set[int] = set()
        taken = {f"{key}.{part}" for key in linears for part in ("weight", "bias")}
        for name, tensor in self.model.state_dict().items():
            if name not in taken and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def _write(self, linears: Sequence[Found], result: Conversion) -> None:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._others({one.linear.key for one in linears}):
                half = tensor.half()
                exact = not tensor.is_floating_point() or not torch.isfinite(half).all()
                yield name, (tensor if exact else half).cpu().contiguous()
            for one in linears:
                assert one.packed is not None
                yield from one.packed.tensors(one.linear.key).items()

        with self.context.meter("write", total=1, unit="models") as meter:
            report = {REPORT_FILE: (json.dumps(result.to_dict(), indent=1) + "\n").encode()}
            write_model(
                self.dst, tensors(), config=self.config, source_dir=self.src, quantization_config=self.written(result), extra=report
            )
            meter.step(detail=str(self.dst))

    def _fingerprint(self) -> str:
        with TensorStore(self.src) as store:
            return files_fingerprint(store.files, self.src)
