"""The client's address, as the gateway behind the router sees it.

The router's own header tells it, not `X-Forwarded-For`: that stays what the client has sent, so that a gateway trusts
it, or not, as without a router (`FORWARDED_ALLOW_IPS`, `operators.sessions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = b"x-medialane-client"


class _Connection(msgspec.Struct, array_like=True):
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


def address_header(scope: Scope) -> tuple[bytes, bytes]:
    """Return the header for the request with this scope."""
    return HEADER, msgspec.json.encode(_Connection(scope["scheme"], scope.get("client"), scope.get("server")))


class RestoredClient:
    """An ASGI app whose requests come from a router, over a socket that only this user reaches: restores what the
    router has seen of the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            value = next((value for name, value in scope["headers"] if name == HEADER), None)
            scope["headers"] = [(name, text) for name, text in scope["headers"] if name != HEADER]
            scope.update(_restored(value))  # in place, for the server's access log
        await self._app(scope, receive, send)


def _restored(value: bytes | None) -> dict[str, Any]:
    if value is None:  # a probe of the supervisor
        return {}
    seen = msgspec.json.decode(value, type=_Connection)
    return {"scheme": seen.scheme, "client": seen.client, "server": seen.server}
