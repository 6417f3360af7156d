"""How much each output of each linear matters to the model's predictions: one backward sweep. Knows nothing of bits.

For random changes v of the logits with E[v v^T] = diag(p) - p p^T, the gradient g of v^T logits at a linear's output has E[g g^T] = Fisher
information, and a small change d of that output costs KL = (g^T d)^2 / 2 on average. So a changed matrix dW costs about
tr(G dW^T H dW) / 2, where G = mean g g^T over the outputs and H = sum of x x^T weighted by the token's |g|^2: tokens without effect on the
prediction do not count. G's diagonal is the cost of a column's error; its other entries say which columns' errors cancel each other, which
the rounding uses (hessian.couple).

The weights are heavy-tailed, so a few tokens would dominate; half of each weight is therefore the same for all (held-out KL of
the demo model, 3 bits, 32 rows: 0.2755 unweighted, 0.2746 fully weighted, 0.2677 half and half).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exl2nb.converter import experts
from exl2nb.converter.hessian import (
    Moments,
    advance_stream,
    check_finite,
    coupled_block,
    role_inputs,
    row_batches,
    stride_of,
    strip_expert,
    symmetric_moment,
)
from exl2nb.converter.streams import STREAM_BYTES, DiskStream, Stream, copy_to_disk, new_stream
from exl2nb.converter.weights import DenseWeights
from exl2nb.io.atomic import free_bytes
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears

Step = Callable[[str], None]
HEAD_INPUT = "head"
SIGN_OFFSETS = 4099  # at which a token's signs may begin in the table of them
HOST_BYTES = 6 << 30  # of a GPU's streams that are kept on the host, where they are more than STREAM_BYTES
DISK_BYTES = 16 << 30  # of those for which memory has no room, at most half of what the disk has; what does not fit is computed twice
WORKING_STREAMS = 3  # streams besides the stored ones: a layer's input, its output, the gradient


@dataclass(frozen=True)
class LayerStatistics:
    """One layer of the dense model on the calibration rows, or the head (layer -1).

    Of the rows for Hessians: hessians: input name -> f64 `(K, K)`, weighted by token. token_weights: input name without its expert -> f32
    `(tokens,)`, mean 1. couplings: linear key -> f32 `(N / B, B, B)`, mean products of gradients within blocks of outputs; experts have
    none. visits: tokens that chose each expert. likeness: of the head, mean loss and mean entropy of the predictions of all rows, nats per
    token. Of the rows for sensitivity: gradients: linear key -> f64 `(N,)`, mean squared gradient of
    each output.
    """

    layer: int
    hessians: dict[str, Tensor]
    token_weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    couplings: dict[str, Tensor]
    visits: tuple[int, ...] = ()
    likeness: tuple[float, float] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What quantising the layer needs later, by name."""
        weights = {f"{self.layer}.{name}": weight.cpu() for name, weight in self.token_weights.items()}
        return {**weights, **{f"{key}.coupling": coupling.cpu() for key, coupling in self.couplings.items()}}


