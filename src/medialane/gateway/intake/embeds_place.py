"""Embeddings in place of media (`image_embeds` and the like).

vLLM's app takes them for no media that its connector fetches: it hands on their uuid, so that is where the reference
stands.
"""

from __future__ import annotations

import msgspec

from medialane.core.embeds import UNNAMED
from medialane.core.media import Alias, MediaRef, Modality
from medialane.gateway.intake.edits import Edit, reference
from medialane.gateway.intake.request_body import ABSENT, QUOTE, decode_members, first_byte, string_or_none
from medialane.gateway.intake.skeleton import Skeleton
from medialane.media import MediaConfig
from medialane.media.embeds import read_embeds


class EmbedsPlace(msgspec.Struct, frozen=True, gc=False):
    """`value` is a string, or an object of them; `uuid` is whatever the part has under that name."""

    modality: Modality
    param: str
    value: msgspec.Raw
    uuid: msgspec.Raw

    def lift(self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig) -> tuple[MediaRef, list[Edit]]:
        uuid = string_or_none(self.uuid)
        ref = MediaRef(
            self.modality,
            self.param,
            data=read_embeds(self._fields(skeleton), self.param, config.max_data_url_bytes),
            salt=salt,
            alias=None if uuid is None else Alias(uuid, f"{self.modality}_embeds"),
            is_embeds=True,
        )
        return ref, self._edits(skeleton, reference(number))

    def _fields(self, skeleton: Skeleton) -> dict[str, bytes | memoryview | msgspec.Raw]:
        """The fields of embeddings: base64 as it stands in the body, and whatever else as it is."""
        if first_byte(self.value) == QUOTE:
            return {UNNAMED: skeleton.locate(self.value).text()}
        members = decode_members(self.value).items()
        return {name: skeleton.locate(raw).text() if first_byte(raw) == QUOTE else raw for name, raw in members}

    def _edits(self, skeleton: Skeleton, reference: bytes) -> list[Edit]:
        found = skeleton.locate(self.value)
        if self.uuid is ABSENT:
            return [(found.start, found.end, b'null,"uuid":' + reference)]
        uuid = skeleton.locate(self.uuid)
        return [(found.start, found.end, b"null"), (uuid.start, uuid.end, reference)]
