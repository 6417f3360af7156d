"""How fast a model would decode on a card that is not here: a prediction from bytes, instructions and clocks, never a measurement.

A layer takes the longer of two times, a tenth of the shorter, and its gaps. The times: reading its weights, keys and values; multiplying
them, so many cycles of a multiprocessor for 16 x 64 weights. The constants of Hopper's persistent chain were fitted to nine measurements on
an H100 and an H200 (`benchmarks/RESULTS.md`, 2026-11-23 and 25) and meet them within 9 %; those of older cards follow from layers of two
models that an H200 took through their path. No other card was measured: data sheets give bandwidths and clocks, and the clocks that T4 and
L4 keep at their power limits are guesses.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl2nb.model.config import ModelConfig
    from exl2nb.model.inspect import Inspection

UNIT = 16 * 64  # weights that a warp multiplies at a time (csrc/format/gpu_blob.h)
SHORTER = 0.1  # share of the shorter time that is not hidden behind the longer one
FIXED_S = 10e-6  # a step: the embedding and the draw
FITTED = 0.09  # largest error where there are measurements


@dataclass(frozen=True)
class KernelPath:
    """How a kind of cards runs a layer. unit_cycles: of a multiprocessor, for a unit. gaps_s: a layer's launches and handovers."""

    name: str
    unit_cycles: float
    gaps_s: float


CHAIN = KernelPath("persistent chain", 22, 14e-6)
LAUNCHES = KernelPath("one launch per product", 49, 20e-6)
HALF_STEPS = KernelPath("one launch per product, half-size tensor core steps", 60, 20e-6)


@dataclass(frozen=True)
class Card:
    """A GPU. memory: bytes. read: bytes a second that kernels reach: measured, else 92 % of the data sheet. clock: Hz, under load."""

    name: str
    memory: float
    read: float
    multiprocessors: int
    clock: float
    path: KernelPath


CARDS = {
    "t4": Card("NVIDIA T4", 15e9, 0.85 * 320e9, 40, 1.2e9, HALF_STEPS),
    "l4": Card("NVIDIA L4", 23e9, 0.92 * 300e9, 58, 1.5e9, LAUNCHES),
    "a100": Card("NVIDIA A100 40 GB", 40e9, 0.92 * 1555e9, 108, 1.41e9, LAUNCHES),
    "4090": Card("NVIDIA RTX 4090", 24e9, 0.92 * 1008e9, 128, 2.52e9, LAUNCHES),
    "h100": Card("NVIDIA H100 80 GB", 80e9, 3.2e12, 132, 1.755e9, CHAIN),
    "h200": Card("NVIDIA H200", 141e9, 4.53e12, 132, 1.755e9, CHAIN),
}


@dataclass(frozen=True)
class Work:
    """What a decode step reads: a layer's weights and their bytes, the head's, the cache's bytes. weight_bytes: all that is loaded."""

    layers: int
    layer_weights: float
    layer_bytes: float
    head_weights: float
    head_bytes: float
    cache_bytes: float
    weight_bytes: float


def work_of(config: ModelConfig, found: Inspection, *, context: int, mode: str) -> Work:
    """The work of a step of one sequence with `context` tokens in a cache of `mode`."""
    from exl2nb.llm.memory import formula_of

    formula, head = formula_of(config, found, "cuda", (mode,)), found.head or found.embedding
    head_weights, head_bytes = (head.weights, head.nbytes) if head is not None else (0, 0)
    decoder = sum(m.nbytes for m in found.decoder)
    read = min(decoder, max(0, found.token_bytes - head_bytes))  # of a mixture's experts those that a token visits
    return Work(
        layers=found.layers, layer_weights=sum(m.weights for m in found.decoder) * read / max(1, decoder) / found.layers,
        layer_bytes=read / found.layers, head_weights=head_weights, head_bytes=head_bytes,
        cache_bytes=formula.page_bytes[mode] / formula.page_tokens * context, weight_bytes=formula.weights,
    )  # fmt: skip


def predict(card: Card, work: Work) -> dict[str, Any]:
    """Milliseconds of a decode step on a card and of its parts, tokens a second, what bounds it, whether the weights fit.

    Returns:
        prediction (True), card, path, decode_tok_s, decode_ms, read_ms, multiply_ms, gaps_ms, bound ("reading", "multiplying" or "gaps"),
        fits, assumed: the card's numbers.
    """

    def times(weights: float, size: float) -> tuple[float, float]:
        return size / card.read, weights / UNIT * card.path.unit_cycles / card.multiprocessors / card.clock

    layer = times(work.layer_weights, work.layer_bytes + work.cache_bytes / work.layers)
    head = times(work.head_weights, work.head_bytes)
    gaps = work.layers * card.path.gaps_s + FIXED_S
    step = gaps + work.layers * (max(layer) + SHORTER * min(layer)) + max(head) + SHORTER * min(head)
    read, multiply = (work.layers * a + b for a, b in zip(layer, head))
    parts = {"reading": read, "multiplying": multiply, "gaps": gaps}
    return {
        "prediction": True,
        "card": card.name,
        "path": card.path.name,
        "decode_tok_s": round(1 / step, 1),
        "decode_ms": round(step * 1e3, 3),
        "read_ms": round(read * 1e3, 3),
        "multiply_ms": round(multiply * 1e3, 3),
        "gaps_ms": round(gaps * 1e3, 3),
        "bound": max(parts, key=lambda name: parts[name]),
        "fits": work.weight_bytes < 0.95 * card.memory,
        "assumed": asdict(card),
    }


def text_of(found: dict[str, Any]) -> str:
    """The prediction as lines of text."""
    rows = {name: value for name, value in found.items() if name not in ("prediction", "assumed")}
    lines = [f"{name:24} {value}" for name, value in rows.items()]
    measured = found["card"] in (CARDS["h100"].name, CARDS["h200"].name)
    checked = f"within {FITTED:.0%} of what this card was measured at" if measured else "no card of this kind was measured"
    return "\n".join([*lines, f"{'':24} predicted from bytes, instructions and clocks; {checked}"])
