"""Block-wise learning: what the file stores of one layer learns to give what the dense layer gives. Knows nothing of files or budgets.

After its matrices are rounded, codes, largest steps, norms and biases of a layer learn together (Adam, straight-through): on inputs of the
model quantised so far, its output approaches the dense model's stream. Errors of one matrix are so made up for by the others of the layer,
and errors of layers before it by this one. The next layer is rounded on what comes out. One layer is in memory at a time.

An error d of a token's output costs d M d^T times the token's weight, M the mean products of the gradients of the KL at the output: the
sweep has both already, as coupling and token weights of the last matrix of the layer (converter.sensitivity). After every part of the way
the layer is judged on rows for choosing; the best one is taken, and if none is better than the beginning, that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl2nb.converter.calibration import Rows
from exl2nb.converter.grid import Adam, Grid, learning_rate_shares, loaded_tensors
from exl2nb.converter.hessian import ROWS_PER_BATCH, gpu_rows, row_batches
from exl2nb.converter.sensitivity import repeatable_attention
from exl2nb.converter.streams import Stream
from exl2nb.converter.work import Packed
from exl2nb.core.errors import ConversionError
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears, layer_vectors

Weights = dict[str, Tensor]
STEP_TOKENS = 1024  # tokens per optimizer step
MIN_PASS_STEPS = 16  # least number of steps per pass, where there is little text
PER_WEIGHT = 48  # bytes: dense, latent, rounded, gradients, two moments, steps, what is kept
VALIDATION_INTERVALS = 4  # of the way: after each one the layer is judged
HISTORY_KEY = "history"
LOSS_EPS = 1e-30
GRADIENT_DAMPING = 0.2  # of the products of gradients, as a share of their mean
# how far a number may go if every gradient points the same way, over the square root of the steps of the way: of a step of the grid, or of
# its own size. Fewer steps that are longer let many codes change together, and the error grows
LEARNING_RATES = {"codes": 0.1, "scales": 0.005, "vectors": 0.0025}


@dataclass(frozen=True)
class Blocks:
    """passes: how often every row is seen. rows: to learn from besides those for Hessians, at most. seed: of their order."""

    passes: int
    rows: int = 0
    seed: int = 0


def further_rows(rows: Rows, blocks: Blocks) -> Tensor:
    """Rows that the streams carry besides those for Hessians and the report: for choosing, then to learn from."""
    there = {row.numpy().tobytes() for row in rows.hessians}
    more = [row for row in rows.tuning if row.numpy().tobytes() not in there][: blocks.rows]
    return torch.cat([rows.choosing, torch.stack(more)]) if more else rows.choosing


@dataclass(frozen=True)
class Learned:
    """One layer afterwards.

    packed: its matrices. vectors: its norms by name, f16, as they are stored. history: the error on rows for learning and on rows for
    choosing after each part, over that of the latter at the beginning, which is the first entry.
    """

    packed: Packed
    vectors: Weights
    history: tuple[tuple[float, float], ...]

    @property
    def chosen(self) -> int:
        """Which entry of the history was taken."""
        return min(range(len(self.history)), key=lambda at: self.history[at][1])

    def filed(self) -> Weights:
        """What a later run takes over besides the matrices."""
        return {**self.vectors, HISTORY_KEY: torch.tensor(self.history, dtype=torch.float64)}


@dataclass(frozen=True)
class Layerwise:
    """What block-wise learning found. passes: over the rows. layers: of each. alone: why the whole model did not learn, if so."""

    passes: int
    layers: tuple[Learned, ...]
    alone: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values: errors as shares of what rounding left."""
        found = [{"chosen": one.chosen, **dict(zip(("learned", "choosing"), one.history[one.chosen]))} for one in self.layers]
        return {"passes": self.passes, "alone": self.alone, "layers": found}

    def __str__(self) -> str:
        learned, choosing = (sum(one.history[one.chosen][at] for one in self.layers) / len(self.layers) for at in range(2))
        line = f"layer by layer: {learned:.3f} of the error that rounding left on its rows, {choosing:.3f} on rows for choosing"
        return f"{line}; to learn all at once {self.alone}" if self.alone else line


