"""Options of `load`: declared in `LoadParams`, and the types of their keywords for editors and signatures.

Imports nothing of the engine: `exl2nb.demo` and `exl2nb.inspect` are in one module. `load` documents the options and checks what concerns
several of them; `tests/contracts/test_options.py` holds the types to the fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from exl2nb.core.options import check_options, option, options_of

if TYPE_CHECKING:
    from exl2nb.core.progress import Sink
    from exl2nb.llm.llm import LLM
    from exl2nb.llm.plan import DeviceChoice

PARALLEL_MODES = ("layers", "tensor")
"""How several devices share a model: each has whole layers, or a part of every layer."""
MAX_TOKENS = 1 << 24


class LoadOptions(TypedDict, total=False):
    """Options of `load`, `demo` and `LLM.load`."""

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
    draft: LLM | str | os.PathLike[str] | None
    rope_scale: float | None
    rope_alpha: float | None
    rope_theta: float | None
    rope_scaling: Mapping[str, Any] | None
    deterministic: bool | None
    vision: bool
    generation_config: bool
    progress: Sink | Literal["auto"] | None


@dataclass(frozen=True, kw_only=True)
class LoadParams:
    """How a model is loaded. `load` says what each option means.

    Raises:
        OptionError: a value of the wrong type or out of range.
    """

    revision: str | None = option(None, "branch, tag or commit on the hub")
    device: str | None = option(None, "auto, cpu, cuda or cuda:N", metavar="DEVICE")
    devices: DeviceChoice | None = option(
        None,
        "several devices: auto, names as cuda:0,cuda:1, or what each may hold as cuda:0=20GiB,cpu=rest or cuda='20 layers',cpu=rest",
        metavar="DEVICES",
    )
    gpu_layers: int | None = option(None, "layers on the GPU; the rest run on the CPU", metavar="N")
    parallel: str = option("layers", "several devices have whole layers each (default), or a part of every layer", choices=PARALLEL_MODES)
    stream_from: int | None = option(
        None, "prompts of so many tokens copy layers on the CPU to the GPU; 0: never (by what it takes)", metavar="N"
    )
    cache: str = option(
        "fp16", "how K and V are stored: fp32, fp16, fp8, q8, q6 (K 8 bits, V 4), q4, or bits apart as k8v4", metavar="MODE"
    )
    context: int | None = option(None, "tokens of prompt and answer together", range=(1, MAX_TOKENS))
    cache_tokens: int | None = option(None, "tokens of the cache, shared by all requests", range=(1, MAX_TOKENS))
    max_sequences: int = option(16, "requests in one batch (default 16)", range=(1, MAX_TOKENS))
    draft: LLM | str | os.PathLike[str] | None = option(
        None, "smaller model with the same tokenizer, which proposes tokens; self: a copy at 2.5 bits", metavar="MODEL"
    )
    rope_scale: float | None = option(None, "divide positions by this: linear RoPE scaling", metavar="NUMBER")
    rope_alpha: float | None = option(None, "NTK-aware RoPE scaling: the base grows with it", metavar="NUMBER")
    rope_theta: float | None = option(None, "RoPE base, in place of the config's", metavar="NUMBER")
    rope_scaling: Mapping[str, Any] | None = option(
        None, 'rope_scaling as in config.json: \'{"rope_type": "yarn", "factor": 2}\'', metavar="JSON"
    )
    deterministic: bool | None = option(None, "on CUDA, every token is independent of the rest of the batch", flag=False)
    vision: bool = option(True, "load the vision encoder of a model that has one", flag=False)
    generation_config: bool = option(
        True,
        "use the sampling values of the model's generation_config.json as defaults",
        flag="--no-generation-config",
        flag_help="do not use the sampling values of the model's generation_config.json as defaults",
    )
    progress: Sink | Literal["auto"] | None = option("auto", "takes the events of loading", flag=False)

    def __post_init__(self) -> None:
        check_options(self, where="load")


LOAD_OPTIONS_BY_NAME = options_of(LoadParams)
"""Everything that is known of each option."""
LOAD_DEFAULTS = {name: one.default for name, one in LOAD_OPTIONS_BY_NAME.items()}
