"""The protocol of a place in a body that contains a media item."""

from __future__ import annotations

from typing import Protocol

from medialane.core.media import MediaRef
from medialane.gateway.intake.edits import Edit
from medialane.gateway.intake.skeleton import Skeleton
from medialane.media import MediaConfig


class Place(Protocol):
    """Implemented by one module per notation of an item. `param` names the place in errors."""

    @property
    def param(self) -> str: ...

    def extract(
        self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        """Return the reference to the item, and the edits that replace it by reference `number` in the body.

        Raises a MedialaneError that names the field.
        """
        ...
