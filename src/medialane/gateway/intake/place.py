"""The places of media in a body, by notation: a URL, bare base64, embeddings, or only a uuid.

`extract` of a place returns the item, and the edits that replace it in the body by `reference`, a JSON string. Its
errors are MedialaneErrors that name the place, `param`.

vLLM's app does not pass embeddings, or items given only by their uuid, to its media connector but forwards their uuid:
the reference is placed in the uuid.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from medialane.gateway.intake.item_options import ItemOptions, read_options
from medialane.gateway.intake.request_body import ABSENT, QUOTE, first_byte
from medialane.gateway.intake.skeleton import NOT_TEXT, Edit, Located, Skeleton
from medialane.gateway.references import REFERENCE_SCHEME
from medialane.media import MediaConfig, decode_base64
from medialane.media.data_url import parse_header, read_jpeg_frames, split_data_url
from medialane.media.embeds import MAX_FIELDS, read_embeds
from medialane.media.published_image import MAX_URL_BYTES, RDMA_TYPE, check_published
from medialane.types.errors import InvalidMediaUrl, MedialaneError, MediaTooLarge
from medialane.types.media import Alias, MediaRef, Modality
from medialane.types.media_lease import MEDIA_SCHEME, is_leased, leased_hash


class UrlPlace(msgspec.Struct, frozen=True, gc=False):
    """`string` is the URL, `options` are the members next to it."""

    modality: Modality
    param: str
    string: msgspec.Raw
    options: ItemOptions | None = None
    uuid: str | None = None

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        io, options = read_options(self.options, self.modality, self.param, config)
        alias = None if self.uuid is None else Alias(self.uuid, self.modality, io, options)
        located = skeleton.locate(self.string)
        try:
            url, media_type, data = _read_url(located, self.modality, config)
        except MedialaneError as error:
            raise error.at(self.param) from error
        ref = MediaRef(self.modality, self.param, url, data, media_type, salt, io, options, alias)
        return ref, [(located.start, located.end, reference)]


class Base64Place(msgspec.Struct, frozen=True, gc=False):
    """`string` is base64 of media that the client declares as `media_type`, or the URL of leased ones."""

    modality: Modality
    param: str
    string: msgspec.Raw
    media_type: str
    uuid: str | None = None

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        located, url, data = skeleton.locate(self.string), None, None
        try:
            if bytes(located.raw[1 : 1 + len(REFERENCE_SCHEME)]).lower() == REFERENCE_SCHEME.encode():  # never base64
                url = _url(located)
            else:
                data = decode_base64(located.text(), config.max_data_url_bytes)
        except MedialaneError as error:
            raise error.at(self.param) from error
        alias = None if self.uuid is None else Alias(self.uuid, self.modality)
        ref = MediaRef(self.modality, self.param, url, data, self.media_type, salt, alias=alias)
        return ref, [(located.start, located.end, reference)]


class EmbedsPlace(msgspec.Struct, frozen=True, gc=False):
    """`value` is the part's embeddings: one unnamed field, or an object of `fields`.

    `uuid_value` is the raw value of the part's uuid, `uuid` its string, None if it is not a string.
    """

    modality: Modality
    param: str
    value: msgspec.Raw
    fields: dict[str, msgspec.Raw]
    uuid_value: msgspec.Raw
    uuid: str | None

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        try:
            # One field above the limit suffices for the error: an object can have a hundred thousand.
            fields = {name: _field(skeleton, value) for name, value in islice(self.fields.items(), MAX_FIELDS + 1)}
        except MedialaneError as error:
            raise error.at(self.param) from error
        ref = MediaRef(
            self.modality,
            self.param,
            data=read_embeds(fields, self.param, config.max_data_url_bytes),
            salt=salt,
            alias=None if self.uuid is None else Alias(self.uuid, f"{self.modality}_embeds"),
            is_embeds=True,
        )
        return ref, self._edits(skeleton, reference)

    def _edits(self, skeleton: Skeleton, reference: bytes) -> list[Edit]:
        value = skeleton.locate(self.value)
        if self.uuid_value is ABSENT:
            return [(value.start, value.end, b'null,"uuid":' + reference)]
        uuid = skeleton.locate(self.uuid_value)
        return [(value.start, value.end, b"null"), (uuid.start, uuid.end, reference)]


class UuidPlace(msgspec.Struct, frozen=True, gc=False):
    """`uuid` is the string in `uuid_value`; `options` are the members of the object that has no URL."""

    modality: Modality
    param: str
    uuid_value: msgspec.Raw
    uuid: str
    options: ItemOptions | None
    is_embeds: bool

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        io, options = read_options(self.options, self.modality, self.param, config)
        kind = f"{self.modality}_embeds" if self.is_embeds else self.modality
        ref = MediaRef(
            self.modality,
            self.param,
            salt=salt,
            io=io,
            options=options,
            alias=Alias(self.uuid, kind, io, options),
            is_embeds=self.is_embeds,
        )
        located = skeleton.locate(self.uuid_value)
        return ref, [(located.start, located.end, reference)]


Place = UrlPlace | Base64Place | EmbedsPlace | UuidPlace


def _read_url(
    located: Located, modality: Modality, config: MediaConfig
) -> tuple[str, None, None] | tuple[None, str | None, bytes]:
    """Return media type and bytes of a data: URL; any other URL, and that of a published image, which the store
    reads."""
    head = located.head()
    if bytes(head[:5]).lower() != b"data:":
        return _url(located), None, None
    header, payload = _split(located, head)
    media_type = parse_header(header)
    if media_type == RDMA_TYPE:
        check_published(modality, config)
        if len(payload) > MAX_URL_BYTES:
            raise MediaTooLarge(f"the description of a published image has more than {MAX_URL_BYTES} bytes")
        return _url(located), None, None
    is_frames = modality == "video" and media_type == "video/jpeg"
    return None, media_type, (read_jpeg_frames if is_frames else decode_base64)(payload, config.max_data_url_bytes)


def _split(located: Located, head: bytes | memoryview) -> tuple[bytes, memoryview]:
    """Return header and payload of a data: URL, without a copy if the payload was cut."""
    if located.payload and bytes(head).find(b",") == len(head) - 1:
        return bytes(head[:-1]), located.payload
    return split_data_url(located.text())


def _url(located: Located) -> str:
    try:
        url = str(located.text(), "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidMediaUrl(NOT_TEXT) from error
    if url[: len(REFERENCE_SCHEME)].lower() == REFERENCE_SCHEME:
        if not is_leased(url):
            raise InvalidMediaUrl(f"{REFERENCE_SCHEME} URLs are reserved for the gateway, but for {MEDIA_SCHEME}HASH")
        leased_hash(url)
    return url


def _field(skeleton: Skeleton, field: msgspec.Raw) -> bytes | memoryview | msgspec.Raw:
    """Return the text of a string (base64); any other value unchanged."""
    return skeleton.locate(field).text() if first_byte(field) == QUOTE else field
