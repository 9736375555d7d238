"""The files of the page, which is in `gateway/page`. They have no data: anyone may read them, also to log in."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from medialane.types.errors import NotFound

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import ASGIApp, Receive, Scope, Send

PAGE_PATH = "/medialane/"
FILE_PATH = "/medialane/{file}"

_MEDIA_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript",
    ".css": b"text/css",
    ".svg": b"image/svg+xml",
}
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


class _File(NamedTuple):
    body: bytes
    media_type: bytes
    etag: bytes


class PageFiles:
    """Serves them as an ASGI app. Raises NotFound."""

    @property
    def routes(self) -> dict[str, ASGIApp]:
        """By method and path; to be the last ones, since FILE_PATH is the path of others, too."""
        return {f"GET {PAGE_PATH}": self, f"GET {FILE_PATH}": self}

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        file = _files().get(scope["path_params"].get("file", "index.html"))
        if file is None:
            raise NotFound("there is no such page")
        given = next((value for name, value in scope["headers"] if name == b"if-none-match"), b"")
        headers = [*_HEADERS, (b"etag", file.etag)]
        if file.etag in given:
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            return await send({"type": "http.response.body", "body": b""})
        headers += [(b"content-type", file.media_type), (b"content-length", str(len(file.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        return await send({"type": "http.response.body", "body": file.body})


@cache
def _files() -> dict[str, _File]:
    """Return the files by name. Read once: a package does not change while it runs."""
    found = {}
    for file in files("medialane.gateway").joinpath("page").iterdir():
        media_type = _MEDIA_TYPES.get(PurePath(file.name).suffix)
        if media_type is not None:
            body = file.read_bytes()
            found[file.name] = _File(body, media_type, b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode())
    return found
