"""Options of `load` as types: what an editor completes, and what the signatures of `demo` and `LLM.load` spell out.

Imports nothing of the engine: `exl2nb.demo` and `exl2nb.inspect` are in one module. `tests/llm/test_options.py` holds it to `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from exl2nb.core.progress import Sink
    from exl2nb.llm.plan import DeviceChoice


class LoadOptions(TypedDict, total=False):
    """Options of `load`, for `demo` and `LLM.load`."""

    revision: str | None
    device: str | None
    devices: DeviceChoice | None
    gpu_layers: int | None
    parallel: str
    stream_from: int | None
    cache: str
    context: int | None
    cache_tokens: int | None
    max_sequences: int
    draft: Any
    rope_scale: float | None
    rope_theta: float | None
    rope_alpha: float | None
    rope_scaling: Mapping[str, Any] | None
    deterministic: bool | None
    vision: bool
    generation_config: bool
    progress: Sink | Literal["auto"] | None


PARALLEL = ("layers", "tensor")
"""How several devices share a model: each has whole layers, or a part of every layer."""

LOAD_DEFAULTS: dict[str, Any] = {
    "parallel": "layers", "cache": "fp16", "max_sequences": 16, "vision": True, "generation_config": True, "progress": "auto",
}  # fmt: skip
"""Of the options that are not None."""
