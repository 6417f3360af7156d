"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from exl2nb.generator.request import Completion
from exl2nb.server.error_responses import ApiError, api_error, body_of
from exl2nb.server.fields import Body, Text, allow_zero_top_p, no_effect, refuse
from exl2nb.server.openai import check_model, merged, new_id, reason, submit_chat
from exl2nb.server.picture_requests import with_pictures
from exl2nb.server.state import State, Ticket, results, run_in_thread
from exl2nb.server.stream import Events, EventStream, event
from exl2nb.tokenizer.reply import ReplyDelta

router = APIRouter()
CONTENT_PART_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    system: Text | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = Field(None, description="format: a JSON schema; effort: a variable of the chat template")
    cache_control: Any = no_effect("equal beginnings are always shared")
    speed: Any = no_effect()
    user_profile_id: Any = no_effect()
    workspace_id: Any = no_effect()


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: Annotated[list[Text], Field(max_length=256)] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    metadata: Any = no_effect()
    diagnostics: Any = no_effect()
    inference_geo: Any = no_effect()
    service_tier: Any = no_effect()
    container: Any = Field(None, description="refused")
    mcp_servers: Any = Field(None, description="refused")


@router.post("/v1/messages")
async def messages(request: Request, body: MessagesBody) -> Any:
    """Answer a conversation. A last message of the assistant is continued."""
    state: State = request.app.state.server
    for name in ("container", "mcp_servers"):
        refuse(getattr(body, name) or None, name, "is not supported by this server")
    lora = check_model(state, body.model)
    ticket = state.admit(request, "messages")
    try:
        options = _options(body)
        if lora is not None:
            options["lora"] = lora
        for name in ("max_tokens", "temperature", "top_k", "top_p"):
            if (value := getattr(body, name)) is not None:
                options[name] = value
        allow_zero_top_p(options)
        if (schema := _output_schema(body.output_config or {})) is not None:
            options["schema"] = schema
        if body.stop_sequences:
            options["stop"] = [text for text in body.stop_sequences if text]
        if state.options.request_timeout_s is not None:
            options["timeout_s"] = state.options.request_timeout_s
        budget = (body.thinking or {}).get("budget_tokens") if (body.thinking or {}).get("type") == "enabled" else None
        if budget is not None:
            options["reasoning_budget"] = budget
        await submit_chat(state, ticket, messages_of(body), options, n=1, stream=body.stream)
        head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": state.model_name}
        if body.stream:
            return EventStream(state, ticket, _events(ticket, head), _failed)
        (answer,) = await results(request, ticket)
        why, stop = stop_reason(answer)
        result = {**head, "content": blocks_of(answer), "stop_reason": why, "stop_sequence": stop, "usage": _usage(answer)}
        state.end(ticket)
        return JSONResponse(result)
    except BaseException as error:
        state.end(ticket, error)
        raise


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountBody) -> Any:
    """Tokens of the prompt that a conversation becomes."""
    state: State = request.app.state.server
    check_model(state, body.model)
    options = _options(body)
    if state.template is not None:
        options["template"] = state.template
    options.pop("tool_choice", None)
    given = {name: value for name, value in options.items() if name != "parallel_tool_calls"}

    def count() -> int:
        talk = messages_of(body)
        if state.llm.vision is not None:
            talk = with_pictures(talk, remote=state.options.remote_images)
        return len(state.llm.render(talk, **given).ids)

    return {"input_tokens": await run_in_thread(count, heavy=True)}


def messages_of(body: CountBody) -> list[dict[str, Any]]:
    """A conversation of Anthropic's blocks as messages of a chat.

    Raises:
        ApiError: 400, a block of another type.
    """
    made: list[dict[str, Any]] = []
    if body.system:
        made.append({"role": "system", "content": body.system if isinstance(body.system, str) else _text(body.system, "system")})
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ApiError(400, f"messages.{number}: role is {str(role)[:40]!r}; expected user or assistant")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
            continue
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise ApiError(400, f"messages.{number}: content is {str(content)[:40]!r}; expected a text or a list of blocks")
        texts, calls, pictures = [], [], 0
        for block in content:
            kind = block.get("type")
            if kind == "image":
                pictures += 1
                texts.append({"type": "image", "source": block.get("source")})
                continue
            if kind not in CONTENT_PART_TYPES:
                raise ApiError(400, f"messages.{number}: a block of type {str(kind)[:40]!r}; expected text, image or a tool's")
            if kind == "text":
                texts.append({"type": "text", "text": str(block.get("text", ""))})
            elif kind == "tool_use":
                names[str(block.get("id"))] = str(block.get("name"))
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result":
                result, id = block.get("content", ""), str(block.get("tool_use_id"))
                text = result if isinstance(result, str) else _text(result or [], f"messages.{number}")
                made.append({"role": "tool", "tool_call_id": id, "name": names.get(id, ""), "content": text})
        if texts or calls:
            content = texts if pictures else "\n".join([one["text"] for one in texts])
            made.append({"role": role, "content": content, **({"tool_calls": calls} if calls else {})})
    return made


