"""The endpoints of media that are sent once: `/medialane/v1/media`, and `/medialane/v1/media/{hash}` for each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec

from medialane.core.errors import EmptyMedia, InvalidRequest
from medialane.core.media import Alias, Modality
from medialane.core.media_lease import LeasedMedia, is_hash, salt_of
from medialane.core.modalities import MODALITIES
from medialane.gateway.config import GatewayConfig
from medialane.gateway.intake.extraction import check_salt
from medialane.gateway.scope import RequestScope, current_scope
from medialane.gateway.sent_media import SentFile, SentMedia

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import Receive, Scope, Send

MEDIA_PATH = "/medialane/v1/media"
LEASE_PATH = "/medialane/v1/media/{hash}"

_MAX_QUERY_FIELDS = 16


class _Size(msgspec.Struct, frozen=True, omit_defaults=True):
    bytes: int
    width: int = 0
    height: int = 0


class _Lease(msgspec.Struct, frozen=True):
    """The response. `expires` is in seconds since 1970."""

    hash: str
    modality: Modality
    size: _Size
    duration: float | None
    num_tokens: int | None
    expires: int


class _Ended(msgspec.Struct, frozen=True):
    hash: str
    deleted: bool = True


class MediaEndpoint:
    """An ASGI app. `admit` limits the requests in flight that have media; `num_tokens` returns how many an image of a
    size takes, None if that is not known."""

    def __init__(
        self,
        media: SentMedia,
        config: GatewayConfig,
        *,
        admit: Callable[[RequestScope], None],
        num_tokens: Callable[[tuple[int, int]], Awaitable[int | None]],
    ) -> None:
        self._media = media
        self._config = config
        self._admit = admit
        self._num_tokens = num_tokens

    @property
    def routes(self) -> dict[str, MediaEndpoint]:
        """By method and path."""
        methods = ("GET", "HEAD", "POST", "DELETE")
        return {f"PUT {MEDIA_PATH}": self} | {f"{method} {LEASE_PATH}": self for method in methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises MedialaneError before the response has begun."""
        body = await self._respond(scope, receive)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _respond(self, scope: Scope, receive: Receive) -> bytes:
        request, method = current_scope(), scope["method"]
        if method == "PUT":
            file = self._declared(scope, request)
            self._admit(request)
            with request.timeline.measure("fetch"):
                return await self._shown(await self._media.put(file, receive))
        owner, media = request.owner, scope["path_params"]["hash"]
        salt = request.salt(salt_of(scope["headers"])) or ""
        if not is_hash(media):
            raise InvalidRequest("the hash of media has 64 hexadecimal digits in lower case", param="hash")
        fields = _query(scope, ("ttl",) if method == "POST" else ())
        if method == "POST":
            return await self._shown(await self._media.renew(owner, salt, media, _ttl(fields)))
        if method == "DELETE":
            return msgspec.json.encode(_Ended((await self._media.end(owner, salt, media)).hash))
        return await self._shown(await self._media.find(owner, salt, media))

    def _declared(self, scope: Scope, request: RequestScope) -> SentFile:
        """Read all that is known before the body. Raises InvalidRequest, EmptyMedia."""
        fields = _query(scope, ("ttl", "uuid"))
        salt = salt_of(scope["headers"])
        check_salt(salt, self._config)
        uuid = fields.get("uuid")
        if uuid == "":
            raise InvalidRequest("the uuid is empty", param="uuid")
        declared = _header(scope, b"content-length")
        if declared is not None and declared.isdigit() and not int(declared):
            raise EmptyMedia("the body is empty")
        return SentFile(
            request.owner,
            request.salt(salt) or "",
            int(declared) if declared is not None and declared.isdigit() else 0,
            _modality(_header(scope, b"content-type") or b""),
            None if uuid is None else Alias(uuid, "", owner=request.owner),
            _ttl(fields),
        )

    async def _shown(self, media: LeasedMedia) -> bytes:
        size = _Size(media.num_bytes, media.width, media.height)
        num_tokens = None
        if media.modality == "image" and media.width:
            num_tokens = await self._num_tokens((media.width, media.height))
        expires = int(time.time() + media.remaining_s)
        shown = _Lease(media.hash, media.modality, size, media.duration_s or None, num_tokens, expires)
        return msgspec.json.encode(shown)


def _query(scope: Scope, allowed: tuple[str, ...]) -> Mapping[str, str]:
    """Return the parameters of the query. Raises InvalidRequest for others than those allowed."""
    try:
        pairs = parse_qsl(
            scope["query_string"].decode("latin-1"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_QUERY_FIELDS,
        )
    except ValueError as error:  # UnicodeDecodeError is one
        raise InvalidRequest("the query is not valid, or has too many parameters") from error
    fields = dict(pairs)
    for name in fields:
        if name not in allowed:
            known = " and ".join(allowed) or "none"
            raise InvalidRequest(f"unknown parameter; supported here: {known}", param=name[:64])
    return fields


def _ttl(fields: Mapping[str, str]) -> float | None:
    if (text := fields.get("ttl")) is None:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise InvalidRequest("ttl must be a number of seconds", param="ttl") from error


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _modality(content_type: bytes) -> Modality | None:
    """Return the modality of a media type; None for any other type, as that of clients which send none."""
    kind = content_type.partition(b"/")[0].strip().lower()
    return next((modality for modality in MODALITIES if modality.encode() == kind), None)
