"""TabbyAPI's own routes: loading and downloading models, templates, sampler presets, tokens, health; and /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field

from exl2nb.core.progress import Progress, Sink
from exl2nb.io import hub
from exl2nb.llm.load_keywords import LOAD_OPTIONS_BY_NAME
from exl2nb.server.error_responses import ApiError, api_error, body_of
from exl2nb.server.fields import Body, Ids, Text, check_preset
from exl2nb.server.openai import model_entry, named_template
from exl2nb.server.picture_requests import with_pictures
from exl2nb.server.state import INLINE_CHARACTERS, State, admin, permission, run_in_thread, user
from exl2nb.server.stream import MEDIA_TYPE, STREAM_HEADERS, event
from exl2nb.tokenizer.template import INSTRUCT_TEMPLATES

open_routes = APIRouter()
router = APIRouter(dependencies=[Depends(user)])
admin_routes = APIRouter(dependencies=[Depends(admin)])
MAX_LISTED = 10_000


def _state(request: Request) -> State:
    return request.app.state.server


# ---- what it is


@open_routes.get("/health")
async def health(request: Request) -> Any:
    """Whether it can answer: 200, or 503 without a model and while it shuts down."""
    state = _state(request)
    healthy = state.model is not None and not state.draining
    return JSONResponse({"status": "healthy" if healthy else "unhealthy", "issues": []}, 200 if healthy else 503)


@open_routes.get("/.well-known/serviceinfo")
async def service_info() -> Any:
    """The APIs it speaks."""
    return {
        "version": 0.1,
        "software": {"name": "exl2nb"},
        "api": {
            "openai": {"name": "OpenAI API", "relative_url": "/v1", "documentation": "/docs", "version": 1},
            "anthropic": {"name": "Anthropic API", "relative_url": "/v1", "documentation": "/docs", "version": 1},
        },
    }


@router.get("/v1/auth/permission")
async def auth_permission(request: Request) -> Any:
    """What the key allows: "admin" or "api"."""
    return {"permission": permission(request, _state(request).options)}


@router.get("/metrics")
async def metrics(request: Request) -> Any:
    """Counters and histograms for Prometheus."""
    state = _state(request)
    return Response(state.metrics.text(state.model, len(state.active)), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/props")
async def props(request: Request) -> Any:
    """What llama.cpp's clients ask for."""
    llm = _state(request).llm
    return {
        "total_slots": llm.engine.loop.scheduler.max_sequences,
        "chat_template": llm.tokenizer.templates.templates.get("default", ""),
        "default_generation_settings": {"n_ctx": llm.context},
    }


@router.get("/v1/model")
async def current_model(request: Request) -> Any:
    """The loaded model and how it was loaded."""
    state = _state(request)
    llm = state.llm
    parameters = {
        "max_seq_len": llm.context,
        "cache_size": llm.engine.spec.num_tokens,
        "cache_mode": llm.engine.spec.mode,
        "max_batch_size": llm.engine.loop.scheduler.max_sequences,
        "chunk_size": llm.engine.loop.scheduler.chunks.max_tokens,
        "prompt_template": state.template
        if state.template in INSTRUCT_TEMPLATES
        else "default"
        if llm.tokenizer.templates.templates
        else None,
        "use_vision": llm.vision is not None,
        "draft": llm.engine.drafter is not None,
    }
    return {**model_entry(state, state.model_name), "parameters": parameters}


@router.get("/v1/model/list")
@router.get("/v1/model/draft/list", name="draft models")
async def model_list(request: Request) -> Any:
    """Models in the model folder; any of them may be a draft model."""
    state = _state(request)
    folder = state.options.model_dir

    def names() -> list[str]:
        found = sorted(path.parent.name for path in folder.glob("*/config.json")) if folder is not None else []
        return found[:MAX_LISTED]

    return {"object": "list", "data": [model_entry(state, name) for name in await to_thread.run_sync(names)]}


# ---- loading and downloading


class DraftBody(Body):
    """The draft model of a load."""

    draft_model_name: str = Field(max_length=256)


def _within(name: str) -> Any:
    """A field with the limits of an option of `exl2nb.load`."""
    low, high = LOAD_OPTIONS_BY_NAME[name].range or (None, None)
    return Field(None, ge=low, le=high)


