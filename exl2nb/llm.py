"""The facade: a loaded model with generate, stream and chat, and the functions behind `import exl2nb as ex`."""

from __future__ import annotations

import html
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from exl2nb.cache.modes import parse_mode
from exl2nb.core import env
from exl2nb.core.errors import DeviceError, GenerationError, OptionError, TokenizerError
from exl2nb.core.options import check_keywords
from exl2nb.core.progress import Sink, showing
from exl2nb.facade.asking import compile_structure, ids_of, request_of, sample_options
from exl2nb.facade.chatting import Chatting
from exl2nb.facade.drafting import make_drafter
from exl2nb.facade.reading import Reading
from exl2nb.facade.working import Working, call_back
from exl2nb.generator.engine import Engine
from exl2nb.generator.handle import Handle
from exl2nb.generator.handles import Handles
from exl2nb.generator.prompt_cache import PromptCache
from exl2nb.generator.request import Chunk, Completion, Request, Token
from exl2nb.generator.scheduler import MAX_CHUNK
from exl2nb.io import hub
from exl2nb.model.facts import unusual
from exl2nb.model.fingerprint import fingerprint
from exl2nb.model.loader import load_model
from exl2nb.model.model import Model
from exl2nb.sampling.params import SamplingParams, check_integer
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.converter.result import Conversion
    from exl2nb.eval.comparison import Comparison
    from exl2nb.model.config import ModelConfig
    from exl2nb.model.inspect import Inspection
    from exl2nb.sampling.draw import Draw
    from exl2nb.sampling.explanation import Explanation

__all__ = ["LLM", "Chunk", "Completion", "Handle", "Token", "compare", "convert", "demo", "inspect", "load"]

CACHE_MODES = ("fp16", "fp32")
DEVICES = ("auto", "cpu", "cuda")
CONTEXT = 4096  # tokens, where the caller does not say and the model allows more: a cache that fits small machines
GPU_CHUNK = 2048  # prompt tokens per step on a GPU: fewer leave its multipliers idle
CACHE_TOKENS = 4096  # at least, so that several short requests run together on a model with a short context
Messages = Sequence[Mapping[str, Any]]


