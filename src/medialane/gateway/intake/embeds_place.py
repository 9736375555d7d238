"""Embeddings in place of media (`image_embeds` and the like).

vLLM's app takes them for no media that its connector fetches: it hands on their uuid, so that is where the reference
stands.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from medialane.core.errors import MedialaneError
from medialane.core.media import Alias, MediaRef, Modality
from medialane.gateway.intake.edits import Edit, reference
from medialane.gateway.intake.request_body import ABSENT, QUOTE, first_byte
from medialane.gateway.intake.skeleton import Skeleton
from medialane.media import MediaConfig
from medialane.media.embeds import MAX_FIELDS, read_embeds


class EmbedsPlace(msgspec.Struct, frozen=True, gc=False):
    """`value` is what the part has as embeddings: one field without a name, or an object of `fields`.

    `uuid_value` is whatever it has as uuid, `uuid` the string that this is.
    """

    modality: Modality
    param: str
    value: msgspec.Raw
    fields: dict[str, msgspec.Raw]
    uuid_value: msgspec.Raw
    uuid: str | None

    def extract(
        self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        try:
            # One field too many is enough to be refused: an object can have a hundred thousand.
            fields = {name: _found(skeleton, value) for name, value in islice(self.fields.items(), MAX_FIELDS + 1)}
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
        return ref, self._edits(skeleton, reference(number))

    def _edits(self, skeleton: Skeleton, reference: bytes) -> list[Edit]:
        found = skeleton.locate(self.value)
        if self.uuid_value is ABSENT:
            return [(found.start, found.end, b'null,"uuid":' + reference)]
        uuid = skeleton.locate(self.uuid_value)
        return [(found.start, found.end, b"null"), (uuid.start, uuid.end, reference)]


def _found(skeleton: Skeleton, field: msgspec.Raw) -> bytes | memoryview | msgspec.Raw:
    """Base64 as it stands in the body, and whatever else as it is."""
    return skeleton.locate(field).text() if first_byte(field) == QUOTE else field
