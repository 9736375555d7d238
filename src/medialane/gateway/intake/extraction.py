"""`extract`: cut, count, parse and locate the media of a request body, and replace them by references."""

from __future__ import annotations

from itertools import chain

import msgspec

from medialane.gateway.config import GatewayConfig
from medialane.gateway.intake.json_scan import REPLACED_SURROGATES, check_num_values, make_strict_json, scan_json
from medialane.gateway.intake.place import Place
from medialane.gateway.intake.request_body import (
    ABSENT,
    NULL,
    UNREADABLE,
    check_num_parts,
    check_num_prompts,
    check_num_tools,
    decode_body,
    decode_members,
    priority_of,
    string_or_none,
)
from medialane.gateway.intake.search import media_places
from medialane.gateway.intake.sent_features import sent_features
from medialane.gateway.intake.skeleton import Buffer, Edit, Located, Skeleton, apply_edits, as_utf8
from medialane.gateway.references import References
from medialane.media import MediaConfig
from medialane.types.errors import InvalidMediaUrl, InvalidRequest, TooManyMediaItems
from medialane.types.media import MediaRef

_DEFAULTS = GatewayConfig()

_decode_bool = msgspec.json.Decoder(bool).decode

_NOT_UNICODE = "has a lone surrogate, which is not valid Unicode"


class Intake(msgspec.Struct, frozen=True):
    """A body without its media. Reference n in `body` stands for `refs[n]`; all refs have the salt `cache_salt`.

    `report` is whether the client requests a report on its media; `priority`, `model` and `stream` are vLLM's fields.
    `has_id` is whether the client names the request by vLLM's `request_id`.
    `parse_error` is why the body could not be parsed for media, None if it was.
    """

    body: bytes
    refs: tuple[MediaRef, ...] = ()
    cache_salt: str | None = None
    report: bool = False
    parse_error: str | None = None
    priority: int = 0
    model: str | None = None
    stream: bool = False
    has_id: bool = False

    def __repr__(self) -> str:
        return f"Intake({len(self.body)} bytes, {self.refs})"

    @property
    def num_bytes(self) -> int:
        """Bytes held: the body and the media that were inside it."""
        return len(self.body) + sum(len(ref.data) for ref in self.refs if ref.data is not None)


def extract(
    body: Buffer,
    config: MediaConfig,
    limits: GatewayConfig = _DEFAULTS,
    *,
    references: References,
    size: int | None = None,
) -> Intake:
    """Extract the media of a request body (chat completions, batches of them, responses, Anthropic's messages), and
    write `references` instead.

    The body is the first `size` bytes of `body`, by default all of them.

    Raises TooManyMediaItems, InvalidMediaUrl (a URL in our own scheme), InvalidDataUrl, InvalidBase64, MediaTooLarge,
    EmptyMedia, InvalidEmbeds, InvalidRequest (an option of an item, the member `medialane`, or no `cache_salt` although
    it is required); each names the field.
    Raises InvalidBody for a body with so many levels or values that parsing it would block the event loop, and
    BodyTooLarge for one that is too large without its media.
    """
    size = len(body) if size is None else size
    if (converted := as_utf8(memoryview(body)[:size])) is not None:
        body, size = converted, len(converted)
    skeleton = Skeleton(body, size)
    scan = scan_json(skeleton.data)
    scan.check(limits)
    if not scan.is_strict:
        make_strict_json(skeleton.data)
    try:
        parsed = decode_body(skeleton.data)
        check_num_values(parsed, scan.num_values, limits)
        check_num_parts(parsed, scan.num_values, limits.max_messages)
        check_num_tools(parsed, limits.max_tools)
        check_num_prompts(parsed, scan.num_values, limits.max_prompts)
        by_prompt = media_places(parsed)
        features = sent_features(parsed, config)
        cache_salt, model = string_or_none(parsed.cache_salt), string_or_none(parsed.model)
    except UNREADABLE as error:
        return Intake(apply_edits(skeleton.body, [], limits.max_text_bytes), parse_error=str(error))
    _check_num_items(by_prompt, config)
    report = wants_report(parsed.medialane)
    refs: list[MediaRef] = []
    edits: list[Edit] = []
    for place in chain.from_iterable(by_prompt):
        reference = f'"{references.text(len(refs))}"'.encode()
        ref, made = place.extract(skeleton, reference, salt=cache_salt or "", config=config)
        refs.append(ref)
        edits += made
    if features is not None:
        edits.append(features.edit(skeleton, references, len(refs)))
        refs += [item.extract(skeleton, salt=cache_salt or "", config=config) for item in features.in_order]
    if refs:
        check_salt(cache_salt, limits)
    if not scan.is_strict:
        _check_unicode(refs, cache_salt)
    if parsed.medialane is not ABSENT:
        edits.append((*_member_range(body, skeleton.locate(parsed.medialane)), b""))
    edited = apply_edits(skeleton.body, edits, limits.max_text_bytes)
    return Intake(
        edited,
        tuple(refs),
        cache_salt,
        report,
        priority=priority_of(parsed.priority),
        model=model,
        stream=bytes(parsed.stream) == b"true",
        has_id=parsed.request_id not in (ABSENT, NULL),
    )


