"""How fast a model should run on a GPU that is not here: a model of three constants, fitted to two cards. A prediction, not a measurement.

A decode step reads every weight that the token uses, and takes each out of its bits. The slower of the two dominates, and
the fourth powers smooth the change from one to the other:

    step = (memory**4 + unpacking**4)**(1/4) + layers * LAYER_US + STEP_US + what attention reads of the cache

memory: bytes over READ_SHARE of the card's bandwidth. unpacking: weights over multiprocessors * clock * WEIGHTS_PER_CLOCK. The constants
give the nine rows of `MEASURED`, from two cards with the same multiprocessors and different memory, within 8 % (a test holds that).
Prefill is fitted to prompts of 100 to 2048 tokens of Llama-2-7B on an H200. Below compute capability 9.0 other kernels run, which
have not been timed: take those lines as upper bounds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from exl2nb.cache.modes import parse_mode
from exl2nb.cache.spec import PAGE_SIZE, CacheSpec
from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.core.show import size_text
from exl2nb.io.metadata import metadata_folder
from exl2nb.llm.memory import CONTEXT, LIMITS, MemoryPlan
from exl2nb.llm.plan import plan
from exl2nb.model.config import ModelConfig
from exl2nb.model.inspect import Inspection, inspect
from exl2nb.model.loader import read_model_config
from exl2nb.sampling.params import check_integer

READ_SHARE = 0.96  # of the datasheet's bandwidth
WEIGHTS_PER_CLOCK = 46.0  # of one multiprocessor
LAYER_US, STEP_US = 14.0, 20.0  # handovers between the products and attention of a layer; logits and draw
CACHE_SHARE = 0.6  # of the bandwidth that attention reaches for one sequence
PROMPT = 2048  # tokens whose prefill is predicted
PROMPT_SHARE, PROMPT_LAYER_US, PROMPT_BYTES = 0.76, 150.0, 4.0  # of the tensor cores' peak; launches; an unpacked weight, written and read
FREE_SHARE = 0.91  # of a card's memory, before a program uses it: 14.6 of 16 GiB on a T4


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the vendor's datasheet says: multiprocessors, boost clock in GHz, GB/s, GiB, dense fp16 TFLOP/s with fp32 sums."""

    name: str
    capability: str
    multiprocessors: int
    clock_ghz: float
    gb_s: float
    gib: float
    tflops: float


CARDS = {
    "t4": Card(name="Tesla T4", capability="7.5", multiprocessors=40, clock_ghz=1.59, gb_s=320, gib=16, tflops=65),
    "a100": Card(name="A100 40 GB", capability="8.0", multiprocessors=108, clock_ghz=1.41, gb_s=1555, gib=40, tflops=312),
    "3090": Card(name="GeForce RTX 3090", capability="8.6", multiprocessors=82, clock_ghz=1.695, gb_s=936, gib=24, tflops=71),
    "l4": Card(name="L4", capability="8.9", multiprocessors=58, clock_ghz=2.04, gb_s=300, gib=24, tflops=121),
    "4090": Card(name="GeForce RTX 4090", capability="8.9", multiprocessors=128, clock_ghz=2.52, gb_s=1008, gib=24, tflops=165),
    "h100": Card(name="H100 80 GB", capability="9.0", multiprocessors=132, clock_ghz=1.755, gb_s=3350, gib=80, tflops=989),
    "h200": Card(name="H200", capability="9.0", multiprocessors=132, clock_ghz=1.755, gb_s=4800, gib=141, tflops=989),
}