class LLM(Reading, Chatting, Working):
    """A loaded model. Made by `load`; closing it (also by leaving a `with` block) gives its memory back.

    Generation options, the same for every method: max_tokens (256), stop (texts and token ids), ignore_eos, banned_strings, token_healing,
    negative_prompt with cfg_scale, beams, speculation, top_logprobs, return_logits and the other fields of `generator.request.Request`;
    and the fields of `SamplingParams`: temperature (1.0; 0 = greedy), top_k, top_p, min_p, repetition_penalty, min_tokens, seed and many
    more. What the answer must look like: schema (a JSON schema, pydantic model, dataclass or other type), regex, choice (texts) or grammar
    (Lark or EBNF); `completion.parsed` is then the value. An unknown option is an OptionError.

    Any number of threads may call it; what they ask for runs together.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, path: Path, cache: str, context: int, cache_tokens: int, max_sequences: int
    ) -> None:
        self.path, self.model, self.tokenizer = path, model, tokenizer
        self.engine = Engine(
            model,
            tokenizer,
            model.cache_spec(cache_tokens, mode=cache),
            context=context,
            vocab_size=model.config.vocab_size,
            max_sequences=max_sequences,
            max_chunk=GPU_CHUNK if model.device == "cuda" else MAX_CHUNK,
            device=model.device,
            stepper=_gpu_stepper if model.device == "cuda" else None,
        )
        self.cache = PromptCache(self.engine, partial(fingerprint, path, model))
        self._finalizer = weakref.finalize(self, self.engine.close)
        self._finalizer.atexit = False

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> LLM:
        """The same as `exl2nb.load`."""
        return load(path, **options)

    # ---- what it is

    @property
    def config(self) -> ModelConfig:
        """Sizes and features."""
        return self.model.config

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.engine.context

    @property
    def bpw(self) -> float:
        """Stored bits per weight of the decoder's matrices."""
        from exl2nb.model.inspect import inspect as inspect_directory

        if not hasattr(self, "_bpw"):
            self._bpw = float(inspect_directory(self.path).decoder_bpw)
        return self._bpw

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.model.weight_bytes

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache."""
        return self.engine.spec.total_bytes

    # ---- text

    @overload
    def generate(self, prompt: str, *, n: None = None, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[int], *, n: None = None, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: list[str], *, n: None = None, **options: Any) -> list[Completion]: ...
    @overload
    def generate(self, prompt: str | Sequence[int], *, n: int, **options: Any) -> list[Completion]: ...
    def generate(self, prompt: Any, *, n: int | None = None, **options: Any) -> Completion | list[Completion]:
        """Continue a prompt and return when it is complete.

        Args:
            prompt: text, token ids, or a list of texts, which run together.
            n: give a list of so many answers to one prompt, which is computed once for all of them: samples, where `seed` is that of the
                first and the others count on from it; with beams=, the n best beams.
            options: see the class. And on_chunk: called with every `Chunk` of one prompt's answer, in this thread; what it raises cancels
                the request and comes out here.

        Raises:
            OptionError, ContextOverflow: the request cannot run; says why. GenerationError: the engine failed on it. EngineClosed: closed.
            KeyboardInterrupt: at once; everything this call asked for is cancelled and its pages are free again.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     three = llm.generate("It was", n=3, seed=1, max_tokens=4)
            ...     beam = llm.generate("It was", beams=4, max_tokens=4)
            ...     free = llm.generate("The", max_tokens=8, temperature=0, banned_strings=["the"], stop=["."])
            >>> [one.seed for one in three], beam.score < 0, "the" in free.text
            ([1, 2, 3], True, False)
        """
        if (on_chunk := options.pop("on_chunk", None)) is not None:
            if n is not None or _is_batch(prompt):
                raise OptionError(
                    "generate: on_chunk reads one answer; for several, iterate llm.batch(prompts) or llm.stream(prompts).chunks()"
                )
            return _with_prompt(call_back(self._submit(prompt, "generate", options, stream=True), on_chunk), prompt)
        beams = options.get("beams", 1) != 1
        if _is_batch(prompt):
            if n is not None:
                raise OptionError(f"generate: n is {n} and there are {len(prompt)} prompts; give one prompt, or repeat them")
            return self._results(
                self._submit_all(prompt, "generate", [self._compiled(options, "generate")] * len(prompt), stream=False), prompt
            )
        if n is not None and not beams:
            each = sample_options(self._compiled(options, "generate"), n, where="generate")
            return self._results(self._submit_all([prompt] * n, "generate", each, stream=False), [prompt] * n)
        if n is not None:
            options["n"] = n
        done = _with_prompt(self._submit(prompt, "generate", options, stream=False).result(), prompt)
        return done if n is None else list(done.beams)

    @overload
    def stream(self, prompt: str | Sequence[int], *, n: None = None, **options: Any) -> Handle: ...
    @overload
    def stream(self, prompt: list[str], *, n: None = None, **options: Any) -> Handles: ...
    @overload
    def stream(self, prompt: str | Sequence[int], *, n: int, **options: Any) -> Handles: ...
    def stream(self, prompt: Any, *, n: int | None = None, **options: Any) -> Handle | Handles:
        """Continue a prompt and yield `Chunk`s as they come.

        Leaving the loop early (break, an exception, an interrupt, dropping the handle) cancels the request. Several prompts, or `n` samples
        of one, give `Handles`, whose `chunks()` come with the number of their request.

        Example:
            >>> llm = demo()
            >>> for chunk in llm.stream("It was", max_tokens=5, temperature=0):
            ...     pass
            >>> llm.close()
        """
        if n is None and not _is_batch(prompt):
            return self._submit(prompt, "stream", options, stream=True)
        if n is not None and (_is_batch(prompt) or options.get("beams", 1) != 1):
            raise OptionError(f"stream: n is {n}; expected one prompt and no beams with it")
        options = self._compiled(options, "stream")
        each = [dict(options) for _ in prompt] if n is None else sample_options(options, n, where="stream")
        return Handles(self._submit_all(prompt if n is None else [prompt] * n, "stream", each, stream=True))

    async def agenerate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """`generate` for event loops; cancelling the task cancels the request."""
        return _with_prompt(await self._submit(prompt, "agenerate", options, stream=False).aresult(), prompt)

    def astream(self, prompt: str | Sequence[int], **options: Any) -> Handle:
        """`stream` for `async for`; the event loop stays free between chunks."""
        return self._submit(prompt, "astream", options, stream=True)

    def explain(self, prompt: str | Sequence[int], *, at: int = 0, **options: Any) -> Explanation:
        """Show how a token is chosen: what every filter does to the model's probabilities, and the draw.

        Args:
            prompt: as for `generate`.
            at: which new token to look at; those before it are generated.
            options: as for `generate`, max_tokens excepted; the same seed draws the same tokens there.

        Raises:
            OptionError: `at` out of range. GenerationError: the answer ends before that token. Otherwise as `generate`.
        """
        check_integer("at", at, 0, self.context)
        check_keywords(dict.fromkeys(options), [*_request_options(), "schema", "regex", "choice", "grammar"], where="explain")
        found: list[Explanation] = []

        def look(draw: Draw) -> None:
            if draw.index == at:
                found.append(draw.explain())

        hooks = options.pop("post_sampling", ())
        options["post_sampling"] = (look, *((hooks,) if callable(hooks) else hooks))
        completion = self._submit(prompt, "explain", {**options, "max_tokens": at + 1}, stream=False).result()
        if not found:
            raise GenerationError(f"explain: the answer ended after {len(completion.tokens)} tokens; token {at} was asked for, lower `at`")
        return replace(found[0], names=self.tokenizer.piece)

    # ---- chat

    @overload
    def chat(self, messages: Messages | str, *, stream: Literal[False] = False, **options: Any) -> Completion: ...
    @overload
    def chat(self, messages: Messages | str, *, stream: Literal[True], **options: Any) -> Handle: ...
    def chat(self, messages: Messages | str, *, stream: bool = False, **options: Any) -> Completion | Handle:
        """Answer a conversation, in the format the model was trained on.

        Args:
            messages: dicts with "role" and "content", or one text from the user.
            stream: give a handle to iterate instead of the answer.
            options: those of the class; and template (Jinja source instead of the model's own), tools, template_options (more variables).

        Raises:
            TokenizerError: the model has no chat template, or the template refuses the messages. Otherwise as `generate`.
        """
        prompt = self._chat_ids(messages, options)
        handle = self._submit(prompt, "chat", options, stream=stream)
        return handle if stream else handle.result()

    async def achat(self, messages: Messages | str, **options: Any) -> Completion:
        """`chat` for event loops."""
        prompt = self._chat_ids(messages, options)
        return await self._submit(prompt, "achat", options, stream=False).aresult()

    # ---- end

    def close(self) -> None:
        """End what runs, join the engine's thread and give the memory back. A second call does nothing."""
        self.engine.close()
        self._finalizer.detach()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self.config
        state = ", closed" if self.engine.closed else ""
        return (
            f"LLM({self.name}: {config.architecture}, {config.num_layers} layers, {self.weight_bytes / 2**20:.1f} MiB of weights, "
            f"context {self.context}, {self.cache_bytes / 2**20:.1f} MiB of {self.engine.spec.mode} cache{state})"
        )

    def _repr_html_(self) -> str:
        config, spec = self.config, self.engine.spec
        rows = {
            "architecture": f"{config.architecture}, {config.num_layers} layers, hidden size {config.hidden_size}",
            "weights": f"{self.weight_bytes / 2**20:.1f} MiB on {self.model.device}",
            "vocabulary": f"{config.vocab_size} tokens",
            "context": f"{self.context} tokens",
            "cache": f"{spec.num_tokens} tokens, {spec.mode}, {self.cache_bytes / 2**20:.1f} MiB",
            "pages": f"{self.engine.pages.num_free} of {spec.num_pages} free",
        }
        rows["chat template"] = ", ".join(sorted(self.tokenizer.templates.templates)) or "none"
        if notable := unusual(config):
            rows["unusual"] = "; ".join(notable)
        cells = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in rows.items()
        )
        state = " (closed)" if self.engine.closed else ""
        return f"<table><caption>{html.escape(self.name)}{state}</caption>{cells}</table>"

    # ---- inside

    def _submit(self, prompt: Any, where: str, options: dict[str, Any], *, stream: bool) -> Handle:
        return self._submit_all([prompt], where, [options], stream=stream)[0]

    def _submit_all(self, prompts: Sequence[Any], where: str, options: Sequence[dict[str, Any]], *, stream: bool) -> list[Handle]:
        vocab = self.config.vocab_size
        requests = [request_of(prompt, one, self.tokenizer, vocab, where=where, stream=stream) for prompt, one in zip(prompts, options)]
        handles = self.engine.submit_many(requests, group=object() if len(requests) > 1 else None)
        for handle in handles:
            handle.owner = self
        return handles

    def _compiled(self, options: dict[str, Any], where: str) -> dict[str, Any]:
        """The options with their structure compiled, once for all requests made of them."""
        options = dict(options)
        compile_structure(options, self.tokenizer, self.config.vocab_size, where=where)
        return options

    def _results(self, handles: Sequence[Handle], prompts: Sequence[Any]) -> list[Completion]:
        try:
            return [_with_prompt(handle.result(), one) for handle, one in zip(handles, prompts)]
        finally:
            for handle in handles:  # by hand: a notebook keeps the traceback, and with it this list
                handle.cancel()

    def _chat_ids(self, messages: Messages | str, options: dict[str, Any]) -> list[int]:
        format_options = {name: options.pop(name) for name in ("template", "tools", "template_options") if name in options}
        return self.tokenizer.encode(self.render_chat(messages, **format_options), add_special=False)


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(one, str) for one in prompt)


