"""TabbyAPI's routes for LoRA adapters: which there are, which are loaded, load and unload. Requests name one as MODEL:ADAPTER."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from pydantic import Field

from exl2nb.server.error_responses import ApiError
from exl2nb.server.fields import Body
from exl2nb.server.state import State, admin, user

router = APIRouter(dependencies=[Depends(user)])
admin_routes = APIRouter(dependencies=[Depends(admin)])
MAX_LISTED = 10_000


def _entry(name: str, state: State, scaling: float | None = None) -> dict[str, Any]:
    return {"id": name, "object": "lora", "created": int(state.started), "owned_by": "exl2nb", "scaling": scaling}


@router.get("/v1/loras")
@router.get("/v1/lora/list", name="adapters")
async def loras(request: Request) -> Any:
    """Adapters in the adapter folder."""
    state: State = request.app.state.server
    folder = state.options.lora_dir

    def names() -> list[str]:
        found = sorted(path.parent.name for path in folder.glob("*/adapter_config.json")) if folder is not None else []
        return found[:MAX_LISTED]

    return {"object": "list", "data": [_entry(name, state) for name in await to_thread.run_sync(names)]}


@router.get("/v1/lora")
async def loaded(request: Request) -> Any:
    """Adapters that are loaded."""
    state: State = request.app.state.server
    return {"object": "list", "data": [_entry(lora.name, state, lora.scale) for lora in state.llm.loras.list()]}


class LoraBody(Body):
    """One adapter to load."""

    name: str = Field(max_length=256)
    scaling: float = Field(1.0, ge=-100, le=100)


class LoadLoraBody(Body):
    """POST /v1/lora/load."""

    loras: list[LoraBody] = Field(min_length=1, max_length=64)


@admin_routes.post("/v1/lora/load")
async def load(request: Request, body: LoadLoraBody) -> Any:
    """Load adapters of the adapter folder; those that cannot be are named, and the others are loaded."""
    state: State = request.app.state.server
    llm, folder, done, failed = state.llm, state.options.lora_dir, [], []
    if folder is None:
        raise ApiError(400, "no lora_dir was given, so there are no adapters to choose from; start the server with --lora-dir")
    for one in body.loras:
        name = one.name
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise ApiError(400, f"adapter name {name[:80]!r} leads out of the adapter folder; expected the name of a folder in it")
        if not (folder / name / "adapter_config.json").is_file():
            failed.append({"name": name, "reason": "there is no such adapter; GET /v1/loras names them"})
            continue
        try:
            await to_thread.run_sync(lambda one=one: llm.loras.load(folder / one.name, scale=one.scaling, progress=None))
            done.append(name)
        except Exception as error:
            failed.append({"name": name, "reason": str(error)})
    return {"success": done, "failure": failed}


class UnloadBody(Body):
    """POST /v1/lora/unload: some by name, or all."""

    loras: list[str] | None = Field(None, max_length=4096)


@admin_routes.post("/v1/lora/unload")
async def unload(request: Request, body: UnloadBody | None = None) -> Any:
    """Forget adapters; requests that use them go on with them."""
    state: State = request.app.state.server
    names = [*state.llm.loras] if body is None or body.loras is None else body.loras
    if missing := [name for name in names if name not in state.llm.loras]:
        raise ApiError(404, f"adapter {missing[0][:80]!r} is not loaded; GET /v1/lora names those that are", param="loras")
    for name in names:
        state.llm.loras.unload(name)
    return {"unloaded": names}
