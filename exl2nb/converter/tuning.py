"""Tuning: what a quantised model's file holds learns from the dense model, end to end. Knows nothing of files or budgets.

The loss is the KL of the predictions, dense || quantised, on rows of the calibration text. Codes, largest steps, norms, biases and the
embedding learn together (Adam, straight-through), so errors of one layer are made up for by others; layer by layer no method sees that.
Rows for learning, for choosing and for the report share nothing. After every part of the way the model, rounded as the file will hold
it, is judged on the rows for choosing; the best one is taken, and if none is better than the beginning, that.

A number of gradients per code is little evidence. With N tokens and M codes, noise alone moves the estimate of a code's gradient by about
2 sqrt(M / 12 N) of what a change of it would have to gain: 2.2 for 11.5 million codes and 0.8 million tokens. So a code must collect
evidence before it changes (`converter.grid`), and what few numbers decide (steps, norms) is safe at any number of tokens.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from exl2nb.converter.calibration import Rows
from exl2nb.converter.grid import ADAM_EPS, Adam, Grid, learning_rate_shares, loaded_tensors, stack_grids
from exl2nb.converter.hessian import gpu_rows, row_batches
from exl2nb.converter.quantization import QuantizedLayers
from exl2nb.converter.result import Quality, judge_rows
from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import HEAD_LAYER, Context, Packed, hash_of
from exl2nb.converter.writing import SEED_TOKENS, write_rows, writing_bytes
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.core.options import check_flag, check_range
from exl2nb.core.show import size_text
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, end_vectors, head_linear, layer_linears, model_linears
from exl2nb.ops.gpu import capturing, fast_products, fast_products_on_cpu, half_products
from exl2nb.ops.memory_ops import kept_memory

Weights = dict[str, Tensor]
# rows of the whole way, if not told: a quarter of an hour of two cores and a minute of an H100; MAX_PASSES of the text at most, and up to
# MIN_ROWS_SEEN written by the model where the text lacks them: to learn from a token again takes the CPU less time than to write one
MAX_ROWS_SEEN = {"cpu": 5760, "cuda": 18432}
MAX_PASSES = {"cpu": 4, "cuda": 1}
MIN_ROWS_SEEN = {"cpu": 2560, "cuda": 18432}
MAX_WORK = 1e16  # weights times tokens of the way on a GPU: 8e16 FLOP, so that models of more than 1.06 billion weights see fewer rows
HIDDEN_LOSS_SHARE = {"cpu": 0.6, "cuda": 0.25}  # share of the loss: what many rows say by themselves, few do not
PRICE_TOKENS = 16384  # tokens that say what an error of a hidden state costs
MAX_ROW_TOKENS = {"cpu": 256, "cuda": 512}  # tokens of a row that is learned from, at most: attention takes a CPU less time
STEP_TOKENS = {"cpu": 4096, "cuda": 8192}  # of one step
MAX_INNER_NUMBERS_CPU = 1 << 22  # numbers of an MLP's widest activation at once on a CPU
FIRST_MOMENT_DECAY = 0.8  # of Adam's first moment
COSINE_POWER = {"cpu": 3, "cuda": 2}  # of the cosine by which steps become shorter
CODE_DAMPING = 0.15  # of codes in Adam
DAMPING_TOKENS = 2.9e6  # with at least so many tokens; higher with fewer (`damping_of`)
CHECKPOINT_VERSION = 8  # of what is filed after each part: one more where that, or the rule of a step, changes
VALIDATION_INTERVALS = 8  # of the way: after each one the model is judged and filed
VALIDATION_ROWS = 32  # rows
# how far a number may go if every gradient points the same way, over the square root of the steps: codes in steps
# of their grid, others in shares of their own size, times what share of the weights rounding errors are: 0.17 at 3 bits, 0.02 at 6.
# Gradients that are noise move it 1.2 times as far, whatever the number of steps: for a code a quarter of what changes it
LEARNING_RATES = {"codes": 0.1, "scales": 0.06, "vectors": 0.03, "embedding": 0.09}
BLOCKWISE_PASSES = 0  # of block-wise learning, before the whole model learns
BLOCKWISE_ONLY_PASSES = 8  # of block-wise learning, instead of it
PER_WEIGHT = 40  # bytes: dense, latent, rounded, gradient, two moments, steps, what is kept


@dataclass(frozen=True)
class Tuning:
    """What descends, what learns, and from how much. Each switch turns one part off, for ablations; with all of them off GPTQ sees the rows
    that it would see otherwise.

    descent: sweeps of coordinate descent over codes and scales of each matrix, before anything learns, at most (converter.descent); they
    bring less than learning for the same time.
    blocks: passes of block-wise learning of each layer after it is rounded, 0 for none (converter.blockwise); None: BLOCKWISE_PASSES, or
    BLOCKWISE_ONLY_PASSES where memory does not hold the whole model several times over. All further fields are about learning of the whole
    model at once.
    codes: of all matrices. scales: the largest step of each group. vectors: norms and biases. embedding: its table, and learned positions.
    hidden: share of the loss that is the error of the hidden states after every layer, priced by what the dense model's predictions say
    of it (`_Trainer`); the KL is the rest. None: HIDDEN_LOSS_SHARE, more of it where fewer rows are seen.
    seen: rows of the whole way; None: MAX_ROWS_SEEN, on a GPU fewer for a large model (`with_rows_seen`).
    rows: at most, from the calibration text; None: all there are, up to those seen. passes: how often every row of the text is seen,
    each time cut at other places, even if they are more than those seen; None: as often as it takes to those seen, up to MAX_PASSES.
    written: rows that the dense model writes itself (converter.writing), each seen once; None: as many as are missing to MIN_ROWS_SEEN, or
    to those seen.
    travel: how far a code may go, in steps of its grid over the square root of the steps of the way, if every gradient points the same
    way: above 0.1 less evidence changes a code.
    """

    descent: int = 0
    blocks: int | None = None
    codes: bool = True
    scales: bool = True
    vectors: bool = True
    embedding: bool = True
    rows: int | None = None
    passes: int | None = None
    written: int | None = None
    travel: float = LEARNING_RATES["codes"]
    seen: int | None = None
    hidden: float | None = None

    def __post_init__(self) -> None:
        for name in LEARNING_RATES:
            check_flag(f"Tuning: {name}", getattr(self, name))
        for name, value, low, high in (
            ("descent", self.descent, 0, 64),
            ("blocks", self.blocks, 0, 64),
            ("rows", self.rows, 1, 1 << 16),
            ("passes", self.passes, 1, 64),
            ("written", self.written, 0, 1 << 20),
            ("seen", self.seen, 1, 1 << 20),
        ):
            if (value is not None or name == "descent") and (type(value) is not int or not low <= value <= high):
                raise OptionError(f"Tuning: {name} is {value!r}; expected a whole number from {low} to {high}")
        check_range("travel", self.travel, 0.001, 10, where="Tuning")
        if self.hidden is not None:
            check_range("hidden", self.hidden, 0, 1, where="Tuning")

    def on(self, device: torch.device) -> Tuning:
        """The same with what depends on the kind of device filled in."""
        return replace(self, hidden=self.hidden if self.hidden is not None else HIDDEN_LOSS_SHARE[device.type])

    @property
    def learns(self) -> bool:
        """Whether anything learns end to end."""
        return any(getattr(self, name) for name in LEARNING_RATES)

    def most_rows(self, device: torch.device) -> int:
        """Rows of the text, at most."""
        return self.rows if self.rows is not None else self._seen(device)

    def _seen(self, device: torch.device) -> int:
        return self.seen if self.seen is not None else MAX_ROWS_SEEN[device.type]

    def to_write(self, rows: int, device: torch.device) -> int:
        """Rows that the dense model writes, where the text has given `rows`."""
        least = min(self._seen(device), MIN_ROWS_SEEN[device.type])
        return self.written if self.written is not None else max(0, least - self.repeated(rows, device))

    def steps(self, rows: int, length: int, device: torch.device) -> int:
        """Steps of the whole way."""
        written, (pieces, each) = self.to_write(rows, device), row_pieces(length, device)
        return -(-(self.repeated(rows, device) + written) * pieces // rows_per_step((rows + written) * pieces, each, device))

    def repeated(self, rows: int, device: torch.device) -> int:
        """Rows of the whole way that are the text's, where it has given `rows`: each `passes` times, or up to MAX_PASSES."""
        return self.passes * rows if self.passes is not None else min(MAX_PASSES[device.type] * rows, self._seen(device))