def _request_options() -> list[str]:
    names = [f.name for cls in (Request, SamplingParams) for f in fields(cls)]
    return [name for name in names if name not in ("prompt_ids", "sampling", "stream", "max_tokens")]


def _with_prompt(completion: Completion, prompt: Any) -> Completion:
    if not isinstance(prompt, str):
        return completion
    return replace(completion, prompt=prompt, beams=tuple(replace(one, prompt=prompt) for one in completion.beams))


def load(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | None = None,
    cache: str = "fp16",
    context: int | None = None,
    cache_tokens: int | None = None,
    max_sequences: int = 16,
    draft: LLM | str | os.PathLike[str] | None = None,
    deterministic: bool | None = None,
    progress: Sink | Literal["auto"] | None = "auto",
    **unknown: Any,
) -> LLM:
    """Load a model, EXL2 or plain fp16, bf16 or fp32.

    Args:
        path: model directory, or a hub id such as "owner/name".
        revision: branch, tag or commit on the hub; EXL2 models often have one branch per bitrate.
        device: "cpu", "cuda" or "auto" (the best there is); None = the variable EXL2NB_DEVICE, or "auto".
        cache: how keys and values are kept: "fp16" or "fp32"; "q8", "q6" (keys in 8 bits, values in 4) or "q4", which hold 1.9, 2.5 and 3.6
            times the tokens of fp16 in the same memory; "fp8"; or the bits of keys and values apart, as "k8v4" (4, 8 or 16 each).
        context: tokens of prompt and answer together; None = what the model allows, at most 4096.
        cache_tokens: tokens the cache holds for all requests together; None = the context, at least 4096.
        max_sequences: requests that run together; others wait.
        draft: a smaller model with the same tokenizer, which guesses tokens that this one verifies several at a time: the same text,
            sooner. A directory, a hub id, or a loaded model. Requests use it unless they say speculation="off".
        deterministic: on CUDA, make every token independent of how its prompt was cut and of what ran beside it, at the price of slow
            prompts; decoding up to 8 tokens a step, and everything on the CPU, always is. None = the variable EXL2NB_DETERMINISTIC, or False.
        progress: takes the events of stages "download" and "load". "auto": shown where you look (a widget in a notebook, a line on a
            terminal); None: silent.

    Raises:
        ModelNotFound, ConfigError, FormatError, UnknownArchitecture, TokenizerError: the directory cannot be used; says why.
        OptionError: an option unknown or out of range. DeviceError: the device is not available.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo() as llm:
        ...     llm.generate("It was", max_tokens=3, temperature=0).finish_reason
        'length'
    """
    known = ["revision", "device", "cache", "context", "cache_tokens", "max_sequences", "draft", "deterministic", "progress"]
    check_keywords(unknown, known, where="load")
    cache = parse_mode(cache, where="load")
    for name, value in (("context", context), ("cache_tokens", cache_tokens), ("max_sequences", max_sequences)):
        if value is not None:
            check_integer(f"load: {name}", value, 1, 1 << 24)
    place = _device(device)
    exact = env.get("EXL2NB_DETERMINISTIC", "0") == "1" if deterministic is None else deterministic
    with showing(progress, f"load {Path(path).name}") as sink:
        folder = hub.resolve(path, revision=revision, progress=sink)
        with _named_memory_errors(folder):
            model = load_model(folder, device=place, context=context, progress=sink, deterministic=exact)
    try:
        tokenizer = Tokenizer.load(folder)
        _check_vocabulary(tokenizer, model, folder)
        tokens = min(model.context, CONTEXT) if context is None else context
        held = max(tokens, CACHE_TOKENS) if cache_tokens is None else max(tokens, cache_tokens)
        with _named_memory_errors(folder):
            llm = LLM(model, tokenizer, path=folder, cache=cache, context=tokens, cache_tokens=held, max_sequences=max_sequences)
    except BaseException:
        model.close()
        raise
    if draft is not None:
        try:
            with showing(progress, "load the draft model") as sink:
                llm.engine.drafter = make_drafter(llm, draft, cache=cache, progress=sink)
        except BaseException:
            llm.close()
            raise
    return llm


