"""OpenAI's and Anthropic's `/v1/files`: documents, texts and images that a client sends once, and names in the parts of
later requests by their `file_id`. They are media that the store keeps for clients (`media_endpoint`), with the same
bounds and end.

An id says what its file is, so that intake knows it without asking. Names and purposes are in the store's memory only:
when it has been restarted, files are found by their ids but not listed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from medialane.gateway.http.access import FILES_PATH
from medialane.gateway.http.media_endpoint import PIECE_BYTES, ask_lease, put_media
from medialane.gateway.http.responses import NO_STORE, header, is_anthropic, query_fields, send_response
from medialane.gateway.intake import read_upload, replay
from medialane.gateway.intake.documents import file_id, uploaded
from medialane.gateway.request.scope import RequestScope, current_scope
from medialane.runtime.tasks import LoopFairness
from medialane.store.client import StoreLink
from medialane.store.messages import MAX_UPLOAD_S, LeaseAction, PutMedia
from medialane.types.errors import InvalidRequest, UnknownMedia
from medialane.types.media import MediaRef
from medialane.types.media_lease import LeasedMedia, leased_hash, salt_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

FILE_PATH = f"{FILES_PATH}/{{file_id}}"
CONTENT_PATH = f"{FILE_PATH}/content"

#: Of files that requests read; no job of this server reads others.
_PURPOSES = ("user_data", "assistants", "vision")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]", "expires_in_seconds", "cache_salt")
#: OpenAI's, and Anthropic's for a page of a list; its earlier clients say `beta`.
_QUERY = ("purpose", "order", "limit", "after", "after_id", "page", "beta")
_MAX_LISTED = 10_000
_MAX_NAME_CHARS = 255


class FilesEndpoint:
    """An ASGI app. `admit` limits the requests in flight that have media; `read` returns the bytes of media in the
    arena, which the request holds, and `sending` limits the time in which its client reads that many bytes."""

    def __init__(
        self,
        link: StoreLink,
        fairness: LoopFairness,
        *,
        admit: Callable[[RequestScope], None],
        read: Callable[[MediaRef], Awaitable[memoryview]],
        sending: Callable[[int], AbstractAsyncContextManager[None]],
    ) -> None:
        self._link = link
        self._fairness = fairness
        self._admit = admit
        self._read = read
        self._sending = sending

    @property
    def routes(self) -> dict[str, FilesEndpoint]:
        """By method and path."""
        paths = {"GET": (FILES_PATH, FILE_PATH, CONTENT_PATH), "POST": (FILES_PATH,), "DELETE": (FILE_PATH,)}
        return {f"{method} {path}": self for method, listed in paths.items() for path in listed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises MedialaneError before the response has begun."""
        name, answer = scope["path_params"].get("file_id"), dict[str, Any]()
        if scope["method"] == "POST":
            answer = _shown(scope, await self._create(scope, receive))
        elif name is None:
            answer = await self._listed(scope, query_fields(scope["query_string"], _QUERY))
        elif scope["method"] == "DELETE":
            await self._ask(scope, name, "end")
            answer = {"id": name, "object": "file", "deleted": True}
            if is_anthropic(scope):
                answer = {"id": name, "type": "file_deleted"}
        elif scope["path"].endswith("/content"):
            await self._send_content(scope, name, send)
            return
        else:
            answer = _shown(scope, await self._ask(scope, name))
        await send_response(send, 200, msgspec.json.encode(answer))

    async def _create(self, scope: Scope, receive: Receive) -> LeasedMedia:
        """Lease the file of a form, which intake has replaced by a reference."""
        request = current_scope()
        form = (await receive()).get("body", b"")
        filename, fields = read_upload(form, header(scope, b"content-type"), _FIELDS)
        if (purpose := fields.get("purpose", _PURPOSES[0] if is_anthropic(scope) else "")) not in _PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(_PURPOSES)}", param="purpose")
        expires = "expires_in_seconds" if "expires_in_seconds" in fields else "expires_after[seconds]"
        if not (ttl := fields.get(expires, "0")).isdecimal():
            raise InvalidRequest(f"{expires} must be a whole number", param=expires.partition("[")[0])
        self._admit(request)
        (ref,) = request.extracted.refs
        data = ref.data or b""
        name = filename[:_MAX_NAME_CHARS]
        declared = PutMedia(
            0, ref.owner, ref.salt, len(data), MAX_UPLOAD_S, float(ttl) or None, ref.source, name=name, purpose=purpose
        )
        return await put_media(self._link, declared, replay(data, receive), self._fairness)

    async def _listed(self, scope: Scope, query: Mapping[str, str]) -> dict[str, Any]:
        limit = query.get("limit", str(_MAX_LISTED))
        if not limit.isdecimal() or not 0 < int(limit) <= _MAX_LISTED:
            raise InvalidRequest(f"limit must be between 1 and {_MAX_LISTED}", param="limit")
        listed = await ask_lease(self._link, scope, None)
        found = [media for media in listed if query.get("purpose") in (None, media.purpose)]
        found.sort(key=lambda media: media.created_at, reverse=query.get("order") != "asc")
        names = [file_id(media) for media in found]
        after = query.get("after") or query.get("after_id") or query.get("page", "")
        first = names.index(after) + 1 if after in names else 0
        page = [_shown(scope, media) for media in found[first : first + int(limit)]]
        has_more = first + len(page) < len(found)
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        answer: dict[str, Any] = {"data": page, "has_more": has_more, **ends}
        if is_anthropic(scope):
            return answer | {"next_page": ends["last_id"] if has_more else None}
        return answer | {"object": "list"}

    async def _send_content(self, scope: Scope, name: str, send: Send) -> None:
        media = await self._ask(scope, name)
        url, media_type = uploaded(name)
        ref = MediaRef("image", "file_id", url, media_type=media_type, salt=salt_of(scope["headers"]))
        data = await self._read(current_scope().owned(ref))
        length = (b"content-length", str(len(data)).encode())
        headers = [(b"content-type", media.media_type.encode()), length, NO_STORE]
        async with self._sending(len(data)):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for start in range(0, len(data), PIECE_BYTES):
                end = start + PIECE_BYTES
                piece = {"type": "http.response.body", "body": bytes(data[start:end]), "more_body": end < len(data)}
                await send(piece)

    async def _ask(self, scope: Scope, name: str, action: LeaseAction = "find") -> LeasedMedia:
        try:
            (media,) = await ask_lease(self._link, scope, leased_hash(uploaded(name)[0]), action)
        except UnknownMedia as error:
            raise UnknownMedia(f"there is no file {name}, or it has expired", param="file_id") from error
        return media


def _shown(scope: Scope, media: LeasedMedia) -> dict[str, Any]:
    """Return the file object of the client's API."""
    created_at, expires_at = int(media.created_at), int(time.time() + media.remaining_s)
    if is_anthropic(scope):
        return {
            "id": file_id(media),
            "type": "file",
            "filename": media.name,
            "mime_type": media.media_type,
            "size_bytes": media.num_bytes,
            "created_at": datetime.fromtimestamp(created_at, UTC),
            "expires_at": datetime.fromtimestamp(expires_at, UTC),
            "downloadable": True,
        }
    return {
        "id": file_id(media),
        "object": "file",
        "bytes": media.num_bytes,
        "created_at": created_at,
        "expires_at": expires_at,
        "filename": media.name,
        "purpose": media.purpose or _PURPOSES[0],
        "status": "processed",
    }
