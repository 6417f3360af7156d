"""The coefficients of a model's memory plan, from its config and the headers of its files. Loads nothing, asks no device."""

from __future__ import annotations

from exl2nb.cache.modes import MODES
from exl2nb.cache.spec import PAGE_SIZE, CacheSpec
from exl2nb.core.errors import OptionError
from exl2nb.llm.plan_formula import Formula, Stage
from exl2nb.model.config import ModelConfig
from exl2nb.model.gpu_memory import kept_bytes
from exl2nb.model.inspect import Inspection

CHUNKS = {"cpu": 512, "cuda": 2048}
"""Prompt tokens that a step takes at most."""
PRODUCTS_BYTES = 32 * 2**20  # what the library of matrix products keeps on the GPU
CODE_BYTES = 146 * 2**20  # kernels that CUDA loads when they are first used; H200, torch 2.11, 2026-11-21
GRAPH_BYTES = 8 * 2**20  # of the first captured step, whatever its model
MANY_CTAS = 132  # leave sums of tiles to one another in steps of more than eight texts
ROUTER_CTAS = 132  # each leaves sums of its own for a sparse layer's router; fewer on smaller GPUs


def formula_of(config: ModelConfig, found: Inspection, device: str, modes: tuple[str, ...] = ()) -> Formula:
    """The plan of a model on a device.

    Args:
        config: of the model. found: its headers. device: "cpu" or "cuda". modes: cache modes to know besides those with a name.
    """
    pages = {mode: size for mode in (*MODES, *modes) if (size := _page_bytes(config, mode)) is not None}
    common = {"page_tokens": PAGE_SIZE, "page_bytes": pages, "chunk": CHUNKS[device], "longest": config.max_position_embeddings}
    logits = 4 * config.vocab_size
    if device == "cpu":
        return Formula(weights=_cpu_weights(found), stages=(_cpu_stage(config),), logits_row=logits, **common)
    return Formula(
        weights=kept_bytes(config, found),
        segments=1,
        stages=_gpu_stages(config),
        graph_fixed=CODE_BYTES + GRAPH_BYTES,
        graph_row=_graph_row(config),
        logits_row=logits,
        **common,
    )


def _page_bytes(config: ModelConfig, mode: str) -> int | None:
    """None where heads of this size cannot be kept so."""
    try:
        return CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 1, mode).page_bytes
    except OptionError:
        return None


def _inner(config: ModelConfig) -> int:
    """Outputs of the MLPs that a token visits at once."""
    if config.moe is None:
        return config.intermediate_size
    return max(config.intermediate_size, config.moe.intermediate_size * config.moe.top_k)


# ---- the CPU


def _cpu_weights(found: Inspection) -> int:
    """As in the files; a tied head is stored once more, in the layout of the kernels."""
    tied = found.embedding is not None and found.head is None
    return found.total_bytes + (found.embedding.nbytes if tied and found.embedding is not None else 0)


def _cpu_stage(config: ModelConfig) -> Stage:
    """A step in f32: residual and its norm, q, k, v and what attention gives, both halves of the MLP; and the rotation tables."""
    per_token = 2 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * _inner(config)
    return Stage(0, 4 * per_token, 0)


# ---- the GPU: model.gpu_memory says what the weights take; what ops.gpu_prefill holds at once, what generator.gpu_stepper captures


def _gpu_stages(config: ModelConfig) -> tuple[Stage, ...]:
    """Residual f32, inputs fp16, room for the largest unpacked matrix; attention reads back the cache of earlier chunks."""
    hidden, inner, q, kv = config.hidden_size, _inner(config), config.q_size, config.kv_size
    up, tables = inner * (2 if config.gated else 1), 4 * config.head_dim
    spread = 4 * q if config.q_per_kv > 1 else 0
    one = config.intermediate_size if config.moe is None else max(config.moe.intermediate_size, config.moe.shared_size or 0)
    fixed = PRODUCTS_BYTES + 2 * hidden * max(q + 2 * kv, one * (2 if config.gated else 1))
    holes = 2 * (q + 2 * kv) + 2 * q  # that torch's allocator leaves between them: about q, k, v and what attention read, gone by then
    return (
        Stage(fixed, 6 * hidden + 6 * (q + 2 * kv), tables),
        Stage(fixed, 4 * hidden + 2 * (q + 2 * kv) + 4 * q, tables + 4 * kv + spread),
        Stage(fixed, 8 * hidden + 2 * inner, tables),
        Stage(fixed, 4 * hidden + 2 * up + max(2 * inner, 2 * hidden) + holes, tables),
    )


def _graph_row(config: ModelConfig) -> int:
    """Workspace and logits of one text in the captured decode steps: of its number of texts, and of half as many, and of half of those."""
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    up = _inner(config) * (2 if config.gated else 1)
    sums = 0 if config.moe is None else 4 * min(hidden // 16, ROUTER_CTAS) * (config.moe.num_experts + 8)
    products = 0 if config.moe is not None else 4 * 4 * 256 * MANY_CTAS  # partial sums of stream-K: stream_k_gemm.cu
    return 2 * (products + 8 * hidden + 2 * 2 * hidden + 4 * (q + 2 * kv) + 2 * 2 * _inner(config) + 4 * up + 4 * config.vocab_size + sums)
