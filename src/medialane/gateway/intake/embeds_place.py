"""Embeddings instead of media (`image_embeds` etc.).

vLLM's app does not pass them to its media connector but forwards their uuid, so the reference is placed in the uuid.
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
        self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig
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
        return ref, self._edits(skeleton, reference(number))

    def _edits(self, skeleton: Skeleton, reference: bytes) -> list[Edit]:
        found = skeleton.locate(self.value)
        if self.uuid_value is ABSENT:
            return [(found.start, found.end, b'null,"uuid":' + reference)]
        uuid = skeleton.locate(self.uuid_value)
        return [(found.start, found.end, b"null"), (uuid.start, uuid.end, reference)]


def _field(skeleton: Skeleton, field: msgspec.Raw) -> bytes | memoryview | msgspec.Raw:
    """Return the text of a string (base64); any other value unchanged."""
    return skeleton.locate(field).text() if first_byte(field) == QUOTE else field