def demo(bpw: float | None = None, **options: Any) -> LLM:
    """Load the small model that comes with the package.

    Args:
        bpw: bits per weight; it is then converted first (a minute), once per machine, into ~/.cache/exl2nb. None = its own fp16 weights.
        options: those of `load`.
    """
    folder = Path(__file__).resolve().parent / "demo_model"
    if bpw is None:
        return load(folder, **options)
    from exl2nb.core.options import check_range

    check_range("bpw", bpw, 2, 8, where="demo")
    made = Path.home() / ".cache" / "exl2nb" / f"demo-exl2-{bpw:g}bpw"
    if not (made / "config.json").is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        convert(folder, made, bpw=bpw, progress=options.get("progress", "auto"))
    return load(made, **options)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    bpw: float | None = None,
    progress: Sink | Literal["auto"] | None = "auto",
    **options: Any,
) -> Conversion:
    """Quantise a model to EXL2. Options and errors: `exl2nb.converter.job.ConversionJob`.

    Args:
        src: directory or hub id of an fp16, bf16 or fp32 model.
        dst: directory to make.
        bpw: bits per weight to reach; or leave it out and give `target`, such as {"bytes": "2GB"}.
        progress: takes the events of every stage; "auto" and None as in `load`.
    """
    import inspect as python_inspect

    from exl2nb.converter.job import ConversionJob

    check_keywords(options, list(python_inspect.signature(ConversionJob).parameters)[2:], where="convert")
    job = ConversionJob(src, dst, bpw=bpw, **options)
    with showing(progress, "convert" if bpw is None else f"convert to {bpw:g} bpw") as sink:
        return job.run(sink)


