"""Media given only by their uuid.

vLLM's app does not pass them to its media connector but forwards their uuid, so the reference is placed in the uuid.
"""

from __future__ import annotations

import msgspec

from medialane.core.media import Alias, MediaRef, Modality
from medialane.gateway.intake.edits import Edit, reference
from medialane.gateway.intake.skeleton import Skeleton
from medialane.gateway.item_options import ItemOptions, read_options
from medialane.media import MediaConfig


class UuidPlace(msgspec.Struct, frozen=True, gc=False):
    """`uuid` is the string in `uuid_value`; `options` are the members of the object that has no URL."""

    modality: Modality
    param: str
    uuid_value: msgspec.Raw
    uuid: str
    options: ItemOptions | None
    is_embeds: bool

    def extract(
        self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig
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
        return ref, [(located.start, located.end, reference(number))]