def _check_num_items(by_prompt: list[list[Place]], config: MediaConfig) -> None:
    places = list(chain.from_iterable(by_prompt))
    if len(places) > config.max_batch_items:
        message = f"the request has {len(places)} media items, more than {config.max_batch_items}"
        raise TooManyMediaItems(message, param=places[config.max_batch_items].param)
    for prompt in by_prompt:
        if len(prompt) > config.max_items:
            message = f"the request has {len(prompt)} media items, more than {config.max_items}"
            raise TooManyMediaItems(message, param=prompt[config.max_items].param)


def check_salt(cache_salt: str | None, limits: GatewayConfig) -> None:
    """Raise InvalidRequest if a request with media must have a salt, and has none."""
    if limits.require_salt and not cache_salt:
        message = "this server needs a cache_salt in requests with media: a string that only this user's requests have"
        raise InvalidRequest(message, param="cache_salt")


def _check_unicode(refs: list[MediaRef], cache_salt: str | None) -> None:
    """Raise for a lone surrogate in strings that we interpret: strings that differ only in those would be equal."""
    if cache_salt is not None and REPLACED_SURROGATES.search(cache_salt):
        raise InvalidRequest(f"cache_salt {_NOT_UNICODE}", param="cache_salt")
    for ref in refs:
        if ref.url is not None and REPLACED_SURROGATES.search(ref.url):
            raise InvalidMediaUrl(f"the media URL {_NOT_UNICODE}", param=ref.param)
        if ref.alias is not None and REPLACED_SURROGATES.search(ref.alias.uuid):
            raise InvalidRequest(f"the uuid {_NOT_UNICODE}", param=ref.param)


def wants_report(own: msgspec.Raw) -> bool:
    """Return whether the client requests a report by the body's member `medialane`, our extension of the API, which is
    removed before vLLM's app gets the body. Raises InvalidRequest for unknown keys and invalid values."""
    if own in (ABSENT, NULL):
        return False
    try:
        members = decode_members(own)
    except UNREADABLE as error:
        raise InvalidRequest("medialane must be an object", param="medialane") from error
    for name in members:
        if name != "report":
            raise InvalidRequest("the only supported key of medialane is report", param=f"medialane.{name[:64]}")
    try:
        return "report" in members and _decode_bool(members["report"])
    except msgspec.DecodeError as error:
        raise InvalidRequest("report must be true or false", param="medialane.report") from error


def _member_range(body: Buffer, value: Located) -> tuple[int, int]:
    """Return (start, end) of an object's member in the body, including its key and one of the commas around it."""
    start = body.rfind(b'"', 0, body.rfind(b'"', 0, body.rfind(b":", 0, value.start)))
    while body[start - 1 : start].isspace():
        start -= 1
    if body[start - 1 : start] == b",":
        return start - 1, value.end
    end = value.end
    while body[end : end + 1].isspace():
        end += 1
    return start, end + 1 if body[end : end + 1] == b"," else end