def compare(
    reference: LLM | str | os.PathLike[str],
    other: LLM | str | os.PathLike[str],
    text: str | os.PathLike[str] | Sequence[int] | None = None,
    *,
    rows: int = 16,
    length: int = 512,
    cache: str = "fp32",
    progress: Sink | Literal["auto"] | None = "auto",
) -> Comparison:
    """Measure what a model lost against its reference: perplexity of both, KL divergence, top-1 agreement, per token.

    Args:
        reference: the model taken as the truth; loaded, or a directory.
        other: the model that is measured.
        text: a text, or a `Path` to a text file; None = the evaluation text of the package (written for the demo model). Token ids are
            one row, whatever `rows` and `length` say.
        rows: rows of tokens.
        length: tokens per row.
        cache: how the measured model keeps keys and values, as in `load`; the reference keeps them in fp32. `compare(llm, llm, cache="q4")`
            shows what a quantised cache costs.
        progress: takes the events of stage "compare"; "auto" and None as in `load`.

    Returns:
        The numbers; the last line of a cell shows them, `.to_frame()` gives a DataFrame.

    Cost: both models run over rows * length tokens. A loaded model's other requests wait meanwhile.
    """
    from contextlib import ExitStack

    import torch

    from exl2nb.eval.divergence import compare_models
    from exl2nb.eval.text import read_text, token_rows

    source = Path(__file__).resolve().parent / "demo_model" / "evaluation.txt" if text is None else text
    words = read_text(source) if isinstance(source, os.PathLike) else source
    cache = parse_mode(cache, where="compare")
    with ExitStack() as stack:
        sink = stack.enter_context(showing(progress, "compare"))
        one, two = (m if isinstance(m, LLM) else stack.enter_context(load(m, progress=sink)) for m in (reference, other))
        if isinstance(words, str):
            ids = token_rows(one.tokenizer, words, rows=rows, length=length, where="compare")
        else:
            ids = torch.tensor([ids_of(words, one.tokenizer, where="compare", name="text")])
        for _, llm in sorted({id(one): one, id(two): two}.items()):  # one order for all: opposite calls must not block each other
            stack.enter_context(llm.engine.exclusive())
        return compare_models(one.model, two.model, ids, sink, reference_name=one.name, other_name=two.name, cache=cache)


