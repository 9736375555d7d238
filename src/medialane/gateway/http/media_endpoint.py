"""The endpoints of media that are sent once, and named in later requests: `/medialane/v1/media`, and OpenAI's and
Anthropic's `/v1/files` for documents, texts and images. Both lease media in the store, with the same bounds and end.

Nothing of the media that `/medialane/v1/media` receives stays in this process: each piece is hashed, and copied to the
range that the store has reserved.

The id of a file says what it is, so that intake knows it without asking. Names and purposes are in the store's memory
only: when it has been restarted, files are found by their ids but not listed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from blake3 import blake3

from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.access import FILES_PATH, LEASE_PATH, MEDIA_PATH
from medialane.gateway.http.responses import NO_STORE, Endpoint, header, is_anthropic, query_fields, send_response
from medialane.gateway.intake import check_salt, replay
from medialane.gateway.intake.documents import file_id, uploaded
from medialane.gateway.request.scope import RequestScope, current_scope
from medialane.runtime.tasks import LoopFairness
from medialane.store.client import StoreLink
from medialane.store.messages import (
    MAX_UPLOAD_S,
    AskLease,
    LeaseAction,
    MediaLeased,
    Proceed,
    PutMedia,
    Question,
    SendData,
)
from medialane.types.errors import (
    ClientDisconnected,
    EmptyMedia,
    InvalidBody,
    InvalidRequest,
    ProtocolViolation,
    StoreUnavailable,
    UnknownMedia,
)
from medialane.types.media import MODALITIES, Alias, MediaRef, Modality
from medialane.types.media_lease import LeasedMedia, is_hash, leased_hash, salt_of
from medialane.types.tensor import ArenaRange

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_ACTIONS: Final[Mapping[str, LeaseAction]] = {"GET": "find", "HEAD": "find", "POST": "renew", "DELETE": "end"}

#: Bytes copied per iteration of the event loop, about 100 us.
_PIECE_BYTES = 512 * 1024

#: The store waits longer than the gateway for the client.
_MARGIN_S = 30.0

_FILE_PATH = f"{FILES_PATH}/{{file_id}}"

#: Of files that requests read; no job of this server reads others.
_PURPOSES = ("user_data", "assistants", "vision")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]", "expires_in_seconds", "cache_salt")
#: OpenAI's, and Anthropic's for a page of a list; its earlier clients say `beta`.
_QUERY = ("purpose", "order", "limit", "after", "after_id", "page", "beta")
_MAX_LISTED = 10_000
_MAX_NAME_CHARS = 255

#: Returns the answer, which is sent as JSON.
_Respond = Callable[["Scope", "Receive"], Awaitable[object]]


class MediaEndpoints:
    """`admit` limits the requests in flight that have media; `num_tokens` returns how many an image of a size takes,
    None if that is not known; `read` returns the bytes of media in the arena, which the request holds, and `sending`
    limits the time in which its client reads that many bytes."""

    def __init__(
        self,
        link: StoreLink,
        config: GatewayConfig,
        fairness: LoopFairness,
        *,
        admit: Callable[[RequestScope], None],
        num_tokens: Callable[[tuple[int, int]], Awaitable[int | None]],
        read: Callable[[MediaRef], Awaitable[memoryview]],
        sending: Callable[[int], AbstractAsyncContextManager[None]],
    ) -> None:
        self._link = link
        self._config = config
        self._fairness = fairness
        self._admit = admit
        self._num_tokens = num_tokens
        self._read = read
        self._sending = sending

    @property
    def routes(self) -> dict[str, Endpoint]:
        """By method and path. They raise MedialaneError before the response has begun."""
        answers: dict[str, _Respond] = {
            f"PUT {MEDIA_PATH}": self._put,
            **{f"{method} {LEASE_PATH}": self._ask for method in _ACTIONS},
            f"POST {FILES_PATH}": self._create_file,
            f"GET {FILES_PATH}": self._list_files,
            f"GET {_FILE_PATH}": self._show_file,
            f"DELETE {_FILE_PATH}": self._delete_file,
        }
        endpoints = {route: Endpoint(partial(_send_answer, respond)) for route, respond in answers.items()}
        return {**endpoints, f"GET {_FILE_PATH}/content": Endpoint(self._send_content)}

    async def _lease(self, declared: PutMedia, receive: Receive) -> LeasedMedia:
        """Lease the media that `receive` returns; it is not called before the store has accepted what is declared."""
        upload = _Upload(self._link, receive, self._fairness)

        def put(call_id: int) -> PutMedia:
            upload.begin()
            return msgspec.structs.replace(declared, call_id=call_id)

        with current_scope().timeline.measure("fetch"):
            (media,) = cast("MediaLeased", await self._link.call(put, upload.write)).media
        return media

    async def _leased(
        self, scope: Scope, media: str | None = None, action: LeaseAction = "find", *, ttl_s: float | None = None
    ) -> list[LeasedMedia]:
        """Find, renew or end a lease that the request may use; without `media`, find all of those on files."""
        request = current_scope()
        owner, salt = request.owner, request.salt(salt_of(scope["headers"])) or ""
        reply = await self._link.call(lambda call_id: AskLease(call_id, owner, media, action, ttl_s, salt))
        return cast("MediaLeased", reply).media

    async def _put(self, scope: Scope, receive: Receive) -> object:
        request, salt = current_scope(), salt_of(scope["headers"])
        fields = query_fields(scope["query_string"], ("ttl", "uuid"))
        check_salt(salt, self._config)
        if (uuid := fields.get("uuid")) == "":
            raise InvalidRequest("the uuid is empty", param="uuid")
        length = header(scope, b"content-length")
        num_bytes = int(length) if length.isdigit() else None
        if num_bytes == 0:
            raise EmptyMedia("the body is empty")
        declared = PutMedia(
            0,
            request.owner,
            request.salt(salt) or "",
            num_bytes or 0,
            min(self._config.body_timeout_s + _MARGIN_S, MAX_UPLOAD_S),
            ttl_s=_ttl(fields),
            modality=_modality(header(scope, b"content-type")),
            alias=None if uuid is None else Alias(uuid, "", owner=request.owner),
        )
        self._admit(request)
        return await self._shown(await self._lease(declared, receive))

    async def _ask(self, scope: Scope, _receive: Receive) -> object:
        action, media = _ACTIONS[scope["method"]], scope["path_params"]["hash"]
        if not is_hash(media):
            raise InvalidRequest("the hash of media has 64 hexadecimal digits in lower case", param="hash")
        ttl_s = _ttl(query_fields(scope["query_string"], ("ttl",) if action == "renew" else ()))
        (leased,) = await self._leased(scope, media, action, ttl_s=ttl_s)
        return {"hash": media, "deleted": True} if action == "end" else await self._shown(leased)

    async def _shown(self, media: LeasedMedia) -> Mapping[str, object]:
        is_image = media.modality == "image" and media.width
        return {
            "hash": media.hash,
            "modality": media.modality,
            "size": {"bytes": media.num_bytes}
            | {name: size for name, size in (("width", media.width), ("height", media.height)) if size},
            "duration": media.duration_s or None,
            "num_tokens": await self._num_tokens((media.width, media.height)) if is_image else None,
            "expires": int(time.time() + media.remaining_s),
        }

    async def _create_file(self, scope: Scope, receive: Receive) -> object:
        request = current_scope()
        refs, upload = request.extracted.refs, request.extracted.upload
        if upload is None:
            raise InvalidBody("the body must be a form (multipart/form-data)")
        if [ref.param for ref in refs] != ["file"]:
            raise InvalidRequest("the form must have one file, in its field `file`", param="file")
        filename, fields = upload
        for name in fields.keys() - set(_FIELDS):
            raise InvalidRequest(f"unknown field; supported here: file, {', '.join(_FIELDS)}", param=name[:64])
        if (purpose := fields.get("purpose", _PURPOSES[0] if is_anthropic(scope) else "")) not in _PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(_PURPOSES)}", param="purpose")
        expires = "expires_in_seconds" if "expires_in_seconds" in fields else "expires_after[seconds]"
        if not (ttl := fields.get(expires, "0")).isdecimal():
            raise InvalidRequest(f"{expires} must be a whole number", param=expires.partition("[")[0])
        self._admit(request)
        ref, data, name = refs[0], refs[0].data or b"", filename[:_MAX_NAME_CHARS]
        declared = PutMedia(
            0, ref.owner, ref.salt, len(data), MAX_UPLOAD_S, float(ttl) or None, ref.source, name=name, purpose=purpose
        )
        return _file_object(scope, await self._lease(declared, replay(data, receive)))

    async def _show_file(self, scope: Scope, _receive: Receive) -> object:
        return _file_object(scope, await self._file(scope))

    async def _delete_file(self, scope: Scope, _receive: Receive) -> object:
        media = await self._file(scope, "end")
        kind = {"type": "file_deleted"} if is_anthropic(scope) else {"object": "file", "deleted": True}
        return {"id": file_id(media), **kind}

    async def _list_files(self, scope: Scope, _receive: Receive) -> object:
        query = query_fields(scope["query_string"], _QUERY)
        limit = query.get("limit", str(_MAX_LISTED))
        if not limit.isdecimal() or not 0 < int(limit) <= _MAX_LISTED:
            raise InvalidRequest(f"limit must be between 1 and {_MAX_LISTED}", param="limit")
        listed = await self._leased(scope)
        found = [media for media in listed if query.get("purpose") in (None, media.purpose)]
        found.sort(key=lambda media: media.created_at, reverse=query.get("order") != "asc")
        names = [file_id(media) for media in found]
        after = query.get("after") or query.get("after_id") or query.get("page", "")
        first = names.index(after) + 1 if after in names else 0
        page = [_file_object(scope, media) for media in found[first : first + int(limit)]]
        has_more = first + len(page) < len(found)
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        answer: dict[str, Any] = {"data": page, "has_more": has_more, **ends}
        if is_anthropic(scope):
            return answer | {"next_page": ends["last_id"] if has_more else None}
        return answer | {"object": "list"}

    async def _send_content(self, scope: Scope, _receive: Receive, send: Send) -> None:
        media = await self._file(scope)
        url, media_type = uploaded(file_id(media))
        ref = MediaRef("image", "file_id", url, media_type=media_type, salt=salt_of(scope["headers"]))
        data = await self._read(current_scope().owned(ref))
        length = (b"content-length", str(len(data)).encode())
        headers = [(b"content-type", media.media_type.encode()), length, NO_STORE]
        async with self._sending(len(data)):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for start in range(0, len(data), _PIECE_BYTES):
                end = start + _PIECE_BYTES
                piece = {"type": "http.response.body", "body": bytes(data[start:end]), "more_body": end < len(data)}
                await send(piece)

    async def _file(self, scope: Scope, action: LeaseAction = "find") -> LeasedMedia:
        name = scope["path_params"]["file_id"]
        try:
            (media,) = await self._leased(scope, leased_hash(uploaded(name)[0]), action)
        except UnknownMedia as error:
            raise UnknownMedia(f"there is no file {name}, or it has expired", param="file_id") from error
        return media


async def _send_answer(respond: _Respond, scope: Scope, receive: Receive, send: Send) -> None:
    await send_response(send, 200, msgspec.json.encode(await respond(scope, receive)))


def _file_object(scope: Scope, media: LeasedMedia) -> dict[str, Any]:
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


class _Upload:
    """The media of one body, which are hashed and written to the arena while they arrive."""

    def __init__(self, link: StoreLink, receive: Receive, fairness: LoopFairness) -> None:
        self._link = link
        self._receive = receive
        self._fairness = fairness
        self._hasher = blake3()
        self._num_bytes = 0
        self._range: ArenaRange | None = None
        self._rest = memoryview(b"")
        self._more = True

    def begin(self) -> None:
        """A store asks for the body. Raises StoreUnavailable if an earlier store was lost with a part of it, which only
        the client still has."""
        if self._num_bytes or self._rest or not self._more:
            raise StoreUnavailable("the media store was lost while it received the media: send them again")
        self._range = None

    async def write(self, question: Question) -> Proceed:
        """Write to a range of the store until it is full, or the body has ended."""
        if not isinstance(question, SendData):
            raise ProtocolViolation(f"unexpected {type(question).__name__}")
        await self._move(question.range)
        while self._rest or self._more:
            if not self._rest:
                self._rest = await self._next()
            elif room := len(self._link.payload(question.range)) - self._num_bytes:
                size = min(room, _PIECE_BYTES)
                piece, self._rest = self._rest[:size], self._rest[size:]
                await self._append(piece, question.range)
            else:
                return Proceed(question.call_id)
        if not self._num_bytes:
            raise EmptyMedia("the body is empty")
        return Proceed(question.call_id, self._num_bytes, self._hasher.hexdigest())

    async def _move(self, entry: ArenaRange) -> None:
        """Continue in another range, with what is in the one before."""
        old, self._range = self._range or entry, entry
        for start in range(0, self._num_bytes if old != entry else 0, _PIECE_BYTES):
            await asyncio.sleep(0)
            end = min(start + _PIECE_BYTES, self._num_bytes)
            self._link.payload(entry)[start:end] = self._link.payload(old)[start:end]

    async def _append(self, piece: memoryview, entry: ArenaRange) -> None:
        start, end = self._num_bytes, self._num_bytes + len(piece)
        async with self._fairness.step(len(piece)):
            self._link.payload(entry)[start:end] = piece  # raises if the store is lost
            self._hasher.update(piece)
        self._num_bytes = end

    async def _next(self) -> memoryview:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client has disconnected")
        self._more = bool(message.get("more_body", False))
        return memoryview(message.get("body", b""))


def _ttl(fields: Mapping[str, str]) -> float | None:
    try:
        return float(fields["ttl"]) if "ttl" in fields else None
    except ValueError as error:
        raise InvalidRequest("ttl must be a number of seconds", param="ttl") from error


def _modality(content_type: bytes) -> Modality | None:
    kind = content_type.partition(b"/")[0].strip().lower()
    return next((each for each in MODALITIES if each.encode() == kind), None)  # many clients set a default
