"""`lift`, the story of a body: cut, parsed, its places found, each taken out."""

from __future__ import annotations

import msgspec

from medialane.core.errors import InvalidBody, TooManyMediaItems
from medialane.core.media import MediaRef
from medialane.gateway.intake.edits import Edit, edited
from medialane.gateway.intake.own_member import member_range, wants_report
from medialane.gateway.intake.places import media_places
from medialane.gateway.intake.request_body import ABSENT, UNREADABLE, check_num_parts, decode_body, string_or_none
from medialane.gateway.intake.skeleton import Skeleton
from medialane.media import MediaConfig

#: Parsed values take fifty times the memory of their text: a body of 60 MB can be 20 million of them. Text has commas,
#: too, but not so many.
_MAX_COMMAS = 1_000_000


class Intake(msgspec.Struct, frozen=True):
    """A body without its media. `refs[n]` is what stands as `medialane:<n>` in `body`; they share `cache_salt`.

    Where the client sends bare base64 (`input_audio`, an Anthropic image), the reference stands in its place, and
    vLLM's app makes a data: URL of it: `data:audio/<format>;base64,medialane:<n>`. `report` is whether the client
    asks what was used of the media.
    """

    body: bytes
    refs: tuple[MediaRef, ...] = ()
    cache_salt: str | None = None
    report: bool = False

    def __repr__(self) -> str:
        return f"Intake({len(self.body)} bytes, {self.refs})"


def lift(body: bytes | bytearray, config: MediaConfig) -> Intake:
    """Take the media out of a request body (chat completions, batches of them, responses, Anthropic's messages).

    Raises TooManyMediaItems, InvalidMediaUrl (one in our own scheme), InvalidDataUrl, InvalidBase64, MediaTooLarge,
    EmptyMedia, InvalidEmbeds, InvalidRequest (an option of an item, or of our own); each names the field. And
    InvalidBody, for one that is made of so many small values that parsing it would hold up everyone.
    """
    skeleton = Skeleton(body)
    num_commas = skeleton.data.count(b",")
    if num_commas > _MAX_COMMAS:
        raise InvalidBody(f"the request has more than {_MAX_COMMAS} values")
    try:
        parsed = decode_body(skeleton.data)
        check_num_parts(parsed, num_commas)
        places = media_places(parsed)
        cache_salt = string_or_none(parsed.cache_salt)
    except UNREADABLE:
        return Intake(bytes(body))
    if len(places) > config.max_items:
        message = f"the request has {len(places)} media items, more than {config.max_items}"
        raise TooManyMediaItems(message, param=places[config.max_items].param)
    report = wants_report(parsed.medialane)
    refs: list[MediaRef] = []
    edits: list[Edit] = []
    for place in places:
        ref, made = place.lift(skeleton, len(refs), salt=cache_salt or "", config=config)
        refs.append(ref)
        edits += made
    if parsed.medialane is not ABSENT:
        edits.append((*member_range(body, skeleton.locate(parsed.medialane)), b""))
    return Intake(edited(body, edits), tuple(refs), cache_salt, report)
