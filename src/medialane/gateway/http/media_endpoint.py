"""The endpoints of media that are sent once: `/medialane/v1/media`, and `/medialane/v1/media/{hash}` for each.

Nothing of the media stays in this process: each piece is hashed, and copied to the range that the store has reserved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, cast

import msgspec
from blake3 import blake3

from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.access import LEASE_PATH, MEDIA_PATH
from medialane.gateway.http.responses import header, query_fields, send_response
from medialane.gateway.intake import check_salt
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
from medialane.types.errors import ClientDisconnected, EmptyMedia, InvalidRequest, ProtocolViolation, StoreUnavailable
from medialane.types.media import MODALITIES, Alias, Modality
from medialane.types.media_lease import LeasedMedia, is_hash, salt_of
from medialane.types.tensor import ArenaRange

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_ACTIONS: Final[Mapping[str, LeaseAction]] = {"GET": "find", "HEAD": "find", "POST": "renew", "DELETE": "end"}

#: Bytes copied per iteration of the event loop, about 100 us.
PIECE_BYTES = 512 * 1024

#: The store waits longer than the gateway for the client.
_MARGIN_S = 30.0


class MediaEndpoint:
    """An ASGI app. `admit` limits the requests in flight that have media; `num_tokens` returns how many an image of a
    size takes, None if that is not known."""

    def __init__(
        self,
        link: StoreLink,
        config: GatewayConfig,
        fairness: LoopFairness,
        *,
        admit: Callable[[RequestScope], None],
        num_tokens: Callable[[tuple[int, int]], Awaitable[int | None]],
    ) -> None:
        self._link = link
        self._config = config
        self._fairness = fairness
        self._admit = admit
        self._num_tokens = num_tokens

    @property
    def routes(self) -> dict[str, MediaEndpoint]:
        """By method and path."""
        return {f"PUT {MEDIA_PATH}": self} | {f"{method} {LEASE_PATH}": self for method in _ACTIONS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises MedialaneError before the response has begun."""
        respond = self._put(scope, receive) if scope["method"] == "PUT" else self._ask(scope)
        body = msgspec.json.encode(await respond)
        await send_response(send, 200, body)

    async def _put(self, scope: Scope, receive: Receive) -> Mapping[str, object]:
        """Lease the media that `receive` returns; it is not called before the store has accepted what is declared."""
        request = current_scope()
        declared = self._declared(scope, request)
        self._admit(request)
        return await self._shown(await put_media(self._link, declared, receive, self._fairness))

    async def _ask(self, scope: Scope) -> Mapping[str, object]:
        action, media = _ACTIONS[scope["method"]], scope["path_params"]["hash"]
        if not is_hash(media):
            raise InvalidRequest("the hash of media has 64 hexadecimal digits in lower case", param="hash")
        ttl_s = _ttl(query_fields(scope["query_string"], ("ttl",) if action == "renew" else ()))
        (leased,) = await ask_lease(self._link, scope, media, action, ttl_s=ttl_s)
        return {"hash": media, "deleted": True} if action == "end" else await self._shown(leased)

    def _declared(self, scope: Scope, request: RequestScope) -> PutMedia:
        """Return what is known before the body. Raises InvalidRequest, EmptyMedia."""
        fields = query_fields(scope["query_string"], ("ttl", "uuid"))
        salt = salt_of(scope["headers"])
        check_salt(salt, self._config)
        if (uuid := fields.get("uuid")) == "":
            raise InvalidRequest("the uuid is empty", param="uuid")
        length = header(scope, b"content-length")
        num_bytes = int(length) if length.isdigit() else None
        if num_bytes == 0:
            raise EmptyMedia("the body is empty")
        return PutMedia(
            0,
            request.owner,
            request.salt(salt) or "",
            num_bytes or 0,
            min(self._config.body_timeout_s + _MARGIN_S, MAX_UPLOAD_S),
            ttl_s=_ttl(fields),
            modality=_modality(header(scope, b"content-type")),
            alias=None if uuid is None else Alias(uuid, "", owner=request.owner),
        )

    async def _shown(self, media: LeasedMedia) -> Mapping[str, object]:
        """Return the response. `expires` is in seconds since 1970."""
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


async def put_media(link: StoreLink, declared: PutMedia, receive: Receive, fairness: LoopFairness) -> LeasedMedia:
    """Have the store lease the media that `receive` returns, for the current request. Raises MedialaneError."""
    upload = _Upload(link, receive, fairness)

    def put(call_id: int) -> PutMedia:
        upload.begin()
        return msgspec.structs.replace(declared, call_id=call_id)

    with current_scope().timeline.measure("fetch"):
        (media,) = cast("MediaLeased", await link.call(put, upload.write)).media
    return media


async def ask_lease(
    link: StoreLink, scope: Scope, media: str | None, action: LeaseAction = "find", *, ttl_s: float | None = None
) -> list[LeasedMedia]:
    """Find, renew or end a lease that the current request may use; without `media`, find all of those on files. Raises
    UnknownMedia, InvalidRequest."""
    request = current_scope()
    owner, salt = request.owner, request.salt(salt_of(scope["headers"])) or ""
    reply = await link.call(lambda call_id: AskLease(call_id, owner, media, action, ttl_s, salt))
    return cast("MediaLeased", reply).media


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
                size = min(room, PIECE_BYTES)
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
        for start in range(0, self._num_bytes if old != entry else 0, PIECE_BYTES):
            await asyncio.sleep(0)
            end = min(start + PIECE_BYTES, self._num_bytes)
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
    """Return the modality of a media type; None for any other type, such as the default of clients that set none."""
    kind = content_type.partition(b"/")[0].strip().lower()
    return next((modality for modality in MODALITIES if modality.encode() == kind), None)
