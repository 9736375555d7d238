"""Media as bare base64: `input_audio`, and the source of an Anthropic image."""

from __future__ import annotations

import msgspec

from medialane.core.errors import MedialaneError
from medialane.core.media import Alias, MediaRef, Modality
from medialane.gateway.intake.edits import Edit, reference
from medialane.gateway.intake.skeleton import Skeleton
from medialane.media import MediaConfig, decode_base64


class Base64Place(msgspec.Struct, frozen=True, gc=False):
    """`string` is base64 of media that the client declares as `media_type`."""

    modality: Modality
    param: str
    string: msgspec.Raw
    media_type: str
    uuid: str | None = None

    def extract(
        self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        located = skeleton.locate(self.string)
        try:
            data = decode_base64(located.text(), config.max_data_url_bytes)
        except MedialaneError as error:
            raise error.at(self.param) from error
        alias = None if self.uuid is None else Alias(self.uuid, self.modality)
        ref = MediaRef(self.modality, self.param, data=data, media_type=self.media_type, salt=salt, alias=alias)
        return ref, [(located.start, located.end, reference(number))]
