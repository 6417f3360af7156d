"""OpenAI's routes: models, completions, chat completions, embeddings."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, field_validator

from exl2nb.generator.handle import Handle
from exl2nb.generator.request import Completion, Token
from exl2nb.llm.requests import sample_options
from exl2nb.llm.sampling_defaults import with_defaults
from exl2nb.sampling.defaults import NO_DEFAULTS
from exl2nb.server.error_responses import ApiError, api_error, body_of
from exl2nb.server.fields import Body, Inputs, Sampling, Text, named, no_effect, refuse, with_preset
from exl2nb.server.picture_requests import with_pictures
from exl2nb.server.state import INLINE_CHARACTERS, State, Ticket, results, run_in_thread
from exl2nb.server.stream import MEDIA_TYPE, TEXT_MARK, Events, EventStream, Frame, event
from exl2nb.tokenizer.reply import ReplyDelta
from exl2nb.tokenizer.template import INSTRUCT_TEMPLATES

router = APIRouter()
MAX_CHOICES = 128
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", "timeout": "length"}


class Common(Sampling):
    """Fields of both kinds of completion."""

    model: str | None = None
    lora: str | dict[str, float] | None = Field(None, description="adapters, in place of MODEL:ADAPTER")
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    response_format: dict[str, Any] | None = None
    user: Any = no_effect()
    metadata: Any = no_effect()
    safety_identifier: Any = no_effect()
    prompt_cache_key: Any = no_effect("equal beginnings are always shared")
    prompt_cache_retention: Any = no_effect("equal beginnings are always shared")
    prompt_cache_options: Any = no_effect("equal beginnings are always shared")
    service_tier: Any = no_effect()
    cache_prompt: Any = no_effect("equal beginnings are always shared")
    truncation_length: Any = no_effect("a prompt that is too long is refused")
    store: bool | None = no_effect("nothing is stored")

    def options(self, state: State) -> dict[str, Any]:
        """Generation options, the preset included.

        Raises:
            ApiError: 400, a field that means nothing here; 404, another model.
        """
        lora = check_model(state, self.model) if self.lora is None else self.lora
        if unknown := set(self.stream_options or {}) - {"include_usage", "include_obfuscation"}:
            refuse(True, f"stream_options.{sorted(unknown)[0]}", "is not known; expected include_usage")
        preset = state.preset[1]
        if self.preset is not None:
            if self.preset not in state.presets:
                raise ApiError(400, f"preset {self.preset[:80]!r} is not known; GET /v1/sampling/override/list names them", param="preset")
            preset = state.presets[self.preset]
        fields: Sampling = self
        if preset:
            given = {name: getattr(self, name) for name in Sampling.model_fields}
            fields = Sampling.model_validate(with_preset(given, preset))
        options = fields.generation_options()
        options.setdefault("max_tokens", state.llm.context)
        if lora is not None:
            options["lora"] = lora
        if state.options.request_timeout_s is not None:
            options["timeout_s"] = state.options.request_timeout_s
        if (schema := schema_of(self.response_format)) is not None:
            options["schema"] = schema
        return options

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with the figures."""
        return bool((self.stream_options or {}).get("include_usage"))


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: Inputs | None = Field(description="null: the beginning of a document")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=100)
    suffix: str | None = Field(None, description="refused: the models fill in no middle")
    best_of: int | None = Field(None, description="1 or n; more is refused")

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        """Read false as null: the field of chat completions with this name is a flag, and 0 asks for the tokens' own logprobs."""
        return None if value is False else value


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=100)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = Field(None, description="refused: give tools")
    function_call: Any = Field(None, description="refused: give tool_choice")
    modalities: list[str] | None = Field(None, description='["text"]')
    audio: Any = Field(None, description="refused")
    prediction: Any = no_effect("it could only make the answer faster")
    verbosity: str | None = no_effect("say it in the prompt")
    reasoning_effort: str | None = Field(None, description="a variable of the chat template; 'none' also switches thinking off")
    reasoning_budget: int | None = named("reasoning_budget", "thinking_budget", "thinking_budget_tokens")
    template: str | None = named("template", "prompt_template", "chat_template")
    template_options: dict[str, Any] | None = named("template_options", "template_vars", "chat_template_kwargs")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    response_prefix: Text | None = None


# ---- routes


