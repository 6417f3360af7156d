"""OpenAI's /v1/responses: items in, items out, and the events of a stream. Nothing is stored between requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, field_validator

from exl2nb.generator.request import Completion
from exl2nb.llm.sampling_defaults import with_defaults
from exl2nb.sampling.defaults import NEUTRAL_VALUES
from exl2nb.server.error_responses import ApiError, api_error, body_of
from exl2nb.server.fields import Text, refuse
from exl2nb.server.openai import ChatBody, chat_options, merged, new_id, reason, submit_chat, system_messages, usage
from exl2nb.server.state import State, Ticket, results
from exl2nb.server.stream import Events, EventStream, event
from exl2nb.tokenizer.reply import ReplyDelta

router = APIRouter()


class ResponsesBody(ChatBody):
    """POST /v1/responses; samplers as everywhere."""

    messages: list[dict[str, Any]] = Field(default_factory=list, max_length=0, description="give input")
    input: Text | list[dict[str, Any]]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: Any = Field(None, description="refused: nothing is stored, send the items again")
    conversation: Any = Field(None, description="refused: nothing is stored")
    background: bool | None = Field(None, description="false; true is refused")
    include: list[str] | None = Field(None, description="no effect, but for what is not known here")
    truncation: str | None = Field(
        None, pattern="^(auto|disabled)$", description="no effect: a conversation that is too long is refused, never shortened"
    )
    max_tool_calls: Any = Field(None, description="refused")

    @field_validator("metadata", "tools", "tool_choice")
    @classmethod
    def _echoed(cls, value: Any) -> Any:
        json.dumps(value, allow_nan=False)  # ValueError: a number that an answer cannot repeat
        return value


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody) -> Any:
    """Answer a conversation of items."""
    state: State = request.app.state.server
    for name in ("previous_response_id", "conversation", "max_tool_calls"):
        refuse(getattr(body, name), name, "is not supported: this server stores nothing; send the whole conversation as input")
    refuse(body.background or None, "background", "can only be false")
    refuse(body.n if body.n != 1 else None, "n", "can only be 1 here")
    ticket = state.admit(request, "responses")
    try:
        format_ = (body.text or {}).get("format")
        given = body.model_copy(
            update={
                "max_tokens": body.max_output_tokens or body.max_tokens,
                "response_format": format_ if format_ is not None else body.response_format,
                "reasoning_effort": (body.reasoning or {}).get("effort") or body.reasoning_effort,
                "tools": [_tool(one) for one in body.tools] if body.tools else None,
            }
        )
        options = given.options(state) | chat_options(given)
        messages = messages_of(body)
        await submit_chat(state, ticket, messages, options, n=1, stream=body.stream)
        head = _head(state, body) | sampling_of(state, options)
        if body.stream:
            numbered = _Numbered()
            return EventStream(state, ticket, _events(ticket, head, numbered), numbered.failed)
        (answer,) = await results(request, ticket)
        result = _finished(head, answer, items_of(answer))
        state.end(ticket)
        return JSONResponse(result)
    except BaseException as error:
        state.end(ticket, error)
        raise


def messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """The items of a request as messages of a chat.

    Raises:
        ApiError: 400, an item of another type.
    """
    made: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for number, item in enumerate([{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input):
        kind = item.get("type") or "message"
        if kind == "message" and isinstance(item.get("role"), str):
            made.append({"role": item["role"], "content": item.get("content")})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id", ""),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
            }
            if made and made[-1]["role"] == "assistant" and "tool_calls" in made[-1]:
                made[-1]["tool_calls"].append(call)
            elif made and made[-1]["role"] == "assistant":
                made[-1]["tool_calls"] = [call]
            else:
                made.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            made.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": item.get("output", "")})
        elif kind != "reasoning":  # what a model thought earlier is not shown to it again
            raise ApiError(
                400,
                f"input[{number}] has the type {str(kind)[:40]!r}; expected message, function_call, function_call_output",
                param="input",
            )
    return system_messages(made)


def items_of(answer: Completion) -> list[dict[str, Any]]:
    """An answer as items."""
    reply, items = answer.reply, []
    if reply.reasoning:
        items.append(_reasoning(new_id("rs"), reply.reasoning))
    if reply.content or not reply.tool_calls:
        items.append(_message(new_id("msg"), reply.content))
    items += [_call(new_id("fc"), call.id, call.name, call.arguments) for call in reply.tool_calls]
    return items


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as chat completions take it; here its fields stand beside the type."""
    if tool.get("type") != "function":
        raise ApiError(400, f"tools: type {str(tool.get('type'))[:40]!r} is not supported; expected 'function'", param="tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key in ("name", "description", "parameters")}}


def sampling_of(state: State, options: Mapping[str, Any]) -> dict[str, Any]:
    """The temperature and top_p that an answer is sampled with; OpenAI repeats them also where the request gives none."""
    given = {"generation_config": state.options.generation_config, **options}
    used = with_defaults(given, state.llm.sampling_defaults, where="responses")
    return {name: used.get(name, NEUTRAL_VALUES[name]) for name in ("temperature", "top_p")}


def _head(state: State, body: ResponsesBody) -> dict[str, Any]:
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": state.model_name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "store": False,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "usage": None,
    }


