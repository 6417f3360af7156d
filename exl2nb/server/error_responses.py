"""Errors as clients expect them: in OpenAI's shape, on /v1/messages in Anthropic's; never a traceback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from exl2nb.core import errors as ours
from exl2nb.core.log import logger

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {**OPENAI_TYPES, 413: "request_too_large", 503: "overloaded_error"}
MAX_MESSAGE = 1000


class ApiError(Exception):
    """A request that is refused. status: of HTTP. param: the field. code: a word for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, dict(headers or {})


def api_error(error: BaseException) -> ApiError:
    """What an error of the library means to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ours.ContextOverflow):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, (ours.OptionError, ours.StructureError, ours.TokenizerError)):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, ours.ModelNotFound):
        return ApiError(404, str(error), code="model_not_found")
    if isinstance(error, ours.EngineClosed):
        return ApiError(503, "the model was unloaded", code="model_unloaded", headers={"Retry-After": "5"})
    if isinstance(error, ours.Exl2Error) and not isinstance(error, ours.GenerationError):
        return ApiError(400, str(error), code=type(error).__name__)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says more", code="internal_error")


def body_of(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON of an error in the shape of the route's API."""
    message = error.message[:MAX_MESSAGE]
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def response_of(error: ApiError, path: str) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(body_of(error, path), error.status, error.headers)


def install(app: FastAPI) -> None:
    """Have every error of the application answered in these shapes."""

    async def api(request: Request, error: Exception) -> JSONResponse:
        return response_of(api_error(error), request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return response_of(invalid_request(error.errors()), request.url.path)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = {404: "no such route", 405: "this route does not take this method"}.get(error.status_code, str(error.detail))
        return response_of(ApiError(error.status_code, message, headers=error.headers), request.url.path)

    for kind in (ApiError, ours.Exl2Error, Exception):
        app.add_exception_handler(kind, api)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def invalid_request(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    first = found[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {where!r}; this server does not know it, leave it out", param=where, code="unknown_parameter")
    return ApiError(400, f"{where or 'the body'}: {first['msg'].removeprefix('Value error, ')}", param=where or None, code="invalid_value")