@dataclass(frozen=True)
class Metric:
    """What an error of the layer's output costs.

    products: f32 `(H / B, B, B)`, symmetric; None: all directions alike. tokens: of the rows that learn first, f32 `(rows * S,)`; None, and
    of all others: 1.
    """

    products: Tensor | None = None
    tokens: Tensor | None = None

    @classmethod
    def of(cls, config: ModelConfig, layer: int, statistics: Mapping[str, Tensor], *, coupled: bool, weighted: bool) -> Metric:
        """From the statistics of the sweep. Behind a norm the last matrix's gradients are not those of the stream: all directions alike."""
        last = layer_linears(config, layer)["down"].key
        found = None if config.post_norm or not coupled else statistics.get(f"{last}.coupling")
        tokens = statistics.get(f"{layer}.down") if weighted else None
        if found is not None:
            found = found.double()
            mean = float(found.diagonal(dim1=1, dim2=2).mean())
            if 0 < mean < math.inf:
                found = found / ((1 + GRADIENT_DAMPING) * mean)
                found.diagonal(dim1=1, dim2=2).add_(GRADIENT_DAMPING / (1 + GRADIENT_DAMPING))
                found = found.float()
            else:
                found = None
        return cls(found, tokens)

    def cost(self, error: Tensor, first: int) -> Tensor:
        """Of errors f32 `(rows, S, H)`, summed over tokens, mean over channels. first: row."""
        found = error.flatten(0, -2)
        if self.products is None:
            each = found.square().mean(-1)
        else:
            blocks = found.unflatten(1, (len(self.products), -1)).transpose(0, 1)
            each = (blocks @ self.products.to(found.device) * blocks).sum((0, 2)) / found.shape[1]
        begin = first * error.shape[1]
        if self.tokens is not None and begin < len(self.tokens):
            each = each * self.tokens[begin : begin + len(each)].to(each.device)
        return each.sum()