def sweep_layers(
    weights: DenseWeights, ids: Tensor, *, used: int, seed: int, step: Step, directory: Path | None = None
) -> Iterator[LayerStatistics]:
    """Run the dense model forwards, then backwards layer by layer.

    Args:
        ids: int `(rows, S)`.
        used: how many of the first rows are for Hessians; the rest is for sensitivity. If none is left, all rows serve for both.
        seed: of the random changes.
        step: called with a line of text after every layer and direction (2 * num_layers + 1 times).
        directory: for streams too large for memory; None: all are in memory.

    Yields:
        LayerStatistics: the head's, then the layers', last first.

    Raises:
        ConversionError: activations that are not finite; the disk is full.

    Cost: the residual stream before every layer, `num_layers * rows * S * H` floats: STREAM_BYTES of them in memory (for a GPU: HOST_BYTES
    on the host), the others in files. Where the disk has too little for that, as many as fit, at least about `2 * sqrt(num_layers)`, and
    the layers in between run once more.
    """
    config, device, layers = weights.config, weights.device, weights.config.num_layers
    shape = (*ids.shape, config.hidden_size)

    def fresh() -> Stream:
        return new_stream(shape, device, beside=WORKING_STREAMS, directory=directory)

    kept = KeptStreams.of(shape, layers, device, directory)
    x, ends = fresh(), weights.ends()
    for part in row_batches(config, x, 0, len(x)):
        x[part] = reference.embed(config, ends, ids[part].to(device))
    del ends  # of a model with a large vocabulary they are GBs
    for layer in range(layers):
        if layer % kept.every == 0:
            kept.put(layer, x)
        x = advance_stream(config, layer, weights.layer(layer, then=layer + 1), x, fresh())
        for part in row_batches(config, x, 0, len(x)):
            check_finite(x[part], f"layer {layer}: its output on the calibration rows")
        step(f"forward, layer {layer}")
    gradient, ends = fresh(), weights.ends(embedding=False)
    statistics = _head_statistics(config, ends, x, ids, used, torch.Generator().manual_seed(seed), gradient)
    del ends, x
    step("loss")
    yield statistics
    del statistics  # memory holds the Hessians of one layer only
    for layer in reversed(range(layers)):
        first = layer - layer % kept.every
        for missing in range(first, layer):
            if missing + 1 not in kept:
                kept.put(missing + 1, advance_stream(config, missing, weights.layer(missing), kept.get(missing), fresh()))
        statistics = _layer_statistics(config, layer, weights.layer(layer, then=layer - 1), kept.take(layer), used, gradient)
        yield statistics
        del statistics
        step(f"backward, layer {layer}")