def blocks_of(answer: Completion) -> list[dict[str, Any]]:
    """An answer as blocks.

    A call that was cut off has the input {}: Anthropic's shape has no room for half an object.
    """
    reply, blocks = answer.reply, []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        try:
            given = call.parsed
        except ValueError:
            given = {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def stop_reason(answer: Completion, called: bool | None = None) -> tuple[str, str | None]:
    """Why an answer ended, in Anthropic's words, and the stop text."""
    if called or (called is None and answer.reply.tool_calls):
        return ("max_tokens", None) if reason(answer) == "length" else ("tool_use", None)
    if reason(answer) == "length":
        return "max_tokens", None
    if answer.finish_reason == "stop" and isinstance(answer.stopped_by, str):
        return "stop_sequence", answer.stopped_by
    return "end_turn", None


def _options(body: CountBody) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if body.messages[-1].get("role") == "assistant":
        options["continue_final_message"] = True
    if body.tools:
        options["tools"] = [_tool(one) for one in body.tools]
        choice = body.tool_choice or {"type": "auto"}
        kinds = {"auto": "auto", "any": "required", "none": "none", "tool": choice.get("name")}
        if not isinstance(kinds.get(str(choice.get("type"))), str):
            raise ApiError(400, f"tool_choice is {str(choice)[:80]}; expected type auto, any, none, or tool with a name")
        options["tool_choice"] = kinds[choice["type"]]
        options["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    variables: dict[str, Any] = {}
    if (body.thinking or {}).get("type") == "disabled":
        variables["enable_thinking"] = False
    if (effort := (body.output_config or {}).get("effort")) is not None:
        variables["reasoning_effort"] = effort
    if variables:
        options["template_options"] = variables
    return options


def _output_schema(config: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema of the answer, or None where the answer is free.

    Raises:
        ApiError: 400, the format is not a JSON schema.
    """
    if (form := config.get("format")) is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise ApiError(400, f"output_config.format is {str(form)[:80]}; expected {{'type': 'json_schema', 'schema': {{...}}}}")
    return form["schema"]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if (tool.get("type") or "custom") != "custom":
        raise ApiError(400, f"tools: type {str(tool.get('type'))[:40]!r} is not supported; expected 'custom'")
    schema = tool.get("input_schema")
    if isinstance(schema, dict):  # Anthropic's specification lets these two be null
        schema = {key: value for key, value in schema.items() if value is not None or key not in ("properties", "required")}
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}


def _text(blocks: Sequence[Any], where: str) -> str:
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise ApiError(400, f"{where}: holds {str(block)[:40]!r}; this model reads text alone")
    return "\n".join(str(block.get("text", "")) for block in blocks)


def _usage(answer: Completion) -> dict[str, int]:
    timings = answer.timings
    return {
        "input_tokens": timings.prompt_tokens - timings.reused_tokens,
        "cache_read_input_tokens": timings.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": timings.new_tokens,
    }


def _events(ticket: Ticket, head: dict[str, Any]) -> Events:
    (handle,), at, kind, called = ticket.handles, -1, "", False
    parser = handle.reply_format.parser()

    def block(delta: ReplyDelta) -> list[str]:
        """Events of one delta."""
        nonlocal at, kind, called
        wanted, events = "arguments" if delta.kind == "call" else delta.kind, []
        if wanted != kind or delta.kind == "call":
            if at >= 0:
                events.append(event({"type": "content_block_stop", "index": at}, "content_block_stop"))
            at, kind, called = at + 1, wanted, called or delta.kind == "call"
            begun: dict[str, Any] = {"type": "tool_use", "id": delta.id, "name": delta.text, "input": {}}
            if kind != "arguments":
                begun = {"type": "text", "text": ""} if kind == "content" else {"type": "thinking", "thinking": "", "signature": ""}
            events.append(event({"type": "content_block_start", "index": at, "content_block": begun}, "content_block_start"))
        if delta.kind != "call" and delta.text:
            name, field = {
                "content": ("text_delta", "text"),
                "reasoning": ("thinking_delta", "thinking"),
                "arguments": ("input_json_delta", "partial_json"),
            }[kind]
            change = {"type": name, field: delta.text}
            events.append(event({"type": "content_block_delta", "index": at, "delta": change}, "content_block_delta"))
        return events

    def written(deltas: Iterable[ReplyDelta]) -> str:
        return "".join([one for delta in deltas for one in block(delta)])

    begun = {"input_tokens": ticket.prompt_tokens, "output_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": begun}
    text = event({"type": "message_start", "message": message}, "message_start")
    while (item := (yield text)) is not None:
        text = written(merged(parser.feed(handle.reply_format.text(item[1].tokens))))
    text = written(merged(parser.finish()))
    if at < 0:
        text += written([ReplyDelta("content", "")])
    answer = handle.result(0.0)
    why, stop = stop_reason(answer, called)
    change = {"stop_reason": why, "stop_sequence": stop}
    text += event({"type": "content_block_stop", "index": at}, "content_block_stop")
    text += event({"type": "message_delta", "delta": change, "usage": _usage(answer)}, "message_delta")
    yield text + event({"type": "message_stop"}, "message_stop")


def _failed(error: Exception) -> str:
    return event(body_of(api_error(error), "/v1/messages"), "error")