@router.get("/v1/models")
async def models(request: Request) -> Any:
    """The loaded model, alone and with each of its adapters."""
    state: State = request.app.state.server
    names = [state.model_name, *(f"{state.model_name}:{name}" for name in state.llm.loras)] if state.model is not None else []
    return {"object": "list", "data": [model_entry(state, name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Any:
    """One model."""
    state: State = request.app.state.server
    lora = check_model(state, name)
    return model_entry(state, state.model_name + (f":{lora}" if lora else ""))


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody) -> Any:
    """Continue prompts."""
    state: State = request.app.state.server
    refuse(body.suffix or None, "suffix", "is not supported: this server fills in no middle")
    refuse(body.best_of if body.best_of not in (None, 1, body.n) else None, "best_of", "is not supported; take n and choose")
    ticket = state.admit(request, "completions")
    try:
        options = body.options(state)
        prompts = prompts_of(body.prompt)
        if options["max_tokens"] == 0:
            result = await _scored(state, ticket, body, prompts)
            return Response(event(result) + event("[DONE]"), media_type=MEDIA_TYPE) if body.stream else JSONResponse(result)
        if body.logprobs is not None:
            options["top_logprobs"] = body.logprobs
        if body.stream and body.echo:
            refuse(True, "echo", "and stream exclude each other here")
        if len(prompts) * body.n > MAX_CHOICES:
            raise ApiError(400, f"{len(prompts)} prompts and n = {body.n}; expected at most {MAX_CHOICES} answers in all", param="n")
        heavy = len(options.keys() & {"schema", "regex", "grammar"}) > 0 or sum(map(len, prompts)) > INLINE_CHARACTERS
        await run_in_thread(lambda: _submit_completions(state, ticket, body, prompts, options), heavy=heavy)
        if body.stream:
            return EventStream(state, ticket, _completion_events(state, ticket, body), _failed)
        answers = await results(request, ticket)
        extra = await _prompt_scores(state, body, prompts) if body.echo else [None] * len(prompts)
        choices = []
        for index, answer in enumerate(answers):
            prompt, scored = prompts[index // body.n], extra[index // body.n]
            choice = {"index": index, "text": answer.text, "finish_reason": reason(answer), "logprobs": None}
            if body.logprobs is not None:
                choice["logprobs"] = legacy_logprobs(answer.tokens, body.logprobs)
            if body.echo:
                choice["text"] = (prompt if isinstance(prompt, str) else state.llm.tokenizer.decode(prompt)) + answer.text
                if scored is not None and choice["logprobs"] is not None:
                    choice["logprobs"] = {
                        key: [*scored[key], *choice["logprobs"][key]] for key in ("tokens", "token_logprobs", "top_logprobs")
                    }
            choices.append(choice)
        result = {**_head("cmpl", "text_completion", state), "choices": choices, "usage": usage(answers, body.n)}
        state.end(ticket)
        return JSONResponse(result)
    except BaseException as error:
        state.end(ticket, error)
        raise


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Any:
    """Answer a conversation."""
    state: State = request.app.state.server
    for name, value in (("functions", body.functions), ("function_call", body.function_call), ("audio", body.audio)):
        refuse(value, name, "is not supported" + ("; give tools and tool_choice" if name != "audio" else ""))
    if body.modalities not in (None, ["text"]):
        refuse(body.modalities, "modalities", 'can only be ["text"]')
    ticket = state.admit(request, "chat")
    try:
        options = body.options(state)
        if body.logprobs or body.top_logprobs:
            options["top_logprobs"] = body.top_logprobs or 0
        options |= chat_options(body)
        messages = system_messages(body.messages)
        if body.response_prefix:
            messages = [*messages, {"role": "assistant", "content": body.response_prefix}]
            options["continue_final_message"] = True
        await submit_chat(state, ticket, messages, options, n=body.n, stream=body.stream)
        if body.stream:
            return EventStream(state, ticket, _chat_events(state, ticket, body), _failed)
        answers = await results(request, ticket)
        choices = [
            {
                "index": index,
                "message": {"content": None, **answer.reply.message, "refusal": None},
                "finish_reason": "tool_calls" if answer.reply.tool_calls else reason(answer),
                "logprobs": {"content": logprobs(answer.tokens), "refusal": None} if body.logprobs else None,
            }
            for index, answer in enumerate(answers)
        ]
        result = {**_head("chatcmpl", "chat.completion", state), "choices": choices, "usage": usage(answers)}
        state.end(ticket)
        return JSONResponse(result)
    except BaseException as error:
        state.end(ticket, error)
        raise


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    input: Inputs
    model: str | None = None
    encoding_format: str = Field("float", pattern="^(float|base64)$")
    dimensions: int | None = Field(None, description="refused unless it is the model's hidden size")
    user: Any = no_effect()


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingsBody) -> Any:
    """Mean of the last layer's hidden states over the tokens of a text, scaled to length 1. A language model was not trained for it."""
    state: State = request.app.state.server
    refuse(check_model(state, body.model), "model", "can only be the model alone: embeddings are made without adapters")
    llm, size = state.llm, state.llm.config.hidden_size
    refuse(body.dimensions if body.dimensions not in (None, size) else None, "dimensions", f"can only be {size}, the model's hidden size")
    ticket, point = state.admit(request, "embeddings"), f"layers.{llm.config.num_layers - 1}.output"
    try:
        data, count = [], 0
        for index, text in enumerate(prompts_of(body.input)):
            found = await to_thread.run_sync(lambda text=text: llm.hidden(text, point))
            count += len(found.ids)
            mean = found[point].mean(0).numpy()
            vector = (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype("<f4")
            value = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": value})
        result = {"object": "list", "data": data, "model": state.model_name, "usage": {"prompt_tokens": count, "total_tokens": count}}
        state.end(ticket)
        return JSONResponse(result)
    except BaseException as error:
        state.end(ticket, error)
        raise


# ---- shared with the other APIs


def check_model(state: State, name: str | None) -> str | None:
    """Refuse a model that is not the loaded one; the adapter of MODEL:ADAPTER, or None."""
    own = (None, "", "default", state.model_name, state.llm.name)
    base, colon, lora = (name or "").rpartition(":")
    if name in own or (colon and base in own and lora in state.llm.loras):
        return None if name in own else lora
    loaded = ", ".join([repr(state.model_name), *(f"'{state.model_name}:{one}'" for one in state.llm.loras)])
    raise ApiError(404, f"model {str(name)[:80]!r} is not loaded; loaded is {loaded}", param="model", code="model_not_found")


def model_entry(state: State, name: str) -> dict[str, Any]:
    """A model as OpenAI lists it."""
    entry: dict[str, Any] = {"id": name, "object": "model", "created": int(state.started), "owned_by": "exl2nb"}
    if state.model is not None and name.partition(":")[0] == state.model_name.partition(":")[0]:
        entry |= {"max_model_len": state.llm.context, "bpw": round(state.llm.bpw, 3)}
    return entry


def schema_of(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that a response_format stands for; None for plain text."""
    if response_format is None or response_format.get("type") == "text":
        return None
    kind = response_format.get("type")
    if kind == "json_object":
        given = response_format.get("schema", {"type": "object"})
    elif kind == "json_schema":
        inner = response_format.get("json_schema", response_format)
        given = inner.get("schema") if isinstance(inner, dict) else None
    else:
        raise ApiError(
            400,
            f"response_format: type {str(kind)[:40]!r} is not known; expected text, json_object or json_schema",
            param="response_format",
        )
    if not isinstance(given, dict):
        raise ApiError(400, "response_format: there is no schema; expected an object", param="response_format.json_schema.schema")
    return given


def system_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose developer is the system."""
    return [{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages]


def chat_options(body: ChatBody) -> dict[str, Any]:
    """Options of `llm.chat` beyond those of generation."""
    options: dict[str, Any] = {}
    if body.tools:
        options["tools"] = body.tools
        options["tool_choice"] = tool_choice(body.tool_choice)
        options["parallel_tool_calls"] = body.parallel_tool_calls is not False
    elif body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice is given without tools", param="tool_choice", code="invalid_value")
    variables = dict(body.template_options or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    if variables:
        options["template_options"] = variables
    if body.reasoning_budget is not None:
        options["reasoning_budget"] = body.reasoning_budget
    if body.template is not None:
        options["template"] = body.template
    if body.continue_final_message:
        options["continue_final_message"] = True
    if not body.add_generation_prompt and not body.continue_final_message:
        refuse(False, "add_generation_prompt", "can only be true, or give continue_final_message")
    return options


def tool_choice(value: Any) -> str:
    """The choice as `llm.chat` takes it: auto, none, required, or a function's name."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise ApiError(400, f"tool_choice is {value[:40]!r}; expected auto, none, required, or a function", param="tool_choice")
        return value
    inner = value.get("function", value)
    if value.get("type") != "function" or not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ApiError(
            400, "tool_choice: expected {'type': 'function', 'function': {'name': ...}}", param="tool_choice", code="invalid_value"
        )
    return inner["name"]


async def submit_chat(state: State, ticket: Ticket, messages: Sequence[Any], options: dict[str, Any], *, n: int, stream: bool) -> None:
    """Render a conversation and queue its `n` answers; options as of `llm.chat`."""
    options = {"generation_config": state.options.generation_config, **options}
    if "template" not in options and state.template is not None:
        options["template"] = state.template
    elif "template" in options and options["template"] not in INSTRUCT_TEMPLATES:
        options["template"] = named_template(state, options["template"])

    def queue() -> None:
        llm, talk = state.llm, messages
        if llm.vision is not None:
            talk = with_pictures(messages, remote=state.options.remote_images)
        for one in [options] if n == 1 else sample_options(options, n, where="chat"):
            ids, each = llm.chat_request(talk, one, where="chat")
            ticket.prompt_tokens = len(ids)
            ticket.handles.append(llm.submit_for_job(ids, each, stream=stream, where="chat"))

    await run_in_thread(queue, heavy=True)  # a template is rendered in another process, behind those of other requests


def named_template(state: State, name: str) -> str:
    """One of the model's own templates by name, or Jinja source."""
    own = state.llm.tokenizer.templates.templates
    if name in own:
        return own[name]
    if "{" not in name:
        known = ", ".join([*sorted(own), *INSTRUCT_TEMPLATES])
        raise ApiError(400, f"template {name[:80]!r} is not known; expected one of {known}, or Jinja source", param="template")
    return name


def prompts_of(value: Any) -> list[Any]:
    """Each prompt of a request: texts, or lists of ids."""
    if value is None:  # OpenAI: as from the beginning of a new document
        return [""]
    if isinstance(value, str) or (value and isinstance(value[0], int)):
        return [value]
    if not value:
        raise ApiError(400, "prompt is empty; expected a text, token ids, or several of them", param="prompt", code="invalid_value")
    return list(value)


def reason(completion: Completion) -> str:
    """Why an answer ended, in OpenAI's words.

    Raises:
        ApiError: 503, the server ended it.
    """
    if completion.finish_reason == "cancelled":
        raise ApiError(503, "the request was cancelled", code="cancelled", headers={"Retry-After": "5"})
    return FINISH_REASONS[completion.finish_reason]


def usage(answers: Sequence[Completion], n: int | None = None) -> dict[str, Any]:
    """Token counts of answers to one request: `n` to each prompt, None = all to one prompt, which counts once."""
    firsts = [one.timings for one in (answers[:1] if n is None else answers[::n])]
    prompt, new = sum(one.prompt_tokens for one in firsts), sum(one.timings.new_tokens for one in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.reused_tokens for one in firsts)},
    }


def logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Log probabilities as chat completions show them."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [{"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode())} for one in token.top],
        }
        for token in tokens
    ]