def needed_bytes(config: ModelConfig, device: torch.device, length: int) -> int:
    """Memory that a layer takes while it learns, streams not counted: its matrices several times over, activations of one batch."""
    layers = [layer_linears(config, layer).values() for layer in range(config.num_layers)]
    weights = max(sum(linear.in_features * linear.out_features for linear in layer) for layer in layers)
    most = max(1, STEP_TOKENS // length)
    rows = min(most, gpu_rows(config, length) if device.type == "cuda" else ROWS_PER_BATCH)
    inner = 20 * config.hidden_size + 14 * config.q_size + 12 * config.intermediate_size
    scores = 5 * config.num_heads * length if device.type == "cuda" else 0
    return PER_WEIGHT * weights + 4 * rows * length * (inner + scores)


class _Layer:
    """A quantised layer as tensors that learn."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Mapping[str, Tensor], packed: Packed, steps: int, device: torch.device
    ) -> None:
        self._linears = list(layer_linears(config, layer).values())
        self._losses = {key: loss for key, (_, loss) in packed.items()}
        self.grids = {
            line.key: Grid(packed[line.key][0], line.out_features, device, weights[f"{line.key}.weight"]) for line in self._linears
        }
        self.vectors = {name: weights[name].clone() for name in layer_vectors(config, layer)}
        travel = {part: far * math.sqrt(steps) for part, far in LEARNING_RATES.items()}
        learning: list[tuple[Tensor, Tensor | float]] = []
        for grid in self.grids.values():
            learning += [(grid.latent, travel["codes"]), (grid.scale_max, travel["scales"] * grid.scale_max.clone())]
            if grid.bias is not None:
                learning.append((grid.bias, travel["vectors"] * float(grid.bias.abs().mean())))
        learning += [(tensor, travel["vectors"] * float(tensor.abs().mean())) for tensor in self.vectors.values()]
        self.adam = Adam(learning)

    def weights(self) -> Weights:
        """All tensors of the layer as it is loaded; differentiable."""
        return loaded_tensors(self.grids, self.vectors)

    def keep(self) -> tuple[Weights, dict[str, Weights]]:
        """What the files will hold: vectors by name, and what `Grid.packed` takes, by key."""
        vectors = {name: tensor.detach().half().cpu() for name, tensor in self.vectors.items()}
        return vectors, {key: grid.keep() for key, grid in self.grids.items()}

    def packed(self, kept: dict[str, Weights]) -> Packed:
        """The matrices of what `keep` gave."""
        return {line.key: (self.grids[line.key].packed(kept[line.key]), self._losses[line.key]) for line in self._linears}


@dataclass(frozen=True)
class Learner:
    """How layers learn, and which rows of the streams are for what: for Hessians up to `used`; `choosing` of them from `first` on; to learn
    from what follows up to `rows`. step: called after every step with the share of the layer's way, and a line of text.
    """

    config: ModelConfig
    blocks: Blocks
    used: int
    first: int
    choosing: int
    rows: int
    step: Callable[[float, str], None]

    def metric(self, layer: int, statistics: Mapping[str, Tensor], *, coupled: bool, weighted: bool) -> Metric:
        """Of a layer's output. coupled, weighted: as of `Rounding`."""
        return Metric.of(self.config, layer, statistics, coupled=coupled, weighted=weighted)

    def of(self, layer: int, packed: Packed, more: Weights) -> Learned:
        """A layer that learned in a run before, of what `Learned.filed` gave."""
        history = tuple((learned, choosing) for learned, choosing in more[HISTORY_KEY].tolist())
        return Learned(packed, {name: more[name] for name in layer_vectors(self.config, layer)}, history)

    def learn(self, layer: int, weights: Mapping[str, Tensor], packed: Packed, inputs: Stream, wanted: Stream, metric: Metric) -> Learned:
        """One layer goes the whole way.

        Args:
            weights: of the dense layer.
            packed: its matrices, rounded.
            inputs: the quantised stream before the layer, f32 `(rows, S, H)`.
            wanted: the dense stream after it.
        """
        steps, choosing = self._steps(layer, inputs.shape[1]), slice(self.first, self.first + self.choosing)
        state = _Layer(self.config, layer, weights, packed, len(steps), inputs.device)
        block = _Block(self.config, layer, inputs, wanted, metric)
        share = learning_rate_shares(len(steps))
        before = best = block.error(state.weights(), choosing)
        kept, history = state.keep(), [(before, before)]
        for part in range(VALIDATION_INTERVALS):
            losses = []
            for at in range(len(steps) * part // VALIDATION_INTERVALS, len(steps) * (part + 1) // VALIDATION_INTERVALS):
                losses.append(block.step(state, steps[at], at, share[at]))
                self.step((at + 1) / len(steps), f"error {losses[-1] / max(before, LOSS_EPS):.3f} of what rounding left")
            found = block.error(state.weights(), choosing)
            history.append((sum(losses) / max(1, len(losses)), found))
            if found < best:
                best, kept = found, state.keep()
        relative = tuple((learned / max(before, LOSS_EPS), found / max(before, LOSS_EPS)) for learned, found in history)
        return Learned(state.packed(kept[1]), kept[0], relative)

    def _steps(self, layer: int, length: int) -> list[slice]:
        """Rows of every step: all once in each pass, in another order."""
        each = max(1, min(STEP_TOKENS // length, self.used // MIN_PASS_STEPS))
        parts = (0, self.used), (self.first + self.choosing, self.rows)
        runs = [slice(start, min(start + each, last)) for first, last in parts for start in range(first, last, each)]
        generator = torch.Generator().manual_seed(self.blocks.seed + layer)
        return [runs[at] for _ in range(self.blocks.passes) for at in torch.randperm(len(runs), generator=generator).tolist()]


@dataclass(frozen=True)
class _Block:
    """One layer's errors and their gradients."""

    config: ModelConfig
    layer: int
    inputs: Stream
    wanted: Stream
    metric: Metric

    def step(self, state: _Layer, rows: slice, at: int, share: float) -> float:
        """One step of Adam; returns the mean cost of a token."""
        with torch.enable_grad():
            made = state.weights()
        leaves = {name: tensor.detach().requires_grad_(True) for name, tensor in made.items()}
        total, loss = [torch.zeros_like(leaf) for leaf in leaves.values()], 0.0
        for part in row_batches(self.config, self.inputs, rows.start, rows.stop):
            with torch.enable_grad(), repeatable_attention(self.inputs):
                found = self._cost(leaves, part) / ((rows.stop - rows.start) * self.inputs.shape[1])
                for sums, gradient in zip(total, torch.autograd.grad(found, list(leaves.values()))):
                    sums += gradient
            loss += float(found.detach())
        if not math.isfinite(loss):
            raise ConversionError(f"layer {self.layer}: its error is {loss} at step {at}; expected a finite number; use effort='thorough'")
        state.adam.pace(at, share)
        state.adam.move(torch.autograd.grad(list(made.values()), state.adam.learning, total))
        return loss

    def _cost(self, weights: Mapping[str, Tensor], part: slice) -> Tensor:
        made = reference.block(self.config, self.layer, weights, self.inputs[part])
        return self.metric.cost(made - self.wanted[part], part.start)

    def error(self, weights: Mapping[str, Tensor], rows: slice) -> float:
        """Mean cost of a token."""
        with torch.no_grad():
            total = sum(float(self._cost(weights, part)) for part in row_batches(self.config, self.inputs, rows.start, rows.stop))
        return total / max(1, (rows.stop - rows.start) * self.inputs.shape[1])
