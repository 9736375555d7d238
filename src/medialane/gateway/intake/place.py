"""A place in a body that stands for a media item, and what becomes of it."""

from __future__ import annotations

from typing import Protocol

from medialane.core.media import MediaRef
from medialane.gateway.intake.edits import Edit
from medialane.gateway.intake.skeleton import Skeleton
from medialane.media import MediaConfig


class Place(Protocol):
    """One file for each way to give an item. `param` names the place in errors."""

    @property
    def param(self) -> str: ...

    def extract(
        self, skeleton: Skeleton, number: int, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        """The reference to the item, and the edits by which `number` stands for it in the body.

        Raises a MedialaneError that names the field.
        """
        ...