def legacy_logprobs(tokens: Sequence[Token], top: int, offset: int = 0) -> dict[str, Any]:
    """Log probabilities as completions show them."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{one.text: one.logprob for one in token.top} for token in tokens] if top else [None] * len(tokens),
        "text_offset": offsets,
    }


def merged(deltas: Sequence[ReplyDelta]) -> Iterator[ReplyDelta]:
    """Neighbours of one kind as one."""
    last: ReplyDelta | None = None
    for delta in deltas:
        if last is not None and delta.kind == last.kind != "call" and delta.call == last.call:
            last = last._replace(text=last.text + delta.text)
            continue
        if last is not None:
            yield last
        last = delta
    if last is not None:
        yield last


def new_id(prefix: str) -> str:
    """A fresh id of an answer."""
    return f"{prefix}-{secrets.token_hex(16)}"


# ---- inside


def _head(prefix: str, kind: str, state: State) -> dict[str, Any]:
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": state.model_name}


def _submit_completions(state: State, ticket: Ticket, body: CompletionBody, prompts: Sequence[Any], options: dict[str, Any]) -> None:
    llm, given = state.llm, {"generation_config": state.options.generation_config, **options}
    own = with_defaults(given, llm.sampling_defaults, where="completions", fallback=NO_DEFAULTS)  # as vLLM; never the library's own values
    for prompt in prompts:
        if body.add_bos_token is False and isinstance(prompt, str):
            prompt = llm.tokenizer.encode(prompt, add_special=False)
        for one in [own] if body.n == 1 else sample_options(own, body.n, where="completions"):
            ticket.handles.append(llm.submit_for_job(prompt, one, stream=body.stream, where="completions"))


def _completion_events(state: State, ticket: Ticket, body: CompletionBody) -> Events:
    head, handles = _head("cmpl", "text_completion", state), list(ticket.handles)
    offsets = [0] * len(handles)

    def data(index: int, text: str, found: Any = None, ended: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": index, "text": text, "logprobs": found, "finish_reason": ended}]}

    frames = [Frame(data(index, TEXT_MARK)) for index in range(len(handles))]
    text = ""
    while (item := (yield text)) is not None:
        index, chunk = item
        if body.logprobs is None:
            text = frames[index](chunk.text)
        else:
            text = event(data(index, chunk.text, legacy_logprobs(chunk.tokens, body.logprobs, offsets[index])))
            offsets[index] += len(chunk.text)
    answers = _answers(handles)
    made = [event(data(index, "", None, reason(answer))) for index, answer in enumerate(answers)]
    if body.usage_at_end:
        made.append(event({**head, "choices": [], "usage": usage(answers, body.n)}))
    yield "".join([*made, event("[DONE]")])


def _chat_events(state: State, ticket: Ticket, body: ChatBody) -> Events:
    head, handles = _head("chatcmpl", "chat.completion.chunk", state), list(ticket.handles)
    parsers = [handle.reply_format.parser() for handle in handles]
    called = [False] * len(parsers)

    def data(index: int, delta: dict[str, Any], found: Any = None, ended: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": index, "delta": delta, "logprobs": found, "finish_reason": ended}]}

    def written(index: int, deltas: Sequence[ReplyDelta], found: Any = None) -> str:
        made = []
        for delta in merged(deltas):
            called[index] = called[index] or delta.kind == "call"
            plain = found is None and delta.kind == "content"
            made.append(frames[index](delta.text) if plain else event(data(index, chat_delta(delta), found)))
            found = None
        return "".join(made)

    frames = [Frame(data(index, {"content": TEXT_MARK})) for index in range(len(handles))]
    text = "".join([event(data(index, {"role": "assistant", "content": ""})) for index in range(len(handles))])
    while (item := (yield text)) is not None:
        index, chunk = item
        deltas = parsers[index].feed(handles[index].reply_format.text(chunk.tokens))
        if body.logprobs:
            text = written(index, deltas or [ReplyDelta("content", "")], {"content": logprobs(chunk.tokens), "refusal": None})
        else:
            text = written(index, deltas)
    answers, made = _answers(handles), []
    for index, answer in enumerate(answers):
        made.append(written(index, parsers[index].finish()))
        made.append(event(data(index, {}, None, "tool_calls" if called[index] else reason(answer))))
    if body.usage_at_end:
        made.append(event({**head, "choices": [], "usage": usage(answers)}))
    yield "".join([*made, event("[DONE]")])


def _failed(error: Exception) -> str:
    return event(body_of(api_error(error), "/v1/chat/completions"))


def chat_delta(delta: ReplyDelta) -> dict[str, Any]:
    """A delta as chat completions stream it."""
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "call":
        return {
            "tool_calls": [{"index": delta.call, "id": delta.id, "type": "function", "function": {"name": delta.text, "arguments": ""}}]
        }
    return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}


def _answers(handles: Sequence[Handle]) -> list[Completion]:
    return [handle.result(0.0) for handle in handles]


async def _prompt_scores(state: State, body: CompletionBody, prompts: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Log probabilities of the prompts' own tokens, where they are asked for."""
    if body.logprobs is None:
        return [None] * len(prompts)
    found = []
    for prompt in prompts:
        score = await to_thread.run_sync(lambda prompt=prompt: state.llm.score(prompt))
        texts, values = zip(*((token.text, token.logprob) for token in score.tokens if token.text or token.logprob is not None))
        found.append({"tokens": list(texts), "token_logprobs": list(values), "top_logprobs": [None] * len(texts)})
    return found


async def _scored(state: State, ticket: Ticket, body: CompletionBody, prompts: Sequence[Any]) -> dict[str, Any]:
    """Answer a request with max_tokens 0: empty texts, or with echo the prompts and their log probabilities."""
    scores = await _prompt_scores(state, body, prompts) if body.echo else [None] * len(prompts)
    choices, count = [], 0
    for index, (prompt, scored) in enumerate(zip(prompts, scores)):
        text = prompt if isinstance(prompt, str) else state.llm.tokenizer.decode(prompt)
        count += len(await to_thread.run_sync(state.llm.tokenizer.encode, prompt)) if isinstance(prompt, str) else len(prompt)
        for number in range(index * body.n, (index + 1) * body.n):
            choices.append({"index": number, "text": text if body.echo else "", "finish_reason": "length", "logprobs": scored})
    state.end(ticket)
    total = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
    return {**_head("cmpl", "text_completion", state), "choices": choices, "usage": total}