def row_pieces(length: int, device: torch.device) -> tuple[int, int]:
    """Pieces of a row of `length` tokens, and tokens of each, no more than MAX_ROW_TOKENS: what is learned from; a few at the end may be
    left.
    """
    pieces = -(-length // MAX_ROW_TOKENS[device.type])
    return pieces, length // pieces


def rows_per_step(rows: int, length: int, device: torch.device) -> int:
    """Rows of one step of `rows` different ones: STEP_TOKENS, fewer where there are few, so that a pass has VALIDATION_INTERVALS steps at
    least.
    """
    return max(1, min(STEP_TOKENS[device.type] // length, rows // VALIDATION_INTERVALS))


@dataclass(frozen=True)
class Tuned:
    """What the stage found. key: of the layers filed. vectors: norms and embedding by name, f16, as they are stored.

    written: rows that the dense model wrote. history: (step, KL on the rows just learned from, KL on the rows for choosing) after every
    part of the way, the beginning first. chosen: which of them was taken. quality, before: on the rows for the report. second_kl: of the
    text `second`, of another kind, before and after; None where there is none.
    """

    key: str
    vectors: Weights = field(repr=False)
    written: int
    history: tuple[tuple[int, float, float], ...]
    chosen: int
    quality: Quality | None
    before: Quality | None
    second: str
    second_kl: tuple[float, float] | None
    options: Tuning

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "options": asdict(self.options),
            "written": self.written,
            "history": [dict(zip(("step", "train_kl", "choosing_kl"), entry)) for entry in self.history],
            "chosen": self.chosen,
            "report_kl_before": None if self.before is None else self.before.kl,
            "second": self.second,
            "second_kl": None if self.second_kl is None else list(self.second_kl),
        }

    def __str__(self) -> str:
        _, train, choosing = self.history[self.chosen]
        line = f"tuned: KL {train:.5f} on its rows, {choosing:.5f} on rows for choosing (before {self.history[0][2]:.5f})"
        return line if self.second_kl is None else f"{line}; {self.second}: {self.second_kl[1]:.5f} (before {self.second_kl[0]:.5f})"


def needed_bytes(config: ModelConfig, device: torch.device, length: int) -> int:
    """Memory that tuning takes: every matrix several times over, and the activations of one batch through all layers, or writing."""
    weights = sum(linear.in_features * linear.out_features for linear in model_linears(config))
    vectors = sum(math.prod(shape) for shape in end_vectors(config).values())
    each = row_pieces(length, device)[1]
    rows = min(max(1, STEP_TOKENS[device.type] // each), _rows_at_once(config, each, device))
    inner = 20 * config.hidden_size + 14 * config.q_size + 12 * config.intermediate_size
    scores = 2 * config.num_heads * each
    activations = 4 * rows * each * (config.num_layers * (inner + scores) + 8 * config.vocab_size)
    return PER_WEIGHT * weights + 20 * vectors + max(activations, writing_bytes(config, length, device))


def _rows_at_once(config: ModelConfig, length: int, device: torch.device) -> int:
    """Rows of `length` tokens of which gradients are computed at once."""
    return gpu_rows(config, length) if device.type == "cuda" else max(1, MAX_INNER_NUMBERS_CPU // (config.intermediate_size * length))


def lacking_memory(config: ModelConfig, device: torch.device, length: int) -> str:
    """Why the whole model cannot learn at once, in words; empty where it can, or where nothing is known of the device."""
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else sys.maxsize
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = needed_bytes(config, device, length)
    return "" if needed <= 0.9 * there else f"needs {size_text(needed)} of memory, found {size_text(there)} on {device}"


def with_rows_seen(tuning: Tuning, config: ModelConfig, device: torch.device, length: int) -> Tuning:
    """The same with the rows of the whole way filled in: MAX_ROWS_SEEN, on a GPU so many that they are no more than MAX_WORK."""
    if tuning.seen is not None:
        return tuning
    work = length * sum(linear.in_features * linear.out_features for linear in model_linears(config))
    most = max(1, int(MAX_WORK / work)) if device.type == "cuda" else MAX_ROWS_SEEN[device.type]
    return replace(tuning, seen=min(MAX_ROWS_SEEN[device.type], most))


def fit_to_device(tuning: Tuning, config: ModelConfig, device: torch.device, length: int) -> tuple[Tuning, str]:
    """What of it this device can do, and why not more, in words: where the whole model cannot learn at once, its layers do one at a time.

    Raises:
        OptionError: the model has experts. ConversionError: the whole model does not fit, and its layers are not to learn.
    """
    if not tuning.learns and not tuning.blocks:
        return replace(tuning, blocks=0), ""
    if any(map(config.experts, range(config.num_layers))):
        raise OptionError("convert: effort 'tuned' and the model has experts, expected a dense one; use effort='thorough'")
    why = lacking_memory(config, device, length) if tuning.learns else ""
    if not why:
        return replace(tuning, blocks=BLOCKWISE_PASSES if tuning.blocks is None else tuning.blocks), ""
    if tuning.blocks == 0:
        raise ConversionError(
            f"convert: Tuning: blocks is 0, and to tune all layers at once {why}; leave blocks out, or use a device with more"
        )
    return replace(tuning, blocks=tuning.blocks or BLOCKWISE_ONLY_PASSES, **dict.fromkeys(LEARNING_RATES, False)), why


def damping_of(tokens: int) -> float:
    """Adam's damping of the codes: CODE_DAMPING from DAMPING_TOKENS tokens of the whole way on, in inverse proportion below, 1 at most.

    Gradients of codes that hardly matter are mostly noise if tokens are few. Demo model, 4 bits, KL 0.0337 before learning: after 0.32
    million tokens 0.0339 with a damping of 0.15 and 0.0310 with 1, after 2.9 million 0.0222 and 0.0227.
    """
    return min(1.0, CODE_DAMPING * max(1.0, DAMPING_TOKENS / max(1, tokens)))


class _Student:
    """The quantised model as tensors that learn, with Adam's moments.

    Args:
        made: with vectors that have learned. packed: matrices by key. dense: all tensors of the dense model by name, f32.
        steps, tokens: of the whole way.
    """

    def __init__(
        self, config: ModelConfig, made: QuantizedLayers, packed: Packed, dense: Weights, tuning: Tuning, steps: float, tokens: int
    ) -> None:
        device = dense[f"{config.names.embed}.weight"].device
        self.grids = {
            line.key: Grid(packed[line.key][0], line.out_features, device, dense[f"{line.key}.weight"]) for line in model_linears(config)
        }
        matrices = {f"{linear.key}.{part}" for linear in model_linears(config) for part in ("weight", "bias")}
        own = {name: tensor.to(device).float() for name, tensor in made.vectors.items()}
        self.vectors = {name: own.get(name, tensor).clone() for name, tensor in dense.items() if name not in matrices}
        names = config.names
        table = {f"{names.embed}.weight", f"{names.positions}.weight"}
        error = _relative_error(self.grids, dense)
        travel = {name: far * math.sqrt(steps) * error for name, far in LEARNING_RATES.items()} | {
            "codes": tuning.travel * math.sqrt(steps)
        }
        self.stacks = stack_grids(self.grids)
        codes = [stack for _, stack in self.stacks] if tuning.codes else []
        learning: list[tuple[Tensor, Tensor | float]] = [(stack.latent, travel["codes"]) for stack in codes]  # with how far each may go
        if tuning.scales:
            learning += [(stack.scale_max, travel["scales"] * stack.scale_max) for _, stack in self.stacks]
        if tuning.vectors:
            biases = [grid.bias for grid in self.grids.values() if grid.bias is not None]
            learning += [(bias, travel["vectors"] * float(bias.abs().mean())) for bias in biases]
        for name, tensor in self.vectors.items():
            part = "embedding" if name in table else "vectors"
            if getattr(tuning, part):
                learning.append((tensor, travel[part] * float(tensor.abs().mean())))
        self.adam = Adam(learning, pooled=len(codes), decay=FIRST_MOMENT_DECAY, damping=damping_of(tokens))

    def weights(self) -> Weights:
        """All tensors of the network as it is loaded; differentiable."""
        return loaded_tensors(self.grids, self.vectors, self.stacks)

    def keep(self) -> Weights:
        """What the files will hold, by key and part."""
        kept = {name: tensor.detach().half().cpu() for name, tensor in self.vectors.items()}
        for key, grid in self.grids.items():
            kept |= {f"{key}.{part}": tensor for part, tensor in grid.keep().items()}
        return kept

    def packed(self, kept: Weights, losses: Mapping[str, float]) -> Packed:
        """The matrices of what `keep` gave."""
        parts = ("codes", "scale_max", "bias")
        return {
            key: (grid.packed({part: kept[f"{key}.{part}"] for part in parts if f"{key}.{part}" in kept}), losses[key])
            for key, grid in self.grids.items()
        }


def _relative_error(grids: Mapping[str, Grid], dense: Weights) -> float:
    """Of all matrices together: root of the sum of squared errors over that of squared weights."""
    apart = whole = 0.0
    for key, grid in grids.items():
        weight = dense[f"{key}.weight"]
        apart += float((grid.weight() - weight).square().sum(dtype=torch.float64))
        whole += float(weight.square().sum(dtype=torch.float64))
    return math.sqrt(apart / whole) if whole else 0.0


def learned_rows(text: Tensor, count: int, written: Tensor, device: torch.device) -> Tensor:
    """Rows of the whole way: `count` of the text, pass by pass, each pass cut at other places, and those written."""
    (pieces, each), passes = row_pieces(text.shape[1], device), -(-count // max(1, len(text)))
    places = [-(each * at // passes) for at in range(passes)]
    rows = torch.cat([torch.cat([text.flatten().roll(place).view_as(text) for place in places])[:count], written])
    return rows[:, : pieces * each].reshape(-1, each)


class _Trainer:
    """The way from the beginning to the end, in parts.

    The loss is the KL, of which every token is one noisy sample, and for a share `hidden` of it its mean in advance: a relative error of
    the stream after a layer costs the KL half of error' price error to second order, where the price is the mean over tokens of the
    products of the gradients of a drawn prediction (the Fisher information). That is the same question with much less noise, but for its
    answer being that of all tokens alike: it pays where tokens are few.

    ids: int32 `(n, S)`, rows of the whole way, each seen once. each: rows of one step.
    """

    def __init__(
        self, config: ModelConfig, teacher: Weights, student: _Student, ids: Tensor, each: int, rows: Rows, seed: int, hidden: float
    ) -> None:
        self._config, self._teacher, self.student, self._rows, self._ids, self._each = config, teacher, student, rows, ids, each
        self._steps = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).split(self._each)
        self.parts = [round(len(self._steps) * part / VALIDATION_INTERVALS) for part in range(VALIDATION_INTERVALS + 1)]
        self.history: list[tuple[int, float, float]] = []
        self.best: Weights = {}
        self._replay: Callable[[Tensor], Tensor] | None = None
        self._aside: torch.cuda.Stream | None = None
        device = teacher[f"{config.names.embed}.weight"].device
        self._share = learning_rate_shares(len(self._steps), COSINE_POWER[device.type])
        self._attention = reference.DenseAttention(config, ids.shape[1], device)
        self._half, self._hidden = half_products(device), hidden
        count = max(1, min(PRICE_TOKENS // ids.shape[1], len(ids)))
        self._prices = stream_prices(config, teacher, ids[torch.arange(count) * (len(ids) // count)].to(device), seed) if hidden else []
        self._aimed = _last_stream(config, teacher, rows.choosing)

    def part(self, number: int, step: Callable[[str], None]) -> None:
        """Go one part of the way, and judge; number 0: only judge."""
        losses = []
        for at in range(self.parts[number - 1] if number else 0, self.parts[number]):
            losses.append(self._step(at))
            step(f"KL {losses[-1]:.5f}")
        choosing = mean_kl(self._config, self._teacher, self.student.weights(), self._rows.choosing, self._aimed)
        train = (
            sum(losses) / len(losses)
            if losses
            else mean_kl(self._config, self._teacher, self.student.weights(), self._ids[: len(self._rows.choosing)])
        )
        if not self.history or choosing < min(entry[2] for entry in self.history):
            self.best = self.student.keep()
        self.history.append((self.parts[number], train, choosing))

    def _step(self, at: int) -> float:
        ids = self._ids[self._steps[at]].to(self._teacher[f"{self._config.names.embed}.weight"].device)
        self.student.adam.pace(at, self._share[at])
        learn = (self._replay or self._recorded) if ids.is_cuda and len(ids) == self._each else self._learn
        loss = float(learn(ids))
        if not math.isfinite(loss):
            raise ConversionError(f"tune: the KL is {loss} at step {at}; expected a finite number; use effort='thorough'")
        return loss

    def _recorded(self, ids: Tensor) -> Tensor:
        """The first step on a GPU: as it is, and then recorded, so that all others are launched at once."""
        first, held, graph = self._learn(ids), ids.clone(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(ids.device)  # a model that generates in this process may allocate and wait meanwhile
        with capturing, torch.cuda.device(ids.device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = self._learn(held)

        def replay(ids: Tensor) -> Tensor:
            held.copy_(ids)
            graph.replay()
            return found

        self._replay = replay
        return first

    def _learn(self, ids: Tensor) -> Tensor:
        """One step on rows int `(n, S)`; the KL before it."""
        teacher, config = self._teacher, self._config
        with torch.enable_grad():
            made = self.student.weights()
        leaves = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in made.items()}
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        total, loss = list[Tensor | None]([None] * len(names)), torch.zeros((), device=ids.device)
        for rows in ids.split(_rows_at_once(config, ids.shape[1], ids.device)):
            with fast_products(ids.device):
                with self._beside(ids.device):
                    wanted, aimed = _forward_rows(config, teacher, rows, None if ids.is_cuda else self._attention, self._half)
                with torch.enable_grad():
                    predicted, streams = _forward_rows(config, leaves, rows, self._attention, self._half)
                    self._meet(ids.device)
                    each = row_divergence(wanted, predicted)
                    found, target = each.sum() / ids.numel(), levelled(each).sum() / ids.numel()
                    if self._prices:
                        errors = (relative_error(stream - aim, aim, config) for stream, aim in zip(streams, aimed))
                        with _bf16_products(self._half):
                            apart = sum(map(priced_error, errors, self._prices))
                        target = (1 - self._hidden) * target + self._hidden / (len(streams) * ids.numel()) * apart
                gradients = torch.autograd.grad(target, [leaves[name] for name in names], allow_unused=True)
            total = [one if sums is None else sums if one is None else sums.add_(one) for sums, one in zip(total, gradients)]
            loss += found.detach()
        adam, used = self.student.adam, [at for at, sums in enumerate(total) if sums is not None]
        adam.move(torch.autograd.grad([made[names[at]] for at in used], adam.learning, [total[at] for at in used], materialize_grads=True))
        return loss

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """What runs in here runs on a GPU at the same time as what comes next, up to `_meet`: kernels of small models fill no GPU."""
        if device.type != "cuda":
            yield
            return
        self._aside = self._aside or torch.cuda.Stream(device)
        self._aside.wait_stream(torch.cuda.current_stream(device))  # memory that was freed there is used again there, and only now
        with torch.cuda.stream(self._aside):
            yield

    def _meet(self, device: torch.device) -> None:
        if self._aside is not None:
            torch.cuda.current_stream(device).wait_stream(self._aside)

    def state(self) -> Weights:
        """Everything that the rest of the way depends on, by name."""
        numbered = {f"{kind}.{at}": tensor for kind, tensors in self._numbered() for at, tensor in enumerate(tensors)}
        best = {f"best.{name}": tensor for name, tensor in self.best.items()}
        return {"history": torch.tensor(self.history, dtype=torch.float64), **numbered, **best}

    def _numbered(self) -> tuple[tuple[str, list[Tensor]], ...]:
        adam = self.student.adam
        return ("learning", adam.learning), ("first", adam.first), ("second", adam.second)

    def restore(self, state: Weights) -> None:
        """Stand where `state` was taken."""
        self.history = [(int(step), train, choosing) for step, train, choosing in state["history"].tolist()]
        self.best = {name.removeprefix("best."): tensor for name, tensor in state.items() if name.startswith("best.")}
        for kind, tensors in self._numbered():
            for at, tensor in enumerate(tensors):
                tensor.copy_(state[f"{kind}.{at}"])


def _forward_rows(
    config: ModelConfig, weights: Weights, ids: Tensor, past: reference.Past | None = None, half: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Logits of every token's prediction, and the stream after each layer: ids int `(B, S)` -> f32 `(B, S, V)`, L times `(B, S, H)`.

    past: attends in place of the reference. half: products in bf16, those of the head excepted, where it would double the noise.
    """
    streams = []
    with _bf16_products(half):
        x = reference.embed(config, weights, ids)
        for layer in range(config.num_layers):
            x = reference.block(config, layer, weights, x, past=past)
            streams.append(x)
        x = reference.final_norm(config, weights, x)
    return reference.head(config, weights, x), streams


def _bf16_products(half: bool) -> torch.autocast:
    """Products in bf16 on the CPU within it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False)


def stream_prices(config: ModelConfig, weights: Weights, ids: Tensor, seed: int) -> list[Tensor]:
    """What an error of the stream after each layer costs, on rows int `(R, S)`: symmetric f32 `(H, H)` per layer.

    The KL of the predictions after a small error e of the stream, relative to its root mean square, is e' P e / 2 on average: P is the
    mean of g g', g the gradient of the logarithm of a token that the model draws. Relative, because every norm divides by it: the first
    tokens of a row may have streams, and errors, many times as large as all others, to little effect.
    """
    embedding, generator = weights[f"{config.names.embed}.weight"], torch.Generator(ids.device).manual_seed(seed)
    found = [embedding.new_zeros(config.hidden_size, config.hidden_size) for _ in range(config.num_layers)]
    for part in row_batches(config, embedding.new_empty(*ids.shape, 0), 0, len(ids)):
        with torch.enable_grad(), fast_products_on_cpu(ids.device):
            x, streams = reference.embed(config, weights, ids[part]).requires_grad_(), []
            for layer in range(config.num_layers):
                x = reference.block(config, layer, weights, x)
                streams.append(x)
            logs = reference.head(config, weights, reference.final_norm(config, weights, x)).log_softmax(-1)
            drawn = torch.multinomial(logs.detach().exp().flatten(0, 1), 1, generator=generator).view(*ids[part].shape, 1)
            gradients = torch.autograd.grad(logs.gather(-1, drawn).sum(), streams)
        for price, gradient, stream in zip(found, gradients, streams):
            flat = (gradient / relative_error(1.0, stream.detach(), config)).flatten(0, 1)
            price.add_(flat.T @ flat, alpha=1 / ids.numel())
    return found


def relative_error(error: Tensor | float, stream: Tensor, config: ModelConfig) -> Tensor:
    """An error of a stream `(B, S, H)` as a share of its root mean square, which norms divide by."""
    return error * (stream.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()


def priced_error(error: Tensor, price: Tensor) -> Tensor:
    """The sum over tokens of error' price error / 2."""
    return ((error @ price) * error).sum() / 2


class _Divergence(torch.autograd.Function):
    """The KL, with its gradient to the logits found, q - p, as it is: half the passes over them that the steps in between would take."""

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, found: Tensor) -> Tensor:
        wanted, found = wanted.log_softmax(-1), found.log_softmax(-1)
        likely = wanted.exp()
        divergence = wanted.sub_(found).mul_(likely).sum(-1)
        ctx.save_for_backward(found.exp_().sub_(likely))
        return divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (apart,) = ctx.saved_tensors
        return None, apart * gradients[0][..., None]


def row_divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """KL of the predictions of logits `(B, S, V)`, nats: f32 `(B, S)`; differentiable in those found."""
    return _Divergence.apply(wanted, found)  # type: ignore[no-any-return]


def levelled(divergence: Tensor) -> Tensor:
    """KL of tokens of which none counts for more than the mean: gradients of those above it are divided by how often they have it.

    Few tokens have most of the KL, and what they say of a code is mostly about themselves.
    """
    return divergence * (divergence.detach().mean() / divergence.detach().clamp_min(ADAM_EPS)).clamp_max(1)


def mean_kl(config: ModelConfig, teacher: Weights, student: Weights, ids: Tensor, aimed: Tensor | None = None) -> float:
    """Mean KL(teacher || student) on rows int `(R, S)`, nats per token. aimed: the teacher's last stream there, if it is known."""
    aimed, total = _last_stream(config, teacher, ids) if aimed is None else aimed, 0.0
    with torch.no_grad(), fast_products_on_cpu(aimed.device):
        for part in row_batches(config, aimed, 0, len(ids)):
            wanted = reference.head(config, teacher, reference.final_norm(config, teacher, aimed[part]))
            found, _ = _forward_rows(config, student, ids[part].to(aimed.device))
            total += float(row_divergence(wanted, found).sum(dtype=torch.float64))
    return total / max(1, ids.numel())


def _last_stream(config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """The stream after the last layer, f32 `(R, S, H)`, of rows int `(R, S)`."""
    made = weights[f"{config.names.embed}.weight"].new_empty(*ids.shape, config.hidden_size)
    with torch.no_grad(), fast_products_on_cpu(made.device):
        for part in row_batches(config, made, 0, len(ids)):
            x = reference.embed(config, weights, ids[part].to(made.device))
            for layer in range(config.num_layers):
                x = reference.block(config, layer, weights, x)
            made[part] = x
    return made


def _judge_model(config: ModelConfig, teacher: Weights, student: Weights, ids: Tensor) -> Quality | None:
    if not len(ids):
        return None
    return judge_rows(config, ids, *((weights, _last_stream(config, weights, ids)) for weights in (teacher, student)))


def tune(context: Context, rows: Rows, made: QuantizedLayers, tuning: Tuning, seed: int) -> Tuned:
    """Tune a quantised model and file its layers under a key of their own; a killed job goes on after its last part.

    Args:
        context: the dense model, and where the quantised layers are filed.
        rows: with those for tuning, for choosing, for the report and of a second text.
        made: what was quantised.
        seed: of the order of the rows.
    """
    with kept_memory() if context.weights.device.type == "cpu" else nullcontext():
        return _run_tuning(context, rows, made, tuning, seed)


def _run_tuning(context: Context, rows: Rows, made: QuantizedLayers, tuning: Tuning, seed: int) -> Tuned:
    weights, work, config = context.weights, context.work, context.weights.config
    texts = [found.numpy().tobytes() for found in (rows.tuning, rows.choosing)]
    key = hash_of("tuned", CHECKPOINT_VERSION, made.key, tuning, seed, weights.device.type, *texts)
    packed = _packed_layers(context, made.key)
    teacher = dense_weights(weights)
    written = _write_training_rows(context, teacher, rows.tuning, tuning.to_write(len(rows.tuning), weights.device), seed)
    device = weights.device
    ids = learned_rows(rows.tuning, tuning.repeated(len(rows.tuning), device), written, device)
    different = (len(rows.tuning) + len(written)) * row_pieces(rows.tuning.shape[1], device)[0]
    each = rows_per_step(different, ids.shape[1], device)
    student = _Student(config, made, packed, teacher, tuning, len(ids) / each, ids.numel())
    before = student.weights()
    second = [mean_kl(config, teacher, before, rows.second)] if len(rows.second) else []
    del before
    trainer = _Trainer(config, teacher, student, ids, each, rows, seed, tuning.hidden or 0.0)
    with context.meter("tune", total=trainer.parts[-1], unit="steps") as meter:

        def step(detail: str) -> None:
            context.check()
            meter.step(detail=detail)

        state = work.load_tuning(key)
        if state is not None:
            trainer.restore(state)
            meter.at(trainer.parts[len(trainer.history) - 1])
        for number in range(len(trainer.history), VALIDATION_INTERVALS + 1):
            trainer.part(number, step)
            work.save_tuning(key, trainer.state())
        best = trainer.best
        final = student.packed(best, {name: loss for name, (_, loss) in packed.items()})
        for layer in (*range(config.num_layers), HEAD_LAYER):
            work.save(key, layer, {linear.key: final[linear.key] for linear in _linears_of_layer(config, layer).values()})
    vectors = {name: best[name] for name in student.vectors}
    found: Weights = {name: tensor.to(weights.device).float() for name, tensor in vectors.items()}
    for linear in model_linears(config):
        grid = Grid(final[linear.key][0], linear.out_features, weights.device)
        found[f"{linear.key}.weight"] = grid.weight()
        if grid.bias is not None:
            found[f"{linear.key}.bias"] = grid.bias
    second += [mean_kl(config, teacher, found, rows.second)] if second else []
    choosing = [entry[2] for entry in trainer.history]
    return Tuned(
        key=key,
        vectors=vectors,
        written=len(written),
        history=tuple(trainer.history),
        chosen=choosing.index(min(choosing)),
        quality=_judge_model(config, teacher, found, rows.report),
        before=made.quality,
        second=rows.second_name if second else "",
        second_kl=(second[0], second[1]) if second else None,
        options=tuning,
    )


def _write_training_rows(context: Context, teacher: Weights, text: Tensor, rows: int, seed: int) -> Tensor:
    """Rows int32 `(rows, S)` that the dense model writes, each beginning with some tokens of a text `(n, S)`; filed."""
    config, length, work = context.weights.config, text.shape[1], context.work
    if not rows:
        return text[:0]
    key = hash_of("written", context.weights.fingerprint(), text.numpy().tobytes(), rows, seed, context.weights.device.type)
    found = work.load_written(key)
    if found is not None:
        return found
    generator, many = torch.Generator().manual_seed(seed), text.flatten()
    starts = torch.randint(len(many) - SEED_TOKENS, (rows,), generator=generator)
    with context.meter("write text", total=rows * (length - 1), unit="tokens") as meter:

        def step(count: int) -> None:
            context.check()
            meter.step(count)

        found = write_rows(config, teacher, many[starts[:, None] + torch.arange(SEED_TOKENS)], length, seed, step)
    work.save_written(key, found)
    return found


def _linears_of_layer(config: ModelConfig, layer: int) -> dict[str, Linear]:
    return {"head": head_linear(config)} if layer == HEAD_LAYER else layer_linears(config, layer)


def _packed_layers(context: Context, key: str) -> Packed:
    """All quantised matrices, of the files of the work folder."""
    found: Packed = {}
    for layer in (*range(context.weights.config.num_layers), HEAD_LAYER):
        part = context.work.load(key, layer, _linears_of_layer(context.weights.config, layer))
        if part is None:
            raise ConversionError(f"{context.work.quantized(key, layer)}: was damaged or removed meanwhile; run the conversion again")
        found |= part
    return found


def dense_weights(weights: DenseWeights) -> Weights:
    """Every tensor of the dense model, f32, scaled as the quantised one is."""
    found = weights.ends()
    for layer in range(weights.config.num_layers):
        found |= weights.layer(layer)
    return found
