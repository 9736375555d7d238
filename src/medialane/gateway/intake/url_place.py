"""Media given by URL, either a `data:` URL or one to fetch."""

from __future__ import annotations

import msgspec

from medialane.core.errors import InvalidMediaUrl, MedialaneError
from medialane.core.media import Alias, MediaRef, Modality
from medialane.gateway.intake.edits import Edit, reference
from medialane.gateway.intake.skeleton import NOT_TEXT, Located, Skeleton
from medialane.gateway.item_options import ItemOptions, read_options
from medialane.gateway.scope import REFERENCE_SCHEME
from medialane.media import DataUrl, MediaConfig, decode_base64
from medialane.media.data_url import parse_header, read_jpeg_frames, split_data_url


class UrlPlace(msgspec.Struct, frozen=True, gc=False):
    """`string` is the URL, `options` are the members next to it."""

    modality: Modality
    param: str
    string: msgspec.Raw
    options: ItemOptions | None = None
    uuid: str | None = None

    def extract(
        self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        io, options = read_options(self.options, self.modality, self.param, config)
        alias = None if self.uuid is None else Alias(self.uuid, self.modality, io, options)
        located = skeleton.locate(self.string)
        url = data = media_type = None
        try:
            if (found := _data(located, self.modality, config.max_data_url_bytes)) is None:
                url = _url(located)
            else:
                data, media_type = found.data, found.media_type
        except MedialaneError as error:
            raise error.at(self.param) from error
        ref = MediaRef(self.modality, self.param, url, data, media_type, salt, io, options, alias)
        return ref, [(located.start, located.end, reference(number))]


def _data(located: Located, modality: Modality, max_bytes: int) -> DataUrl | None:
    """Return the media in a data: URL; None for other URLs."""
    head = located.head()
    if bytes(head[:5]).lower() != b"data:":
        return None
    header, payload = _split(located, head)
    media_type = parse_header(header)
    if modality == "video" and media_type == "video/jpeg":
        return DataUrl(media_type, read_jpeg_frames(payload, max_bytes))
    return DataUrl(media_type, decode_base64(payload, max_bytes))


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
        raise InvalidMediaUrl(f"{REFERENCE_SCHEME} URLs are reserved for the gateway")
    return url