MEASURED = (
    ("h200", "tinyllama", 4.0, 2117), ("h200", "tinyllama", 3.0, 2146), ("h200", "llama2-7b", 4.0, 764), ("h200", "llama3-8b", 4.0, 657),
    ("h200", "llama2-70b", 2.55, 132.9), ("h100", "tinyllama", 4.0, 2134.5), ("h100", "tinyllama", 3.0, 2148.6),
    ("h100", "llama2-7b", 4.0, 676.9), ("h100", "llama3-8b", 4.0, 565.5),
)  # fmt: skip
"""Card, shape of benchmarks/make_random_model.py, bits per weight, tokens/s: batch 1, context 128 (RESULTS.md, log/2026-11-25.md)."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a decoded token costs on any card: layers, weights it uses, their bytes, cache bytes per token of context."""

    layers: int
    weights: float
    weight_bytes: float
    cache_bytes: float

    def step_us(self, card: Card, context: int) -> float:
        """Microseconds of a decode step of one sequence, so many tokens before it."""
        memory = self.weight_bytes / (READ_SHARE * card.gb_s * 1e3)
        unpacking = self.weights / (card.multiprocessors * card.clock_ghz * 1e3 * WEIGHTS_PER_CLOCK)
        cache = self.cache_bytes * context / (CACHE_SHARE * card.gb_s * 1e3)
        return (memory**4 + unpacking**4) ** 0.25 + self.layers * LAYER_US + STEP_US + cache

    def prompt_us(self, card: Card, tokens: int) -> float:
        """Microseconds of a prefill: weights are unpacked to fp16 once, then multiplied."""
        unpacked = (self.weight_bytes + PROMPT_BYTES * self.weights) / (READ_SHARE * card.gb_s * 1e3)
        return unpacked + self.layers * PROMPT_LAYER_US + 2 * self.weights * tokens / (PROMPT_SHARE * card.tflops * 1e6)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A card's line: decode and prefill in tokens a second, what limits decoding ("memory", "unpacking" or "launches"), and the memory.

    memory: the plan, on what such a card has free. measured: whether the constants come from this card.
    """

    card: Card
    context: int
    decode_tok_s: float
    prefill_tok_s: float
    limit: str
    memory: MemoryPlan
    measured: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "card": self.card.name,
            "context": self.context,
            "decode_tok_s": round(self.decode_tok_s, 1),
            "prefill_tok_s": round(self.prefill_tok_s),
            "limit": self.limit,
            "bytes": self.memory.total,
            "free": self.memory.free,
            "fits": self.memory.fits,
            "prediction": True,
            "fitted_to_this_card": self.measured,
        }

    def __str__(self) -> str:
        fits = "fits" if self.memory.fits else "does not fit"
        free = size_text(self.memory.free or 0)
        return (
            f"{self.card.name:18} {self.decode_tok_s:8.1f} {self.prefill_tok_s:9.0f}  {self.limit:10} "
            f"{size_text(self.memory.total):>10} of {free} {fits}"
        )


def load_of(config: ModelConfig, found: Inspection, cache: str) -> Load:
    """Of a model's headers. cache: mode of the KV cache, parsed."""
    share = 1.0 if found.experts is None else found.experts[1] / found.experts[0]
    weights = sum(matrix.weights * (share if ".experts." in matrix.key else 1.0) for matrix in found.decoder)
    head = found.head or found.embedding
    pages = CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 1, cache).page_bytes
    tied = head.nbytes if head is not None and found.head is None else 0
    return Load(
        layers=config.num_layers,
        weights=weights + (head.weights if head is not None else 0),
        weight_bytes=found.token_bytes + tied,
        cache_bytes=pages / PAGE_SIZE,
    )


def predict(
    path: str | os.PathLike[str],
    *,
    cards: tuple[str, ...] = tuple(CARDS),
    context: int = 128,
    cache: str = "fp16",
    revision: str | None = None,
) -> list[Prediction]:
    """Predict decode and prefill on cards that are not here, from headers alone.

    Args:
        path: model directory or hub id. revision: branch, tag or commit on the hub.
        cards: names in `CARDS`.
        context: tokens before the one that is predicted. cache: mode of the KV cache, as in `load`.

    Raises:
        OptionError: an unknown card or mode. ModelNotFound, ConfigError, FormatError: the model cannot be read.
        DeviceError: the compiled library is not in use, which knows sizes on a GPU.
    """
    for card in cards:
        if card not in CARDS:
            raise OptionError(f"predict: card is {shown(card)}; expected one of {', '.join(CARDS)}")
    check_integer("predict: context", context, 1, LIMITS["context"])
    mode = parse_mode(cache, where="predict")
    with metadata_folder(path, revision) as folder:
        config, found = read_model_config(folder), inspect(folder)
    work = load_of(config, found, mode)
    memory = plan(
        path, context=max(context, min(config.max_position_embeddings, CONTEXT)), cache=cache, device="cuda", free=1, revision=revision
    )
    made = []
    for name in cards:
        card = CARDS[name]
        step = work.step_us(card, context)
        waits = work.layers * LAYER_US + STEP_US
        reading = work.weight_bytes / (READ_SHARE * card.gb_s * 1e3)
        limit = "launches" if waits > step / 2 else "memory" if reading > 0.9 * (step - waits) else "unpacking"
        made.append(
            Prediction(
                card=card,
                context=context,
                decode_tok_s=1e6 / step,
                prefill_tok_s=1e6 * PROMPT / work.prompt_us(card, PROMPT),
                limit=limit,
                memory=replace(memory, free=int(FREE_SHARE * card.gib * 2**30)),
                measured=any(row[0] == name for row in MEASURED),
            )
        )
    return made


def table(predictions: list[Prediction]) -> str:
    """For a terminal."""
    lines = [f"{'predicted for':18} {'decode':>8} {'prefill':>9}  {'limited by':10} {'memory':>10}", *map(str, predictions)]
    fitted = ", ".join(made.card.name for made in predictions if made.measured)
    checked = f"within 8 % for {fitted}" if fitted else "none of these cards was measured"
    return "\n".join([
        *lines,
        "",
        f"tok/s of one sequence: decode after {predictions[0].context} tokens, prefill of {PROMPT}. Predicted from bytes, weights,",
        f"clocks, not measured; the constants are fitted to H100 and H200 ({checked}).",
    ])  # fmt: skip
