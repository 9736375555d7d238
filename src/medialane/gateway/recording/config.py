"""Settings of the recording of traffic."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.setting import PositiveFloat, PositiveInt, check_bounds

Redaction = Literal["none", "tenants", "text", "all"]


class RecordingConfig(msgspec.Struct, frozen=True, kw_only=True):
    file: str = field(default="", name="record")
    """append the requests that have ended to this file, for `medialane compare`; FILE.key has the key of its hashes"""
    share: PositiveFloat = field(default=1.0, name="record-share")
    """part of the conversations that is recorded, such as 0.01: whole conversations, so that what they have in common
    is found in caches as before"""
    media: Literal["hash", "whole"] = field(default="hash", name="record-media")
    """hash: of media only a keyed hash and the size, from which `medialane compare` makes others of the same size;
    whole: the media of bodies and the URLs of others, but for URLs with a query or a password, which may be secrets"""
    redact: Redaction = field(default="none", name="record-redact")
    """what is replaced: names of tenants, text and tool arguments (by words of the same length, equal beginnings by
    equal ones), or all of these"""
    max_bytes: PositiveInt = field(default=1 << 30, name="record-max-bytes")
    """size of the file at which recording ends"""

    @property
    def redacts_text(self) -> bool:
        return self.redact in ("text", "all")

    @property
    def redacts_tenants(self) -> bool:
        return self.redact in ("tenants", "all")

    def validate(self) -> None:
        check_bounds(self)
        if self.share > 1:
            raise StartupFailed("share must be at most 1")