def _finished(head: dict[str, Any], answer: Completion, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut, counts = reason(answer) == "length", usage([answer])
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0 if not answer.reply.reasoning else _share(answer)},
            "total_tokens": counts["total_tokens"],
        },
    }


def _share(answer: Completion) -> int:
    """Tokens of the reasoning, by its share of the text."""
    reply = answer.reply
    return round(len(answer.tokens) * len(reply.reasoning) / max(1, len(answer.text)))


def _message(id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}] if status == "completed" else []
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": content}


def _reasoning(id: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": id, "summary": [], "content": [{"type": "reasoning_text", "text": text}] if text else []}


def _call(id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": arguments, "status": status}


class _Items:
    """Turns deltas into the events of items; `done` are those that are complete."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._kind, self._text = "", ""

    def feed(self, delta: ReplyDelta) -> list[dict[str, Any]]:
        """Events of one delta."""
        events: list[dict[str, Any]] = []
        kind = "arguments" if delta.kind == "call" else delta.kind
        if self._open is None or kind != self._kind or delta.kind == "call":
            events += self.close() + self._begin(kind, delta)
        if delta.kind == "call" or self._open is None:
            return events
        self._text += delta.text
        place = {"item_id": self._open["id"], "output_index": len(self.done)}
        if kind == "content":
            events.append({"type": "response.output_text.delta", **place, "content_index": 0, "delta": delta.text, "logprobs": []})
        elif kind == "reasoning":
            events.append({"type": "response.reasoning_text.delta", **place, "content_index": 0, "delta": delta.text})
        else:
            events.append({"type": "response.function_call_arguments.delta", **place, "delta": delta.text})
        return events

    @property
    def empty(self) -> bool:
        """True while there is no item."""
        return not self.done and self._open is None

    def _begin(self, kind: str, delta: ReplyDelta) -> list[dict[str, Any]]:
        self._kind, self._text = kind, ""
        if kind == "content":
            self._open = _message(new_id("msg"), "", "in_progress")
        elif kind == "reasoning":
            self._open = _reasoning(new_id("rs"), "")
        else:
            self._open = _call(new_id("fc"), delta.id, delta.text, "", "in_progress")
        events = [{"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self._open)}]
        if kind == "content":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            place = {"item_id": self._open["id"], "output_index": len(self.done), "content_index": 0}
            events.append({"type": "response.content_part.added", **place, "part": part})
        return events

    def close(self) -> list[dict[str, Any]]:
        """Events that complete the item that is open."""
        if self._open is None:
            return []
        item, text, at = self._open, self._text, len(self.done)
        place = {"item_id": item["id"], "output_index": at}
        if self._kind == "content":
            item = _message(item["id"], text)
            events: list[dict[str, Any]] = [
                {"type": "response.output_text.done", **place, "content_index": 0, "text": text, "logprobs": []},
                {"type": "response.content_part.done", **place, "content_index": 0, "part": item["content"][0]},
            ]
        elif self._kind == "reasoning":
            item = _reasoning(item["id"], text)
            events = [{"type": "response.reasoning_text.done", **place, "content_index": 0, "text": text}]
        else:
            item = _call(item["id"], item["call_id"], item["name"], text)
            events = [{"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": text}]
        events.append({"type": "response.output_item.done", "output_index": at, "item": item})
        self.done.append(item)
        self._open = None
        return events


def _events(ticket: Ticket, head: dict[str, Any], numbered: Callable[[dict[str, Any]], str]) -> Events:
    (handle,), items = ticket.handles, _Items()
    parser = handle.reply_format.parser()

    def written(deltas: Sequence[ReplyDelta]) -> str:
        return "".join([numbered(one) for delta in merged(deltas) for one in items.feed(delta)])

    text = numbered({"type": "response.created", "response": head}) + numbered({"type": "response.in_progress", "response": head})
    while (item := (yield text)) is not None:
        text = written(parser.feed(handle.reply_format.text(item[1].tokens)))
    answer, made = handle.result(0.0), [written(parser.finish())]
    if items.empty:
        made.append(written([ReplyDelta("content", "")]))
    made += [numbered(one) for one in items.close()]
    whole = _finished(head, answer, items.done)
    yield "".join([*made, numbered({"type": f"response.{whole['status']}", "response": whole})])


class _Numbered:
    """Events with the numbers that this API gives them."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, one: dict[str, Any]) -> str:
        self._next += 1
        return event({**one, "sequence_number": self._next - 1}, one["type"])

    def failed(self, error: Exception) -> str:
        """The event of an error."""
        told = body_of(api_error(error), "/v1/responses")["error"]
        return self({"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]})