class LoadModelBody(Body):
    """POST /v1/model/load."""

    model_name: str = Field(max_length=256)
    max_seq_len: int | None = _within("context")
    cache_size: int | None = _within("cache_tokens")
    cache_mode: str | None = Field(None, max_length=16)
    max_batch_size: int | None = Field(None, ge=1, le=1 << 16)
    prompt_template: str | None = None
    draft_model: DraftBody | None = None
    device: str | None = Field(None, pattern="^(auto|cpu|cuda(:[0-9]{1,3})?)$")
    rope_scale: float | None = Field(None, gt=0)
    rope_alpha: float | None = Field(None, gt=0)
    skip_queue: bool | None = Field(None, description="no effect: requests of the old model end")


@admin_routes.post("/v1/model/load")
async def load_model(request: Request, body: LoadModelBody) -> Any:
    """Load a model of the model folder in the place of the one that is loaded; streams progress. A client that leaves does not stop it."""
    state = _state(request)
    state.check_owned()
    place = state.resolve(body.model_name)
    given = {
        "context": body.max_seq_len,
        "cache_tokens": body.cache_size,
        "cache": body.cache_mode.lower() if body.cache_mode else None,
        "max_sequences": body.max_batch_size,
        "draft": state.resolve(body.draft_model.draft_model_name) if body.draft_model else None,
        "device": body.device,
        "rope_scale": body.rope_scale,
        "rope_alpha": body.rope_alpha,
    }
    options = {name: value for name, value in given.items() if value is not None}

    async def work(sink: Sink) -> dict[str, Any]:
        await state.load(str(place), options, sink)
        state.template, asked = state.options.template, body.prompt_template
        if asked:
            state.template = asked if asked in INSTRUCT_TEMPLATES else named_template(state, asked)
        return {"model_type": "model", "module": 1, "modules": 1, "status": "finished"}

    return StreamingResponse(_progress(work, request.url.path, model_type="model"), media_type=MEDIA_TYPE, headers=STREAM_HEADERS)


@admin_routes.post("/v1/model/unload")
async def unload_model(request: Request) -> Any:
    """Close the model and give its memory back; requests end."""
    await _state(request).unload()
    return {"status": "unloaded"}


class DownloadBody(Body):
    """POST /v1/download."""

    repo_id: str = Field(max_length=256)
    revision: str | None = Field(None, max_length=256)
    folder_name: str | None = Field(None, max_length=256)
    stream: bool = False


@admin_routes.post("/v1/download")
async def download(request: Request, body: DownloadBody) -> Any:
    """Download a model of the hub into its cache and link it into the model folder; `stream` tells the progress."""
    state = _state(request)
    folder = state.options.model_dir
    if folder is None:
        raise ApiError(400, "no model_dir was given, so there is no place for downloads; start the server with --model-dir")
    hub.check_id(body.repo_id)
    name = body.folder_name or body.repo_id.split("/")[1] + (f"-{body.revision.replace('/', '-')}" if body.revision else "")
    if Path(name).name != name or name in (".", "..") or "\0" in name:
        raise ApiError(400, f"folder_name is {name[:80]!r}; expected the name of a folder")
    target = folder / name
    if target.exists() or target.is_symlink():
        raise ApiError(409, f"{name!r} is there already; give another folder_name")

    async def work(sink: Sink) -> dict[str, Any]:
        place = await to_thread.run_sync(lambda: hub.resolve(body.repo_id, body.revision, sink))
        folder.mkdir(parents=True, exist_ok=True)
        target.symlink_to(place, target_is_directory=True)
        return {"download_path": str(target), "status": "finished"}

    if body.stream:
        return StreamingResponse(_progress(work, request.url.path), media_type=MEDIA_TYPE, headers=STREAM_HEADERS)
    return await work(lambda _: None)


_running: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks weakly


async def _progress(work: Callable[[Sink], Coroutine[Any, Any, dict[str, Any]]], path: str, **more: Any) -> AsyncIterator[str]:
    """Events of a long work; it goes on after the client has gone."""
    loop, news = asyncio.get_running_loop(), asyncio.Queue[Progress | None]()

    def tell(one: Progress, /) -> None:
        loop.call_soon_threadsafe(news.put_nowait, one)

    task = loop.create_task(work(tell))
    _running.add(task)
    task.add_done_callback(_running.discard)
    task.add_done_callback(lambda _: news.put_nowait(None))
    while (one := await news.get()) is not None:
        yield event({**more, "module": one.done, "modules": one.total, "unit": one.unit, "stage": one.stage, "status": "processing"})
    try:
        yield event(task.result())
    except Exception as error:
        yield event(body_of(api_error(error), path))


