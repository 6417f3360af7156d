"""The loaded model as a notebook sees it: generate, stream and chat, their async twins, and what it is."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from exl2nb.core.errors import GenerationError, OptionError
from exl2nb.core.options import check_keywords, shown, spelled_out
from exl2nb.core.show import facts
from exl2nb.generator.engine import Engine
from exl2nb.generator.handle import Handle, Handles
from exl2nb.generator.job import Job
from exl2nb.generator.prompt_cache import PromptCache
from exl2nb.generator.request import Chunk, Completion, Request
from exl2nb.io.hub import display_name
from exl2nb.llm.chat_prompt import ChatMixin
from exl2nb.llm.inside import InsideMixin
from exl2nb.llm.load_keywords import LOAD_DEFAULTS, LoadOptions
from exl2nb.llm.loras import Loras
from exl2nb.llm.request_options import CHAT_DEFAULT_OPTIONS, OPTION_DEFAULTS, ChatOptions, GenerateOptions, RequestOptions
from exl2nb.llm.requests import compile_structure, request_of, sample_options
from exl2nb.model.facts import unusual_features
from exl2nb.model.loader import fingerprint
from exl2nb.model.model import Model
from exl2nb.sampling.defaults import CHAT_DEFAULTS, SamplingDefaults
from exl2nb.sampling.params import SamplingParams, check_integer
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exl2nb.model.config import ModelConfig
    from exl2nb.model.vision.encoder import VisionEncoder
    from exl2nb.sampling.explanation import Explanation
    from exl2nb.sampling.replay import Draw
    from exl2nb.server.http_server import Server

Messages = Sequence[Mapping[str, Any]]


class LLM(InsideMixin, ChatMixin):
    """A loaded model. Made by `load`; closing it (also by leaving a `with` block) gives its memory back.

    Generation options, the same for every method: max_tokens (256), stop (texts and token ids), ignore_eos, banned_strings, token_healing,
    negative_prompt with cfg_scale, beams, speculation, top_logprobs, return_logits and the other fields of `generator.request.Request`;
    and the fields of `SamplingParams`: temperature (1.0; 0 = greedy), top_k, top_p, min_p, repetition_penalty, min_tokens, seed and many
    more. What the answer must look like: schema (a JSON schema, pydantic model, dataclass or other type), regex, choice (texts) or grammar
    (Lark or EBNF); `completion.parsed` is then the value. An unknown option is an OptionError.

    Any number of threads may call it; their requests are batched.

    cache: what the pages of the KV cache hold: `cache.snapshot()`, `cache.save(path)`, `cache.load(path)`, `cache.clear()`, `cache.reuse`.
    vision: the tower of a model that sees, or None: `chat` takes messages with pictures.
    sampling_defaults: sampling options of `chat` that a request does not give, and where they come from: the model's
    generation_config.json, or the library. `generate` and `stream` do not use them.
    loras: adapters: `loras.load(path, name=...)`, `loras.unload(name)`, `loras.list()`; a request takes one with lora="name", or several
    with lora={"name": 0.7, "other": 0.3}.

    Example: an answer with a form of its own, one that is finished in the middle of a word, two prompts in step, guesses, alternatives.
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     pet = llm.generate("My pet is a", choice=[" cat", " dog"], seed=1).parsed
        ...     year = llm.generate("It was in", regex=" 1[0-9]{3}", temperature=0).text
        ...     word = llm.generate("The old m", token_healing=True, temperature=0, max_tokens=1).text
        ...     guided = llm.generate("It was", negative_prompt="He was", cfg_scale=1.5, temperature=0, max_tokens=8)
        ...     always = {"kind": "ngram", "adaptive": False}  # also where rows cost more than guesses bring
        ...     copied = llm.generate("The fox jumps over the dog near the river. " * 4, speculation=always, temperature=0, max_tokens=40)
        ...     first = llm.generate("It was", temperature=0, max_tokens=1, top_logprobs=2, return_logits=True)
        >>> pet in (" cat", " dog"), year[:2], len(year), word[0].isalpha(), guided.text != ""
        (True, ' 1', 5, True, True)
        >>> copied.speculation.accepted > 0, len(first.tokens[0].top), first.logits.shape, first.tokens[0].source
        (True, 2, (1, 4096), 'target')
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        path: Path,
        cache: str,
        context: int,
        cache_tokens: int,
        max_sequences: int,
        name: str = "",
        vision: VisionEncoder | None = None,
        sampling_defaults: SamplingDefaults = CHAT_DEFAULTS,
    ) -> None:
        self.vision, self._warned = vision, set[str]()
        self.sampling_defaults = sampling_defaults
        self.path, self.model, self.tokenizer = path, model, tokenizer
        self._name = name or display_name(path)
        spec = model.cache_spec(cache_tokens, mode=cache)
        self.engine = Engine(
            model,
            tokenizer,
            spec,
            context=context,
            vocab_size=model.config.vocab_size,
            max_sequences=max_sequences,
            block_tokens=0 if vision is None or not model.config.sees_whole else vision.largest,
        )
        self.cache = PromptCache(self.engine, partial(fingerprint, path, model))
        self.loras = Loras(model, self.engine)
        self._finalizer = weakref.finalize(self, self.engine.close)
        self._finalizer.atexit = False

    @classmethod
    @spelled_out(LoadOptions, LOAD_DEFAULTS)
    def load(cls, path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> LLM:
        """The same as `exl2nb.load`."""
        from exl2nb.llm.load import load

        return load(path, **options)

    # ---- what it is

    @property
    def config(self) -> ModelConfig:
        """Sizes and features."""
        return self.model.config

    @property
    def name(self) -> str:
        """For people: "owner/name@revision" for a model of the hub ("owner/name" for its main branch), else the last part of its path."""
        return self._name

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.engine.context

    @cached_property
    def bpw(self) -> float:
        """Stored bits per weight of the decoder's matrices."""
        from exl2nb.model.inspection import inspect as inspect_directory

        return float(inspect_directory(self.path).decoder_bpw)

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
    def generate(self, prompt: str, *, n: None = None, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[int], *, n: None = None, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    def generate(self, prompt: list[str], *, n: None = None, **options: Unpack[GenerateOptions]) -> list[Completion]: ...
    @overload
    def generate(self, prompt: str | Sequence[int], *, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]: ...
    @spelled_out(GenerateOptions, OPTION_DEFAULTS)
    def generate(self, prompt: Any, *, n: int | None = None, **options: Any) -> Completion | list[Completion]:
        """Continue a prompt and return when it is complete.

        Args:
            prompt: text, token ids, or a list of texts, which run together.
            n: return a list of n answers to one prompt, which is computed once for all of them: samples, where `seed` is that of the
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
            if not callable(on_chunk):
                raise OptionError(f"generate: on_chunk is {on_chunk!r}; expected a function of a Chunk")
            return _with_prompt(_call_back(self._submit(prompt, "generate", options, stream=True), on_chunk), prompt)
        handles, prompts = self._submit_some(prompt, n, "generate", options)
        try:
            return _answers([_with_prompt(handle.result(), one) for handle, one in zip(handles, prompts)], prompt, n)
        finally:
            for handle in handles:  # by hand: a notebook keeps the traceback, and with it this list
                handle.cancel()

    @overload
    def stream(self, prompt: str | Sequence[int], *, n: None = None, **options: Unpack[RequestOptions]) -> Handle: ...
    @overload
    def stream(self, prompt: list[str], *, n: None = None, **options: Unpack[RequestOptions]) -> Handles: ...
    @overload
    def stream(self, prompt: str | Sequence[int], *, n: int, **options: Unpack[RequestOptions]) -> Handles: ...
    @spelled_out(RequestOptions, OPTION_DEFAULTS)
    def stream(self, prompt: Any, *, n: int | None = None, **options: Any) -> Handle | Handles:
        """Continue a prompt and yield `Chunk`s as they come.

        Leaving the loop early (break, an exception, an interrupt, dropping the handle) cancels the request. Several prompts, or `n` samples
        of one, give `Handles`, whose `chunks()` come with the number of their request.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     shown = "".join(chunk.text for chunk in llm.stream("It was", max_tokens=5, temperature=0))
            ...     shown == llm.generate("It was", max_tokens=5, temperature=0).text
            True
        """
        if n is None and not _is_batch(prompt):
            return self._submit(prompt, "stream", options, stream=True)
        if n is not None and (_is_batch(prompt) or options.get("beams", 1) != 1):
            raise OptionError(f"stream: n is {n}; expected one prompt and no beams with it")
        options = self._compiled(options, "stream")
        each = [dict(options) for _ in prompt] if n is None else sample_options(options, n, where="stream")
        return Handles(self._submit_all(prompt if n is None else [prompt] * n, "stream", each, stream=True))

    @overload
    async def agenerate(self, prompt: str, *, n: None = None, **options: Unpack[RequestOptions]) -> Completion: ...
    @overload
    async def agenerate(self, prompt: Sequence[int], *, n: None = None, **options: Unpack[RequestOptions]) -> Completion: ...
    @overload
    async def agenerate(self, prompt: list[str], *, n: None = None, **options: Unpack[RequestOptions]) -> list[Completion]: ...
    @overload
    async def agenerate(self, prompt: str | Sequence[int], *, n: int, **options: Unpack[RequestOptions]) -> list[Completion]: ...
    @spelled_out(RequestOptions, OPTION_DEFAULTS)
    async def agenerate(self, prompt: Any, *, n: int | None = None, **options: Any) -> Completion | list[Completion]:
        """`generate` for event loops; cancelling the task cancels its requests.

        Example:
            >>> import asyncio, exl2nb as ex
            >>> async def both(llm):
            ...     return await asyncio.gather(*(llm.agenerate(text, max_tokens=3) for text in ("It was", "She said")))
            >>> with ex.demo(progress=None) as llm:
            ...     [len(one.tokens) for one in asyncio.run(both(llm))]
            [3, 3]
        """
        handles, prompts = self._submit_some(prompt, n, "agenerate", options)
        try:
            return _answers([_with_prompt(await handle.aresult(), one) for handle, one in zip(handles, prompts)], prompt, n)
        finally:
            for handle in handles:
                handle.cancel()

    @spelled_out(RequestOptions, OPTION_DEFAULTS)
    def astream(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Handle:
        """`stream` of one prompt for `async for`; the event loop stays free. Several prompts: `async for event in llm.batch(prompts)`."""
        return self._submit(prompt, "astream", dict(options), stream=True)

    @spelled_out(RequestOptions, OPTION_DEFAULTS)
    def explain(self, prompt: str | Sequence[int], *, at: int = 0, **options: Unpack[RequestOptions]) -> Explanation:
        """Show how a token is chosen: what every filter does to the model's probabilities, and the draw.

        Args:
            prompt: as for `generate`.
            at: which new token to look at; those before it are generated.
            options: as for `generate`, max_tokens excepted; the same seed draws the same tokens there.

        Raises:
            OptionError: `at` out of range. GenerationError: the answer ends before that token. Otherwise as `generate`.
        """
        check_integer("at", at, 0, self.context)
        asked: dict[str, Any] = {**options}
        check_keywords(
            dict.fromkeys(asked), [*_request_options(), "negative_prompt", "schema", "regex", "choice", "grammar"], where="explain"
        )
        found: list[Explanation] = []

        def look(draw: Draw) -> None:
            if draw.index == at:
                found.append(draw.explain())

        hooks = asked.pop("post_sampling", ())
        if not callable(hooks) and not isinstance(hooks, (tuple, list)):
            raise OptionError(f"explain: post_sampling is {shown(hooks)}; expected a function or several")
        asked["post_sampling"] = (look, *((hooks,) if callable(hooks) else hooks))
        banned = asked.get("banned_strings", ())
        later = max((len(text.encode()) for text in ((banned,) if isinstance(banned, str) else banned) if isinstance(text, str)), default=0)
        # a banned text is known by its last token; the answer then goes back to its first one, and draws that again
        wanted = min(at + 1 + later, max(at + 1, self.context - 1))
        completion = self._submit(prompt, "explain", {**asked, "max_tokens": wanted}, stream=False).result()
        if not found:
            raise GenerationError(f"explain: the answer ended after {len(completion.tokens)} tokens; token {at} was asked for, lower `at`")
        return replace(found[-1], names=self.tokenizer.piece)

    # ---- chat

    @overload
    def chat(self, messages: Messages | str, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]) -> Completion: ...
    @overload
    def chat(self, messages: Messages | str, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> Handle: ...
    @spelled_out(ChatOptions, CHAT_DEFAULT_OPTIONS)
    def chat(self, messages: Messages | str, *, stream: bool = False, **options: Any) -> Completion | Handle:
        """Answer a conversation, in the format the model was trained on.

        Args:
            messages: dicts with "role" and "content", or one text from the user. A content is a text, or a list of parts: texts,
                {"type": "text", "text": ...}, and on a model that sees {"type": "image", "image": a path, bytes, a PIL image, an array or a
                figure} and {"type": "video", "video": a file or a list of pictures, "fps": 2}.
            stream: give a handle to iterate instead of the answer.
            options: those of the class, and
                template: Jinja source instead of the model's own, or the name of an instruct format: "chatml", "llama2", "alpaca",
                "vicuna", "mistral". template_options: more variables for it (enable_thinking=False).
                tools: functions that may be called, as JSON schemas. tool_choice: "auto", "none", "required" (call at least one), or a
                function's name. parallel_tool_calls: several in one answer. Arguments of every call fit their schema.
                continue_final_message: the last message is the assistant's, and the answer continues it.
                reasoning_budget: tokens after which the reasoning is ended.
                generation_config: False: do not use the values of the model's generation_config.json for this answer.

        Sampling options that are not given are those of `llm.sampling_defaults`: the values of the model's generation_config.json, or
        temperature 0.7 and top_p 0.95. `completion.sampling` has what was used, `completion.sampling_defaults` what was added.

        Returns:
            `completion.reply` has the answer taken apart: content, reasoning, tool_calls; `handle.deltas()` the same while it comes.

        Raises:
            TokenizerError: the model has no chat template, or the template refuses the messages. OptionError: also a message with a part
            that is no text, such as an image. Otherwise as `generate`.

        Example: a call, forced here because the model that comes with the package knows no tools.
            >>> import exl2nb as ex
            >>> add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
            >>> with ex.demo(progress=None) as llm:
            ...     answer = llm.chat("1 and 2?", template="chatml", tools=[add], tool_choice="add", parallel_tool_calls=False)
            >>> [(call.name, call.parsed["a"] in (1, 2)) for call in answer.reply.tool_calls]
            [('add', True)]
        """
        prompt, asked = self.chat_request(messages, options, where="chat")
        handle = self._submit(prompt, "chat", asked, stream=stream)
        return handle if stream else handle.result()

    @spelled_out(ChatOptions, CHAT_DEFAULT_OPTIONS)
    async def achat(self, messages: Messages | str, **options: Unpack[ChatOptions]) -> Completion:
        """`chat` for event loops."""
        prompt, asked = self.chat_request(messages, options, where="achat")
        return await self._submit(prompt, "achat", asked, stream=False).aresult()

    # ---- many requests

    def job(self) -> Job:
        """An empty job: add requests with `job.add(prompt, id=..., ...)`, iterate it for their events."""
        return Job(self)

    @spelled_out(RequestOptions, OPTION_DEFAULTS)
    def batch(self, prompts: Sequence[Any] | Mapping[Hashable, Any], **options: Unpack[RequestOptions]) -> Job:
        """Queue many requests and return at once; iterate the result for `Event`s of all of them as they come, tagged by id.

        Args:
            prompts: texts, lists of token ids, or dicts with "prompt", options of their own and perhaps "id". Their ids are 0, 1, ..., or
                the keys of a mapping.
            options: for all of them, as for `generate`.

        Raises:
            OptionError, ContextOverflow: a request cannot run; none of them does.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     job = llm.batch({"a": "It was", "b": {"prompt": "She", "max_tokens": 2}}, max_tokens=4, temperature=0)
            ...     lengths = {event.id: len(event.completion.tokens) for event in job if event.over}
            >>> sorted(lengths.items())
            [('a', 4), ('b', 2)]
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise OptionError(
                f"batch: prompts is {str(prompts)[:40]!r}; expected several: [text, text], or a mapping of them; for one: generate"
            )
        shared: dict[str, Any] = {**options}
        compile_structure(shared, self.tokenizer, self.model.config.vocab_size, where="batch")
        job, ids, texts, options_of, streams = self.job(), list[Hashable](), list[Any](), list[dict[str, Any]](), list[bool]()
        for id, prompt in prompts.items() if isinstance(prompts, Mapping) else enumerate(prompts):
            own = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
            if "prompt" not in own:
                raise OptionError(f"batch: request {id!r} is {str(own)[:80]}; expected a text, ids, or a dict with 'prompt'")
            text, own = own.pop("prompt"), {"id": id, **shared, **own}
            if wrong := [name for name in own if not isinstance(name, str) or name == "prompt"]:
                raise OptionError(f"batch: unknown keyword {shown(wrong[0])}; prompts are the first argument")
            ids.append(job.reserve(own.pop("id")))
            streams.append(own.pop("stream", True))
            texts.append(text)
            options_of.append(own)
        handles = self._submit_all(
            texts, "batch", options_of, stream=streams, group=job.group
        )  # together: prompts that fit one step run in the same steps every time
        for id, handle in zip(ids, handles):
            job.take(id, handle)
        return job

    def submit_for_job(self, prompt: Any, options: dict[str, Any], *, stream: bool, group: object = None, where: str = "job.add") -> Handle:
        """Queue one request of a job or of a client; errors as in `stream`.

        Args:
            group: requests of one group share a turn. where: the caller, for messages.
        """
        vocab, context = self.config.vocab_size, self.engine.context
        request = request_of(prompt, self._with_loras(options, where), self.tokenizer, vocab, context=context, where=where, stream=stream)
        handle = self.engine.submit(request, group=group)
        handle.owner = self
        return handle

    def serve(self, *, port: int = 0, **options: Any) -> Server:
        """Serve this model over HTTP, beside everything else that uses it: OpenAI's, Anthropic's and TabbyAPI's routes.

        Needs `pip install 'exl2nb[server]'`. Returns when the server answers; `stop()`, or the end of a `with` block, ends it.

        Args:
            port: 0 = a free one.
            options: fields of `server.server_options.ServerOptions`: host, api_keys, max_queue, request_timeout_s, cors_origins ...

        Raises:
            OptionError: an option unknown or out of range; a host beyond this machine without a key. MissingDependency: no such extra.

        Example:
            >>> import json, urllib.request
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm, llm.serve() as server:
            ...     json.load(urllib.request.urlopen(f"{server.url}/v1/models"))["data"][0]["id"]
            'demo_model'
        """
        from exl2nb.server.http_server import serve

        return serve(self, port=port, **options)

    # ---- end

    def close(self) -> None:
        """End what runs, join the engine's thread and give the memory back. A second call does nothing."""
        self.engine.close()
        if self.vision is not None:
            self.vision.close()
        self._finalizer.detach()

    def __reduce__(self) -> Any:
        raise OptionError("a loaded model can neither be copied nor sent to another process; share it between threads, or load it there")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self.config
        state = ", closed" if self.engine.closed else ""
        return (
            f"LLM({self.name}: {config.architecture}, {config.num_layers} layers, {self.weight_bytes / 2**20:.1f} MiB of weights, "
            f"context {self.context}, {self.cache_bytes / 2**20:.1f} MiB of {self.engine.spec.mode} cache, "
            f"chat with {self.sampling_defaults}{state})"
        )

    def _repr_html_(self) -> str:
        config, spec = self.config, self.engine.spec
        rows = {
            "architecture": f"{config.architecture}, {config.num_layers} layers, hidden size {config.hidden_size}",
            "weights": f"{self.weight_bytes / 2**20:.1f} MiB on {self.model.where}",
            "vocabulary": f"{config.vocab_size} tokens",
            "context": f"{self.context} tokens",
            "cache": f"{spec.num_tokens} tokens, {spec.mode}, {self.cache_bytes / 2**20:.1f} MiB",
            "pages": f"{self.engine.pages.num_free} of {spec.num_pages} free",
        }
        rows["chat sampling"] = str(self.sampling_defaults)
        rows["chat template"] = ", ".join(sorted(self.tokenizer.templates.templates)) or "none"
        if notable := unusual_features(config):
            rows["unusual"] = "; ".join(notable)
        return facts(f"{self.name}{' (closed)' if self.engine.closed else ''}", rows)

    # ---- inside

    def _submit(self, prompt: Any, where: str, options: dict[str, Any], *, stream: bool) -> Handle:
        return self._submit_all([prompt], where, [options], stream=stream)[0]

    def _submit_all(
        self, prompts: Sequence[Any], where: str, options: Sequence[dict[str, Any]], *, stream: bool | list[bool], group: object = None
    ) -> list[Handle]:
        vocab, context = self.config.vocab_size, self.engine.context
        requests = [
            request_of(prompt, self._with_loras(one, where), self.tokenizer, vocab, context=context, where=where, stream=streamed)
            for prompt, one, streamed in zip(prompts, options, [stream] * len(prompts) if isinstance(stream, bool) else stream)
        ]
        handles = self.engine.submit_many(requests, group=object() if group is None and len(requests) > 1 else group)
        for handle, request in zip(handles, requests):
            handle.owner, handle.reply_format = self, request.reply
        return handles

    def _with_loras(self, options: dict[str, Any], where: str) -> dict[str, Any]:
        return options if options.get("lora") is None else self.loras.resolved(options, where=where)

    def _compiled(self, options: dict[str, Any], where: str) -> dict[str, Any]:
        """The options with their structure compiled, once for all requests made of them."""
        options = dict(options)
        compile_structure(options, self.tokenizer, self.config.vocab_size, where=where)
        return options

    def _submit_some(self, prompt: Any, n: int | None, where: str, options: dict[str, Any]) -> tuple[list[Handle], list[Any]]:
        """The requests of one call, and the prompt of each: several prompts, `n` samples of one, or one (whose beams may be `n`)."""
        if _is_batch(prompt):
            if n is not None:
                raise OptionError(f"{where}: n is {n} and there are {len(prompt)} prompts; give one prompt, or repeat them")
            each, prompts = [self._compiled(options, where)] * len(prompt), list(prompt)
        elif n is None or options.get("beams", 1) != 1:
            each, prompts = [options if n is None else {**options, "n": n}], [prompt]
        else:
            each = sample_options(self._compiled(options, where), n, where=where)
            prompts = [prompt] * n
        return self._submit_all(prompts, where, each, stream=False), prompts


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(one, str) for one in prompt)


def _answers(completions: list[Completion], prompt: Any, n: int | None) -> Completion | list[Completion]:
    """What a call hands back of the answers of its requests."""
    if n is None and not _is_batch(prompt):
        return completions[0]
    return list(completions[0].beams) if n is not None and completions[0].beams else completions


def _request_options() -> list[str]:
    names = [f.name for cls in (Request, SamplingParams) for f in fields(cls)]
    return [name for name in names if name not in ("prompt_ids", "sampling", "stream", "max_tokens")]


def _with_prompt(completion: Completion, prompt: Any) -> Completion:
    if not isinstance(prompt, str):
        return completion
    return replace(completion, prompt=prompt, beams=tuple(replace(one, prompt=prompt) for one in completion.beams))


def _call_back(handle: Handle, on_chunk: Callable[[Chunk], object]) -> Completion:
    """Read a request to its end, calling `on_chunk` with every chunk in the caller's thread; what it raises cancels the request."""
    with handle:
        for chunk in handle:
            on_chunk(chunk)
    return handle.result()