def inspect(path: str | os.PathLike[str], *, revision: str | None = None) -> Inspection:
    """Bits per matrix of a model directory or hub id, from the headers of its files alone."""
    from exl2nb.model.inspect import inspect as inspect_directory

    return inspect_directory(hub.resolve(path, revision=revision))


def _device(device: str | None) -> str:
    wanted = env.get("EXL2NB_DEVICE", "auto") if device is None else device
    if wanted not in DEVICES:
        raise OptionError(f"load: device is {device!r}; expected one of {', '.join(DEVICES)}")
    if wanted == "cpu":
        return "cpu"
    from exl2nb import ops

    problem = ops.libraries().cuda_problem
    if wanted == "cuda" and problem:
        raise DeviceError(f"device 'cuda' cannot be used: {problem}; use device='cpu', or leave it at 'auto'; `exl2nb doctor` says more")
    return "cpu" if problem else "cuda"


def _gpu_stepper(model: Any, cache: Any) -> Any:
    from exl2nb.generator.gpu_stepper import GpuStepper

    return GpuStepper(model, cache)


@contextmanager
def _named_memory_errors(folder: Path) -> Iterator[None]:
    """Out of memory on the GPU as a DeviceError that says what there was."""
    import torch

    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; an op of the compiled library raises a plain one
        if not isinstance(error, torch.OutOfMemoryError) and "aten::new_empty" not in str(error) and "out of memory" not in str(error):
            raise
        free, total = torch.cuda.mem_get_info()
        needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        raise DeviceError(
            f"{folder.name} does not fit the GPU: its files have {needed / 2**30:.1f} GiB, {free / 2**30:.1f} of {total / 2**30:.1f} GiB "
            "are free; close other models, take fewer bits per weight, a smaller context= or cache='q4', or device='cpu'"
        ) from error


def _check_vocabulary(tokenizer: Tokenizer, model: Model, folder: Path) -> None:
    highest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= model.config.vocab_size:
        raise TokenizerError(
            f"{folder}: tokenizer.json has token {highest}, the model's vocabulary ends at {model.config.vocab_size - 1}; "
            "the tokenizer belongs to another model: copy the right one"
        )