def kept_spacing(nbytes: int, layers: int, room: int) -> int:
    """Every how many layers a stream of `nbytes` is kept; those in between are there one stretch at a time."""
    most = max(1, math.isqrt(layers))
    return next((every for every in range(1, most) if (-(-layers // every) + every - 1) * nbytes <= room), most)


def kept_streams(nbytes: int, layers: int, room: int = STREAM_BYTES) -> int:
    """How many streams of `nbytes` a sweep keeps at the same time, at most."""
    every = kept_spacing(nbytes, layers, room)
    return -(-layers // every) + every - 1


class KeptStreams:
    """Streams by the layer that reads them: as many as memory holds, the others in files.

    Args:
        where: the device in whose memory they are kept. used: where they are wanted.
        every: of how many layers one is kept.
        room: bytes of memory.
        directory: for files; None: everything in memory.
    """

    def __init__(self, where: torch.device, used: torch.device, *, every: int = 1, room: int = 0, directory: Path | None = None) -> None:
        self._where, self._used, self._room, self._directory = where, used, room, directory
        self._streams = dict[int, Stream]()
        self.every = every

    @classmethod
    def of(cls, shape: tuple[int, ...], layers: int, used: torch.device, directory: Path | None) -> KeptStreams:
        """For the streams of a model with `layers` layers."""
        nbytes = 4 * math.prod(shape)
        away = used.type == "cuda" and nbytes * layers > STREAM_BYTES
        room = HOST_BYTES if away else STREAM_BYTES
        disk = 0 if directory is None else min(DISK_BYTES, free_bytes(directory / "stream") // 2)
        every = kept_spacing(nbytes, layers, room + max(0, disk))
        return cls(torch.device("cpu") if away else used, used, every=every, room=room, directory=directory)

    def __contains__(self, layer: int) -> bool:
        return layer in self._streams

    def put(self, layer: int, x: Stream) -> None:
        """Keep the stream that a layer reads."""
        if isinstance(x, Tensor) and (self._directory is None or x.nbytes <= self._room):
            self._room -= x.nbytes
            self._streams[layer] = x.to(self._where)
        else:
            assert self._directory is not None, layer
            self._streams[layer] = copy_to_disk(x, self._directory)

    def get(self, layer: int) -> Stream:
        """It."""
        found = self._streams[layer]
        return found if isinstance(found, DiskStream) else found.to(self._used)

    def take(self, layer: int) -> Stream:
        """It, kept no longer."""
        found = self.get(layer)
        if isinstance(self._streams.pop(layer), Tensor):
            self._room += found.nbytes
        return found


def _head_statistics(
    config: ModelConfig, ends: Mapping[str, Tensor], x: Stream, ids: Tensor, used: int, generator: torch.Generator, gradient: Stream
) -> LayerStatistics:
    """Statistics of the head's matrix; the gradient of one random change of the logits per token at the last stream goes to `gradient`.

    The head needs no such change: a change d of the logits costs (sum p d^2 - (sum p d)^2) / 2, of which p (1 - p) is the diagonal.
    """
    key, moments, levels = config.names.head, Moments(), Levels()
    square = torch.zeros((), dtype=torch.float64, device=x.device)
    probe = Probe(config.vocab_size, generator, x.device)
    loss_sum = entropy_sum = 0.0
    for place in range(len(x)):
        with torch.enable_grad():
            leaf = x[place : place + 1][0].detach().requires_grad_(True)
            normed = reference.final_norm(config, ends, leaf)
            logprobs = reference.head(config, ends, normed).log_softmax(-1)
            probs = logprobs.detach().exp()
            loss = (logprobs * probe(probs)).sum()
        gradient[place : place + 1] = torch.autograd.grad(loss, leaf)[0][None]
        found = logprobs.detach()[:-1]
        loss_sum -= float(found.gather(-1, ids[place, 1:, None].long().to(x.device)).sum(dtype=torch.float64))
        entropy_sum -= float((probs[:-1] * found).sum(dtype=torch.float64))
        spread = probs.mul_(1 - probs)
        if place >= used or used == len(x):
            square = square + spread.sum(0, dtype=torch.float64)
        if place < used:
            levels.add(moments, HEAD_INPUT, normed, spread.sum(1), used * x.shape[1])
    return LayerStatistics(
        layer=-1,
        hessians=moments.hessians(),
        token_weights={},
        likeness=(loss_sum / (len(x) * (x.shape[1] - 1)), entropy_sum / (len(x) * (x.shape[1] - 1))),
        gradients={key: square * config.logit_scale**2 / (_count_judging_rows(x, used) * x.shape[1])},
        couplings={},
    )


def _count_judging_rows(x: Stream, used: int) -> int:
    """How many rows of x are for sensitivity."""
    return len(x) - used or used


def _layer_statistics(
    config: ModelConfig, layer: int, weights: Mapping[str, Tensor], x: Stream, used: int, gradient: Stream
) -> LayerStatistics:
    """Statistics of one layer; the gradient at its input takes the place of the one given."""
    linears = layer_linears(config, layer)
    roles = {linear.key: role for role, linear in linears.items()}
    names = role_inputs(linears)
    count, moments, levels = used * x.shape[1], Moments(), Levels()
    sample = experts.RoutedSample(config, layer, count)
    products: dict[str, Tensor] = {}
    squares = {linear.key: torch.zeros(linear.out_features, dtype=torch.float64, device=x.device) for linear in linears.values()}
    tokens: dict[str, list[Tensor]] = {}
    for place in (*row_batches(config, x, 0, used), *row_batches(config, x, used, len(x))):
        part, upper, tape = x[place], gradient[place], _Tape()
        with torch.enable_grad(), tape, repeatable_attention(x):
            leaf = part.detach().requires_grad_(True)
            out = reference.block(config, layer, weights, leaf, tape.capture)
            change = (out * upper).sum()  # its gradient at out is upper; to hand that over instead would import a second of sympy
        with repeatable_attention(x):
            gradient[place] = torch.autograd.grad(change, leaf)[0]
        del out, change
        if place.start >= used or used == len(x):
            for key in roles.keys() & tape.gradients.keys():  # of the linears: the router, which stays as it is, was captured too
                squares[key] += tape.gradients[key].flatten(0, -2).square().sum(0, dtype=torch.float64)
        if place.start >= used:
            continue
        weight: dict[str, Tensor] = {}
        everyone = {strip_expert(name): part.new_zeros(part.shape[0] * part.shape[1]) for name in names.values()}
        for key, role in roles.items():
            if key not in tape.gradients:  # an expert that no token of this batch visits
                continue
            found = tape.gradients[key].flatten(0, -2)
            if "." not in role:
                products[key] = products.get(key, 0) + block_products(found).double()
            value, rows, total = found.square().sum(1), tape.inputs[key][1], everyone[strip_expert(names[role])]
            weight[names[role]] = weight.get(names[role], 0) + value
            total.add_(value) if rows is None else total.index_add_(0, rows, value)
        for name, value in weight.items():
            levels.add(moments, name, tape.inputs[linears[name].key][0].flatten(0, -2), value, 1 if "." in name else count)
        for name, value in everyone.items():
            tokens.setdefault(name, []).append(value)
        sample.see({key: value for key, (value, _) in tape.inputs.items()})
    moe = config.experts(layer)
    products = {key: product / count for key, product in products.items()}
    gradients = {key: square / (_count_judging_rows(x, used) * x.shape[1]) for key, square in squares.items()}
    return LayerStatistics(
        layer=layer,
        hessians=sample.complete(weights, moments.hessians(), moments.tokens),
        token_weights={name: blend_weights(torch.cat(parts)) for name, parts in tokens.items()},
        gradients=experts.level_expert_gradients(gradients, roles),
        couplings={key: product.float() for key, product in products.items()},
        visits=tuple(moments.tokens.get(f"gate.{expert}", 0) for expert in range(moe.num_experts if moe is not None else 0)),
    )


def repeatable_attention(x: Stream) -> AbstractContextManager[object]:
    """Attention whose gradients are the same every time; CUDA's fused kernels add in any order."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH) if x.is_cuda else nullcontext()


class Probe:
    """Changes of logits v with E[v v^T] = diag(p) - p p^T, the curvature of the KL: sqrt(p) with random signs, less what moves all alike.

    The gradient of -log p of a label sampled from the model has the same covariance, but where the model is sure of a token, few rare
    labels with large gradients make it up. Demo model: sums of G over two sets of 8 rows differ by 5 % with labels and by 4 % with signs,
    couplings by 71 and 62 %, weights of tokens between two seeds by 67 and 46 %.
    """

    def __init__(self, size: int, generator: torch.Generator, device: torch.device) -> None:
        self._signs = (2 * torch.randint(2, (size + SIGN_OFFSETS,), generator=generator) - 1).float().to(device)
        self._size, self._generator = size, generator

    def __call__(self, probs: Tensor) -> Tensor:
        """The changes v of the next tokens' logits, `(tokens, V)` as their probabilities."""
        places = torch.randint(SIGN_OFFSETS, (len(probs),), generator=self._generator).to(probs.device)
        change = probs.sqrt() * self._signs.unfold(0, self._size, 1)[places]
        return change - probs * change.sum(-1, keepdim=True)


class Levels:
    """Adds tokens to moments, counted half alike and half by their weight.

    What is alike for all is the mean weight, which is known only at the end: that of an input's first batch is used instead.
    """

    def __init__(self) -> None:
        self._mean: dict[str, Tensor] = {}

    def add(self, moments: Moments, name: str, x: Tensor, weight: Tensor, tokens: int = 1) -> None:
        """Add tokens x `(n, K)` of weight `(n,)`; of `tokens` in all only as many as say enough about K directions."""
        stride = stride_of(tokens, x.shape[1])
        if name not in self._mean and float(mean := weight.mean()) != 0:
            self._mean[name] = mean
        moments.add(name, x[::stride], weight[::stride] / self._mean[name] + 1 if name in self._mean else torch.ones_like(weight[::stride]))


def block_products(gradient: Tensor) -> Tensor:
    """Sums of products within blocks of outputs: `(tokens, N)` -> f32 `(N / B, B, B)`."""
    if coupled_block(gradient.shape[1]) == gradient.shape[1]:
        return symmetric_moment(gradient)[None]
    blocks = gradient.unflatten(1, (-1, coupled_block(gradient.shape[1]))).transpose(0, 1)
    return blocks.transpose(1, 2) @ blocks


def blend_weights(weight: Tensor) -> Tensor:
    """Half proportional to `weight`, half the same for all; mean 1."""
    mean = weight.double().mean().float()
    return 0.5 + (0.5 * weight / mean if mean > 0 else torch.full_like(weight, 0.5))


@dataclass
class _Tape(TorchFunctionMode):
    """Keeps the input of every captured linear and the gradient at its output."""

    inputs: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    _pending: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def capture(self, key: str, value: Tensor, rows: Tensor | None = None) -> None:
        """Called before every linear. rows: which tokens it sees, None for all."""
        self.inputs[key], self._pending = (value.detach(), rows), key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear and self._pending:
            out.register_hook(functools.partial(self._keep, self._pending))
            self._pending = ""
        return out

    def _keep(self, key: str, gradient: Tensor) -> None:
        self.gradients[key] = gradient