# ---- templates


@router.get("/v1/templates")
@router.get("/v1/template/list", name="templates")
async def templates(request: Request) -> Any:
    """Chat templates that may be switched to: the model's own, and instruct formats."""
    state = _state(request)
    return {"object": "list", "data": [*sorted(state.llm.tokenizer.templates.templates), *INSTRUCT_TEMPLATES]}


class TemplateBody(Body):
    """POST /v1/template/switch."""

    prompt_template_name: str = Field(max_length=256)


@admin_routes.post("/v1/template/switch")
async def switch_template(request: Request, body: TemplateBody) -> Any:
    """Use another chat template for requests that name none."""
    state, name = _state(request), body.prompt_template_name
    if "{" in name:
        raise ApiError(400, "prompt_template_name is Jinja source; expected a name, or give the source with a request")
    state.template = name if name in INSTRUCT_TEMPLATES else named_template(state, name)
    return {"prompt_template_name": name}


@admin_routes.post("/v1/template/unload")
async def unload_template(request: Request) -> Any:
    """Go back to the template that the server began with."""
    state = _state(request)
    state.template = state.options.template
    return {"status": "unloaded"}


# ---- sampler presets


@router.get("/v1/sampling/overrides")
@router.get("/v1/sampling/override/list", name="sampler presets")
async def presets(request: Request) -> Any:
    """The preset that applies, and the names of all."""
    state = _state(request)
    name, values = state.preset
    return {"selected_preset": name, "overrides": dict(values), "presets": sorted(state.presets)}


class PresetBody(Body):
    """POST /v1/sampling/override/switch."""

    preset: str | None = Field(None, max_length=256)
    overrides: dict[str, Any] | None = Field(None, max_length=256)


@admin_routes.post("/v1/sampling/override/switch")
async def switch_preset(request: Request, body: PresetBody) -> Any:
    """Use a preset by name, or one that is given."""
    state = _state(request)
    if (body.preset is None) == (body.overrides is None):
        raise ApiError(400, "expected one of preset and overrides")
    if body.preset is not None and body.preset not in state.presets:
        raise ApiError(404, f"preset {body.preset[:80]!r} is not known; GET /v1/sampling/override/list names them", param="preset")
    given = body.overrides if body.preset is None else state.presets[body.preset]
    state.preset = (body.preset, check_preset(given or {}))
    return {"selected_preset": body.preset, "overrides": state.preset[1]}


@admin_routes.post("/v1/sampling/override/unload")
async def unload_preset(request: Request) -> Any:
    """Use no preset."""
    _state(request).preset = (None, {})
    return {"status": "unloaded"}


# ---- tokens


class EncodeBody(Body):
    """POST /v1/token/encode."""

    text: Text | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    add_bos_token: bool = True
    encode_special_tokens: bool = True
    decode_special_tokens: bool | None = Field(None, description="no effect here")


@router.post("/v1/token/encode")
async def encode(request: Request, body: EncodeBody) -> Any:
    """Tokens of a text, or of the prompt that a conversation becomes."""
    state = _state(request)
    llm, template = state.llm, state.template

    def work() -> list[int]:
        if isinstance(body.text, str):
            return llm.tokenizer.encode(body.text, body.add_bos_token, parse_special=body.encode_special_tokens)
        talk = with_pictures(body.text, remote=state.options.remote_images) if llm.vision is not None else body.text
        return llm.render(talk, template=template).ids

    tokens = await run_in_thread(work, heavy=not isinstance(body.text, str) or len(body.text) > INLINE_CHARACTERS)
    return {"tokens": tokens, "length": len(tokens)}


class DecodeBody(Body):
    """POST /v1/token/decode."""

    tokens: Ids
    decode_special_tokens: bool = True
    add_bos_token: bool | None = Field(None, description="no effect here")
    encode_special_tokens: bool | None = Field(None, description="no effect here")


@router.post("/v1/token/decode")
async def decode(request: Request, body: DecodeBody) -> Any:
    """Text of tokens."""
    llm = _state(request).llm
    if wrong := next((one for one in body.tokens if not 0 <= one < llm.config.vocab_size), None):
        raise ApiError(400, f"token {wrong} is not in the vocabulary; expected 0 to {llm.config.vocab_size - 1}", param="tokens")
    return {"text": llm.tokenizer.decode(body.tokens, skip_special=not body.decode_special_tokens)}
