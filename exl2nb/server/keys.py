"""Who may do what: keys in the headers that OpenAI's, Anthropic's and TabbyAPI's clients send, compared in constant time."""

from __future__ import annotations

import hmac

from fastapi import Request

from exl2nb.server.errors import ApiError
from exl2nb.server.options import ServerOptions

MAX_KEY = 1024  # characters


def permission(request: Request, options: ServerOptions) -> str | None:
    """What a request may do: "admin", "api", or None where a key is needed and none fits."""
    if not options.api_keys and not options.admin_keys:
        return "admin"
    headers = request.headers
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), headers.get("x-admin-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    given = [key for key in given if key and len(key) <= MAX_KEY]
    if _any(given, options.admin_keys):
        return "admin"
    return "api" if _any(given, options.api_keys) else None


async def user(request: Request) -> None:  # async: others run on threads
    """A dependency of routes: any key.

    Raises:
        ApiError: 401.
    """
    if permission(request, request.app.state.server.options) is None:
        raise ApiError(401, "no valid key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'", code="invalid_api_key")


async def admin(request: Request) -> None:
    """A dependency of routes: an administrator's key.

    Raises:
        ApiError: 401, 403.
    """
    await user(request)
    if permission(request, request.app.state.server.options) != "admin":
        raise ApiError(403, "this needs an admin key; send it as 'x-admin-key: KEY'", code="admin_key_needed")


def _any(given: list[str], keys: tuple[str, ...]) -> bool:
    """Whether one of the keys was given; takes the same time wherever they differ."""
    found = False
    for key in keys:
        for one in given:
            found |= hmac.compare_digest(one.encode(), key.encode())
    return found
