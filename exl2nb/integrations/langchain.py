"""LangChain: a chat model and a completion model over a loaded model. Tools, structured output, streams and their async twins."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from exl2nb.core.errors import MissingDependency, OptionError

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models import BaseChatModel, BaseLLM
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
    from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, GenerationChunk, LLMResult
    from langchain_core.runnables import Runnable, RunnablePassthrough
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
except ImportError as error:
    raise MissingDependency("exl2nb.integrations.langchain needs langchain-core; pip install langchain-core") from error

from exl2nb.generator.handle import Handle
from exl2nb.generator.request import Completion
from exl2nb.tokenizer.reply import ReplyDelta, ToolCall

_ROLE_NAMES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
_FINISH_REASONS = {"length": "length", "context": "length"}
STRUCTURED_OUTPUT_METHODS = ("json_schema", "function_calling", "json_mode")


_MODEL_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, protected_namespaces=())


class _Loaded(BaseModel):
    """What both classes have: where the model comes from, and the options of every answer.

    model: directory, hub id, or "demo"; loaded at the first use. llm: a loaded model instead, which stays its owner's. load_options: for
    `exl2nb.load`. temperature, max_tokens, top_p, top_k, min_p, repetition_penalty, seed, stop, timeout (seconds): None = the model's
    defaults. options: any other options of `llm.generate` or `llm.chat`. max_retries, api_key: accepted for LangChain's sake, without a
    meaning here.
    """

    model: str = "demo"
    llm: Any = Field(default=None, exclude=True, repr=False)
    load_options: dict[str, Any] = Field(default_factory=dict)
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = None
    max_retries: int | None = None
    api_key: Any = Field(default=None, exclude=True, repr=False)
    streaming: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    _lock: Any = PrivateAttr(default_factory=threading.Lock)
    _own: Any = PrivateAttr(default=None)

    def close(self) -> None:
        """Give the memory of a model back that was loaded here; it is loaded again when it is needed."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.close()

    def loaded(self) -> Any:
        """The `LLM` that answers."""
        if self.llm is not None:
            return self.llm
        with self._lock:
            if self._own is None:
                import exl2nb

                load: Callable[..., Any] = exl2nb.demo if self.model == "demo" else lambda **options: exl2nb.load(self.model, **options)
                self._own = load(**{"progress": None, **self.load_options})
            return self._own

    def request_options(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Options of one answer: those of this object, under those of the call."""
        names = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.timeout is not None:
            own["timeout_s"] = self.timeout
        given = {name: value for name, value in kwargs.items() if name not in ("ls_structured_output_format", "stream")}
        ends = stop if stop is not None else self.stop
        return {**own, **self.options, **({"stop": ends} if ends else {}), **given}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model if self.llm is None else self.llm.name, **self.request_options(None, {})}


class ChatExl2(_Loaded, BaseChatModel):
    """A chat model.

    template: Jinja source, or the name of an instruct format such as "chatml", for a model without a chat template. Otherwise see
    `_Loaded`: model, llm, load_options, temperature, max_tokens, ..., options.

    Options of one call are keywords of `invoke`, `stream` and so on: those of `exl2nb`'s `llm.chat`. An unknown one is an OptionError.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     chat = ChatExl2(llm=llm, template="chatml", max_tokens=4, temperature=0)
        ...     answer = chat.invoke("Hello")
        ...     answer.usage_metadata["output_tokens"], answer.response_metadata["finish_reason"]
        (4, 'length')
    """

    model_config = _MODEL_CONFIG  # in each class: LangChain's base would take unknown arguments

    template: str | None = None

    @property
    def _llm_type(self) -> str:
        return "exl2nb"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        with self._start(messages, stop, kwargs) as handle:
            return ChatResult(generations=[self._answer(handle.result())])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._start(messages, stop, kwargs) as handle:
            return ChatResult(generations=[self._answer(await handle.aresult())])

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        with self._start(messages, stop, kwargs) as handle:
            for delta in handle.deltas():
                chunk = _chunk_of(delta)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            yield self._last(handle.result())

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with self._start(messages, stop, kwargs) as handle:
            async for delta in handle.adeltas():
                chunk = _chunk_of(delta)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            yield self._last(await handle.aresult())

    def get_num_tokens(self, text: str) -> int:
        """Tokens of a text, as this model reads it."""
        return len(self.loaded().tokenizer.encode(text))

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """This model with functions it may call; the arguments of every call fit their schema.

        Args:
            tools: functions, pydantic models, LangChain tools, or OpenAI's dicts.
            tool_choice: "auto" (default), "any", "required" or True (at least one call), "none" or False, the name of one function, or
                OpenAI's dict with it.
            parallel_tool_calls: False = one call an answer.
            kwargs: more options of `llm.chat`.
        """
        options: dict[str, Any] = {"tools": [convert_to_openai_tool(tool) for tool in tools]}
        if tool_choice is not None:
            options["tool_choice"] = _choice(tool_choice)
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        return super().bind(**options, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """This model with answers that fit a schema, token by token.

        Args:
            schema: a pydantic model (answers are its objects), a TypedDict or a JSON schema (answers are dicts).
            method: "json_schema", "function_calling" or "json_mode": all three are kept to the schema here.
            include_raw: answers are dicts of "raw" (the message), "parsed" and "parsing_error" (None).
            strict: accepted for LangChain's sake; answers always fit.

        Raises:
            OptionError: another method, or an unknown keyword.
        """
        if method not in STRUCTURED_OUTPUT_METHODS or kwargs:
            what = (
                f"method is {method!r}; expected one of {', '.join(STRUCTURED_OUTPUT_METHODS)}"
                if method not in STRUCTURED_OUTPUT_METHODS
                else f"unknown keyword {next(iter(kwargs))!r}"
            )
            raise OptionError(f"with_structured_output: {what}")
        wanted = convert_to_json_schema(schema)
        told = {"kwargs": {"method": method}, "schema": wanted}
        bound = self.bind(schema=wanted, ls_structured_output_format=told)
        parser: Any = PydanticOutputParser(pydantic_object=schema) if is_basemodel_subclass(schema) else JsonOutputParser()  # type: ignore[arg-type]
        if not include_raw:
            return bound | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return {"raw": bound} | parsed.with_fallbacks([failed], exception_key="parsing_error")

    # ---- inside

    def _start(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Handle:
        options = self.request_options(stop, kwargs)
        if not options.get("tools"):
            for name in ("tool_choice", "parallel_tool_calls"):
                options.pop(name, None)
        if self.template is not None:
            options.setdefault("template", self.template)
        return self.loaded().chat([message_dict(message) for message in messages], stream=True, **options)

    def _answer(self, completion: Completion) -> ChatGeneration:
        reply = completion.reply
        calls, broken = _read_calls(reply.tool_calls)
        message = AIMessage(
            content=reply.content,
            additional_kwargs={"reasoning_content": reply.reasoning} if reply.reasoning else {},
            tool_calls=calls,
            invalid_tool_calls=broken,
            usage_metadata=_usage(completion),
            response_metadata=self._metadata(completion),
        )
        return ChatGeneration(message=message, generation_info={"finish_reason": self._metadata(completion)["finish_reason"]})

    def _last(self, completion: Completion) -> ChatGenerationChunk:
        message = AIMessageChunk(
            content="", usage_metadata=_usage(completion), response_metadata=self._metadata(completion), chunk_position="last"
        )
        return ChatGenerationChunk(message=message)

    def _metadata(self, completion: Completion) -> dict[str, Any]:
        reason = "tool_calls" if completion.reply.tool_calls else _FINISH_REASONS.get(completion.finish_reason, "stop")
        return {"model_name": self.loaded().name, "model_provider": "exl2nb", "finish_reason": reason, "seed": completion.seed}


class Exl2LLM(_Loaded, BaseLLM):
    """A completion model: it continues a text. See `_Loaded` for its fields.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     Exl2LLM(llm=llm, max_tokens=4, temperature=0).invoke("It was") == llm.generate("It was", max_tokens=4, temperature=0).text
        True
    """

    model_config = _MODEL_CONFIG

    @property
    def _llm_type(self) -> str:
        return "exl2nb"

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> LLMResult:
        return self._result(self.loaded().generate(list(prompts), **self.request_options(stop, kwargs)))

    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> LLMResult:
        return self._result(await self.loaded().agenerate(list(prompts), **self.request_options(stop, kwargs)))

    def _stream(
        self, prompt: str, stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        with self.loaded().stream(prompt, **self.request_options(stop, kwargs)) as handle:
            for part in handle:
                chunk = GenerationChunk(text=part.text)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            yield GenerationChunk(text="", generation_info=_info(handle.result()))

    async def _astream(
        self, prompt: str, stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> AsyncIterator[GenerationChunk]:
        with self.loaded().astream(prompt, **self.request_options(stop, kwargs)) as handle:
            async for part in handle:
                chunk = GenerationChunk(text=part.text)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            yield GenerationChunk(text="", generation_info=_info(await handle.aresult()))

    def get_num_tokens(self, text: str) -> int:
        """Tokens of a text, as this model reads it."""
        return len(self.loaded().tokenizer.encode(text))

    def _result(self, completions: list[Completion]) -> LLMResult:
        used = [_usage(one) for one in completions]
        totals = {name: sum(one[name] for one in used) for name in ("input_tokens", "output_tokens", "total_tokens")}
        generations: Any = [[Generation(text=one.text, generation_info=_info(one))] for one in completions]
        return LLMResult(generations=generations, llm_output={"model_name": self.loaded().name, "token_usage": totals})


# ---- messages


def message_dict(message: BaseMessage) -> dict[str, Any]:
    """A LangChain message as chat templates read it; parts that are no text are refused by `llm.chat`.

    Raises:
        OptionError: a role that chat templates do not have.
    """
    role = getattr(message, "role", None) if message.type == "chat" else _ROLE_NAMES.get(message.type)
    if not isinstance(role, str):
        raise OptionError(f"a message of type {message.type!r} has no role in chat templates; expected {', '.join(_ROLE_NAMES)}")
    content = message.content
    parts = [part for part in content if not _is_call(part)] if isinstance(content, list) else content
    made: dict[str, Any] = {"role": role, "content": parts}
    if message.name:
        made["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        made["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    return made


def _is_call(part: Any) -> bool:
    """Whether a part of a content repeats a tool call, or is reasoning: both are elsewhere in the message."""
    return isinstance(part, dict) and part.get("type") in ("tool_use", "tool_call", "tool_call_chunk", "reasoning", "function_call")


def _choice(choice: Any) -> str:
    if isinstance(choice, Mapping):
        inner = choice.get("function", choice)
        choice = inner.get("name") if isinstance(inner, Mapping) else None
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if not isinstance(choice, str):
        raise OptionError(f"bind_tools: tool_choice is {str(choice)[:60]!r}; expected auto, any, none, or the name of a function")
    return "required" if choice == "any" else choice


def _read_calls(calls: Sequence[ToolCall]) -> tuple[list[Any], list[Any]]:
    """Calls with their arguments read, and those whose arguments are cut off."""
    good, broken = [], []
    for call in calls:
        try:
            arguments = call.parsed
        except ValueError as error:
            broken.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=str(error)))
            continue
        good.append(tool_call(name=call.name, args=arguments, id=call.id))
    return good, broken


def _chunk_of(delta: ReplyDelta) -> ChatGenerationChunk:
    if delta.kind == "content":
        return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
    if delta.kind == "reasoning":
        return ChatGenerationChunk(message=AIMessageChunk(content="", additional_kwargs={"reasoning_content": delta.text}))
    begins = delta.kind == "call"
    part = tool_call_chunk(
        name=delta.text if begins else None, args="" if begins else delta.text, id=delta.id if begins else None, index=delta.call
    )
    return ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[part]))


def _usage(completion: Completion) -> Any:
    timings = completion.timings
    return {
        "input_tokens": timings.prompt_tokens,
        "output_tokens": timings.new_tokens,
        "total_tokens": timings.prompt_tokens + timings.new_tokens,
        "input_token_details": {"cache_read": timings.reused_tokens},
    }


def _info(completion: Completion) -> dict[str, Any]:
    return {
        "finish_reason": _FINISH_REASONS.get(completion.finish_reason, "stop"),
        "seed": completion.seed,
        **json.loads(json.dumps(_usage(completion))),
    }
