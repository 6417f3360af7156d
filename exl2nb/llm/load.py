"""From a directory or hub id to a loaded model: device, weights, tokenizer, cache, draft model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.cache.spec import parse_mode
from exl2nb.core import env
from exl2nb.core.errors import OptionError, TokenizerError
from exl2nb.core.options import make, shown, spelled_out
from exl2nb.core.progress import Sink, showing
from exl2nb.generator.draft import DraftModel, check_same_tokenizer
from exl2nb.io import hub
from exl2nb.llm.llm import LLM
from exl2nb.llm.load_keywords import LOAD_DEFAULTS, LoadOptions, LoadParams
from exl2nb.llm.sampling_defaults import read_defaults
from exl2nb.model.loader import load_model
from exl2nb.model.model import LayerRange, Model
from exl2nb.model.rope import RopeOverride
from exl2nb.model.runner import GPU_CHUNKS
from exl2nb.model.streaming import Streaming
from exl2nb.ops.placement import pick_device
from exl2nb.sampling.defaults import CHAT_DEFAULTS
from exl2nb.sampling.params import check_integer
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exl2nb.llm.plan import DeviceChoice
    from exl2nb.model.vision.encoder import VisionEncoder

DEFAULT_CONTEXT_TOKENS = 4096  # tokens, where the caller does not say and the model allows more: a cache that fits small machines
CACHE_TOKENS = 4096  # at least, so that several short requests run together on a model with a short context


@spelled_out(LoadOptions, LOAD_DEFAULTS)
def load(path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> LLM:
    """Load a model, EXL2 or plain fp16, bf16 or fp32.

    Args:
        path: model directory, or a hub id such as "owner/name".
        revision: branch, tag or commit on the hub; EXL2 models often have one branch per bitrate.
        device: "cpu", "cuda", "cuda:1" (the GPU of that number) or "auto" (the best there is); None = the variable EXL2NB_DEVICE, or
            "auto".
        devices: split the layers over several devices, in place of `device`: "auto" (fill the GPUs, then the CPU), a list of names
            (["cuda:0", "cuda:1"]: in proportion to free memory), or a budget for each, which covers weights, cache and activations:
            {"cuda:0": "6GiB", "cpu": "rest"}, {"cuda": "20 layers", "cpu": "rest"}. Layers on the CPU run first. Of a mixture of
            experts, {"cuda:0": "rest", "cpu": "experts"} keeps the experts on the CPU and all else on GPUs.
            `exl2nb.plan(devices=...)` shows the split before loading.
        gpu_layers: number of layers on the GPU, the rest on the CPU; the same as devices={"cuda": "N layers", "cpu": "rest"}.
        parallel: "layers": each device has whole layers. "tensor": a process for each device, all of which run every layer together, each
            with some of its heads and channels; all on GPUs (["cuda:0", "cuda:1"]), or all on the CPU.
        stream_from: with layers or experts on the CPU beside a GPU: from so many prompt tokens in a step on, copy them to the GPU layer
            by layer and compute them there, at most 2048, which is what a step has (1024 beside decodes); 0: never. None: by what copying
            and computing take, at least 65. The bits are then those of a GPU. Of eight layers or more a quarter is computed there
            while tokens are decoded, too; never with stream_from=0, and neither is ever done with deterministic=True.
        cache: how keys and values are kept: "fp16" or "fp32"; "q8", "q6" (keys in 8 bits, values in 4) or "q4", which hold 1.9, 2.5 and 3.6
            times the tokens of fp16 in the same memory; "fp8"; or the bits of keys and values apart, as "k8v4" (4, 8 or 16 each).
        context: tokens of prompt and answer together; None = what the model allows, at most 4096. A RuntimeWarning where it is longer than
            what the model was trained for.
        cache_tokens: tokens of the cache, shared by all requests; None = the context, at least 4096.
        max_sequences: requests in one batch; others are queued.
        draft: a smaller model with the same tokenizer, which proposes draft tokens that this one verifies several at a time: the same
            text, sooner. A directory, a hub id, a loaded model, or "self": the model's own copy at 2.5 bits per weight, for dense models;
            made the first time, which takes as long as a conversion, and kept. Requests use it unless they say speculation="off".
        rope_scale: divide positions by this (linear RoPE scaling): 2 doubles the context that the model knows, at some loss.
        rope_alpha: NTK-aware scaling: the RoPE base grows by alpha ** (d / (d - 2)); loses less than rope_scale without training.
        rope_theta: the RoPE base itself, in place of the config's.
        rope_scaling: an object as `rope_scaling` of config.json in place of the model's own: {"rope_type": "yarn", "factor": 4.0}.
        deterministic: on CUDA, make every token independent of how its prompt was cut and of the rest of the batch, at the price of slow
            prompts; decoding one token a step, and everything on the CPU, always is. None = the variable
            EXL2NB_DETERMINISTIC, or False.
        vision: False: leave out the tower of a model that sees, and its memory; pictures are refused then.
        generation_config: True: `llm.chat` and the Playground use the sampling values of the model's generation_config.json as their
            defaults. False: they use the library's own, temperature 0.7 and top_p 0.95. `llm.sampling_defaults` shows them.
        progress: takes the events of stages "download" and "load". "auto": shown where you look (a widget in a notebook, a line on a
            terminal); None: silent.

    Raises:
        ModelNotFound, ConfigError, FormatError, UnknownArchitecture, TokenizerError: the directory cannot be used; says why.
        OptionError: an option unknown or out of range, or RoPE options for a model without RoPE. DeviceError: the device is not available.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo() as llm:
        ...     llm.generate("It was", max_tokens=3, temperature=0).finish_reason
        'length'
    """
    asked = make(LoadParams, options, where="load")
    context, cache_tokens, stream_from, progress = asked.context, asked.cache_tokens, asked.stream_from, asked.progress
    rope = RopeOverride(scale=asked.rope_scale, theta=asked.rope_theta, alpha=asked.rope_alpha, scaling=asked.rope_scaling)
    cache = parse_mode(asked.cache, where="load")
    chosen = _chosen_devices(asked)
    place = pick_device(asked.device) if chosen is None else "cpu"
    exact = env.get("EXL2NB_DETERMINISTIC", "0") == "1" if asked.deterministic is None else asked.deterministic
    if stream_from is not None:
        check_integer("load: stream_from", stream_from, 0, GPU_CHUNKS.max_tokens)  # a step has no more tokens of prompts
    with showing(progress, f"load {hub.label(path)}") as sink:
        folder = hub.resolve(path, revision=asked.revision, progress=sink)
        with _fitting(folder, f"{_gib(sum(file.stat().st_size for file in folder.glob('*.safetensors') if file.is_file()))} of weights"):
            sizes = {"context": context, "cache": cache, "cache_tokens": cache_tokens}
            if asked.parallel == "tensor":
                model = _load_ranks(folder, chosen, context=context, rope=rope, deterministic=exact, progress=sink)
            else:
                spans, apart = ((), False) if chosen is None else _spans(folder, chosen, stream_from=stream_from, **sizes)
                model = load_model(
                    folder, device=place, spans=spans, experts=apart, streaming=_streaming(spans, stream_from, apart=apart, exact=exact),
                    context=context, rope=rope, progress=sink, deterministic=exact,
                )  # fmt: skip
    try:
        tokenizer = Tokenizer.load(folder)
        tokenizer.templates.prepare()
        defaults = read_defaults(folder) if asked.generation_config else CHAT_DEFAULTS
        _check_vocabulary(tokenizer, model, folder)
        tokens = min(model.context, DEFAULT_CONTEXT_TOKENS) if context is None else context
        held = max(tokens, CACHE_TOKENS) if cache_tokens is None else max(tokens, cache_tokens)
        with _fitting(folder, f"{_gib(model.cache_spec(held, mode=cache).total_bytes)} for the cache of {held} tokens"):
            sizes = {"context": tokens, "cache_tokens": held, "max_sequences": asked.max_sequences}
            encoder = _tower(folder, model) if asked.vision and model.config.files.passed else None
            llm = LLM(
                model, tokenizer, path=folder, cache=cache, name=hub.display_name(folder, asked.revision), vision=encoder,
                sampling_defaults=defaults, **sizes,
            )  # fmt: skip
    except BaseException:
        model.close()
        raise
    try:
        with showing(progress, "prepare the first step") as sink:
            llm.engine.prepare(sink)
    except BaseException:
        llm.close()
        raise
    if asked.draft is not None:
        try:
            with showing(progress, "load the draft model") as sink:
                llm.engine.drafter = make_drafter(llm, asked.draft, cache=cache, progress=sink)
                llm.engine.drafter.prepare(sink)
        except BaseException:
            llm.close()
            raise
    return llm


def _chosen_devices(asked: LoadParams) -> DeviceChoice | None:
    """What to split the model over, or None."""
    if sum(value is not None for value in (asked.device, asked.devices, asked.gpu_layers)) > 1:
        raise OptionError("load: device, devices and gpu_layers say the same thing; expected one of them")
    if asked.gpu_layers is not None:
        from exl2nb.llm.plan import gpu_layers as choice

        return choice(asked.gpu_layers)
    return asked.devices


def _load_ranks(
    folder: Path, devices: DeviceChoice | None, *, context: int | None, rope: RopeOverride, deterministic: bool, progress: Sink | None
) -> Model:
    """A rank for each device."""
    from exl2nb.model.parallel import load_parallel

    names = [*devices] if isinstance(devices, Sequence) and not isinstance(devices, str) else []
    if len(names) < 2 or len({name.partition(":")[0] if isinstance(name, str) else "" for name in names}) > 1:
        raise OptionError(
            f"load: parallel='tensor' with devices={shown(devices)}; expected the device of each rank, at least two: GPUs, as in "
            "['cuda:0', 'cuda:1'], or 'cpu' for each"
        )
    options = {"context": context, "rope": rope, "deterministic": deterministic, "progress": progress}
    return load_parallel(folder, [pick_device(name) for name in names], **options)


def _spans(
    folder: Path, devices: DeviceChoice, *, stream_from: int | None, context: int | None, cache: str, cache_tokens: int | None
) -> tuple[list[LayerRange], bool]:
    """Where the layers go, and whether their experts go to the CPU."""
    from exl2nb.llm.plan import plan_split

    tokens = cache_tokens or max(context or DEFAULT_CONTEXT_TOKENS, CACHE_TOKENS)
    planned = plan_split(folder, devices=devices, context=tokens, cache=cache, streaming=stream_from != 0, where="load")
    spans = [LayerRange(share.device, share.first, share.last) for share in planned.shares if not share.experts]
    for span in spans:
        pick_device(span.device)
    return spans, len(spans) < len(planned.shares)


def _streaming(spans: Sequence[LayerRange], stream_from: int | None, *, apart: bool, exact: bool) -> Streaming | None:
    """Where prompts through what is on the CPU are computed; None: there.

    apart: experts are on the CPU. exact: no token's bits may depend on its step.
    """
    gpus = [span.device for span in spans if span.device != "cpu"]
    if exact or stream_from == 0 or not gpus or (len(gpus) == len(spans) and not apart):
        return None
    return Streaming(gpus[0], stream_from)


def _tower(folder: Path, model: Model) -> VisionEncoder | None:
    """Of a class whose files hold more than the decoder."""
    from exl2nb.model.vision.encoder import load_encoder

    return load_encoder(folder, model.config, device=model.device)


def _fitting(folder: Path, needed: str) -> AbstractContextManager[None]:
    """Too little memory by name."""
    from exl2nb.ops.memory_ops import naming_out_of_memory

    todo = "close other models, use fewer bits per weight, a smaller context= or cache='q4'"
    return naming_out_of_memory(f"{hub.label(folder)} does not fit", todo, needed=needed)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _check_vocabulary(tokenizer: Tokenizer, model: Model, folder: Path) -> None:
    """Refuse a tokenizer of another model. Added tokens may lie beyond the embedding: a text model can keep the image token of its family.

    Prompts that hold such a token are refused, and the model cannot draw it.
    """
    size = model.config.vocab_size
    highest = max(tokenizer.backend.get_vocab(with_added_tokens=False).values(), default=-1) if tokenizer.highest_id >= size else -1
    if highest >= size:
        raise TokenizerError(
            f"{folder}: tokenizer.json has token {highest}, the model's vocabulary ends at {size - 1}; "
            "the tokenizer belongs to another model: copy the right one"
        )
    tokenizer.keep_ends_below(size)


BUSY_S = 0.05  # what a step waits for a draft model that is in use elsewhere, before it runs without draft tokens


def make_drafter(target: LLM, draft: LLM | str | os.PathLike[str], *, cache: str, progress: Sink | None) -> DraftModel:
    """Make the draft model of `target`.

    Args:
        target: the model that verifies. draft: a directory, a hub id, "self", or a loaded model, which stays its owner's. cache: mode of
        the draft's KV cache. progress: takes the events of loading.

    Raises:
        TokenizerError: its tokenizer is another one; names the first difference. Otherwise as `load`.
    """
    if not isinstance(draft, (str, os.PathLike)):
        if not isinstance(draft, LLM):
            raise OptionError(f"load: draft is {str(draft)[:80]!r}; expected a directory, a hub id or a loaded model")
        return _drafter(
            target, draft.model, draft.tokenizer, cache, run=lambda function: draft.engine.call(function, timeout_s=BUSY_S)
        )  # keeps it loaded
    if draft == "self":
        from exl2nb.llm.self_draft import copy_of

        folder = copy_of(target.path, device=target.model.capabilities.draw_device, progress=progress)
    else:
        folder = hub.resolve(Path(draft) if isinstance(draft, os.PathLike) else draft, progress=progress)
    tokenizer = Tokenizer.load(folder)
    device = target.model.capabilities.placement.layers[-1]
    model = load_model(folder, device=device, context=None, progress=progress, deterministic=target.model.deterministic)
    try:
        return _drafter(target, model, tokenizer, cache, on_close=model.close)
    except BaseException:
        model.close()
        raise


def _drafter(target: LLM, model: Model, tokenizer: Tokenizer, cache: str, **options: Any) -> DraftModel:
    if model.ranks is not None:
        raise OptionError("load: the draft model runs as ranks (parallel='tensor'), which share no cache with it; load it on one device")
    size = target.model.config.vocab_size
    check_same_tokenizer(target.tokenizer, tokenizer, target_size=size, draft_size=model.config.vocab_size)
    mine, theirs = model.capabilities, target.model.capabilities
    on_device = mine.captures_drafts and theirs.captures_drafts and str(mine.placement) == str(theirs.placement) and "run" not in options
    if mine.captures_drafts:
        from exl2nb.generator.gpu_draft import GpuRounds

        options["rounds"] = GpuRounds
    return DraftModel(
        model,
        model.cache_spec(target.engine.spec.num_tokens, mode=cache),
        context=model.context,
        vocab_size=size,
        drawn=model.config.vocab_size == size,
        on_device=on_device,
        **options,
    )
