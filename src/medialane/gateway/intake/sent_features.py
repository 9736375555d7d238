"""The processed items of a prompt of token ids (`features` of vLLM's generate endpoint), replaced by references.

For each item a client gives its tensors as vLLM encodes them, a reference to a feature (`medialane:feature/HASH`), or
only its hash. Whatever it is, vLLM's app gets a reference of ours instead, so that it parses no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec

from medialane.gateway.intake.places import FEATURE_SCHEME, REFERENCE_SCHEME, References
from medialane.gateway.intake.search import RequestBody
from medialane.gateway.intake.skeleton import ABSENT, NULL, QUOTE, UNREADABLE, Edit, Skeleton, first_byte
from medialane.media import MediaConfig, decode_base64
from medialane.types.errors import InvalidRequest, MedialaneError, TooManyMediaItems, UnknownMedia
from medialane.types.media import MODALITIES, MediaRef, Modality

#: vLLM's own name of the images of some models (Kimi-K2.5).
_MODALITIES: dict[str, Modality] = {**{name: name for name in MODALITIES}, "vision_chunk": "image"}

#: Digits of a hash; vLLM's and ours have 64.
_MAX_HASH_CHARS = 256

_NAME = "features"


class _Features(msgspec.Struct):
    """vLLM's `MultiModalFeatures`. `mm_metadata` repeats fields of the tensors, or describes embeddings of another
    host's encoder, which are not supported: it is not read."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[msgspec.Raw]]
    kwargs_data: dict[str, list[msgspec.Raw]] | None = None

    def check(self) -> None:
        """Raise InvalidRequest unless all are about the same items."""
        expected = {name: len(hashes) for name, hashes in self.mm_hashes.items()}
        for name, given in (("mm_placeholders", self.mm_placeholders), ("kwargs_data", self.kwargs_data)):
            if given is not None and {modality: len(items) for modality, items in given.items()} != expected:
                raise InvalidRequest(f"{name} must have the items of mm_hashes", param=f"{_NAME}.{name}")


_decode = msgspec.json.Decoder(_Features).decode
_encode = msgspec.json.Encoder().encode


class SentItem(msgspec.Struct, frozen=True, gc=False):
    """One item: its hash, and the string that the client sent for it, ABSENT if there is none."""

    modality: Modality
    param: str
    mm_hash: str
    string: msgspec.Raw

    def extract(self, skeleton: Skeleton, *, salt: str, config: MediaConfig) -> MediaRef:
        """Raises MedialaneError, which names the item."""
        try:
            content, data = self._read(skeleton, config)
        except MedialaneError as error:
            raise error.at(self.param) from error
        return MediaRef(self.modality, self.param, data=data, content=content, salt=salt, is_feature=True)

    def _read(self, skeleton: Skeleton, config: MediaConfig) -> tuple[str, bytes | None]:
        if self.string is ABSENT:
            return self._checked(self.mm_hash), None
        located = skeleton.locate(self.string)
        if bytes(located.head()[: len(REFERENCE_SCHEME)]) != REFERENCE_SCHEME.encode():
            return self._checked(self.mm_hash), decode_base64(located.text(), config.max_body_bytes)
        if len(located.raw) > _MAX_HASH_CHARS:
            raise UnknownMedia("this is no reference to a feature")
        text = str(located.text(), "utf-8", "replace")
        if not text.startswith(FEATURE_SCHEME):
            raise InvalidRequest(f"a reference to a feature has the form {FEATURE_SCHEME}HASH")
        return text.removeprefix(FEATURE_SCHEME), None

    @staticmethod
    def _checked(mm_hash: str) -> str:
        if not 0 < len(mm_hash) <= _MAX_HASH_CHARS:
            raise InvalidRequest(f"a hash has between 1 and {_MAX_HASH_CHARS} characters")
        return mm_hash


class SentFeatures(msgspec.Struct, frozen=True, gc=False):
    """`value` is the member of the body, `items` are its items, by vLLM's name of their modality."""

    value: msgspec.Raw
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[msgspec.Raw]]
    items: dict[str, list[SentItem]]

    @property
    def in_order(self) -> list[SentItem]:
        return list(chain.from_iterable(self.items.values()))

    def edit(self, skeleton: Skeleton, references: References, first: int) -> Edit:
        """Return the edit that gives vLLM's app the features with references instead of data, from number `first`."""
        numbers = iter(range(first, first + len(self.in_order)))
        shortened = {
            "mm_hashes": self.mm_hashes,
            "mm_placeholders": self.mm_placeholders,
            "kwargs_data": {
                name: [references.text(next(numbers)) for _ in items] for name, items in self.items.items()
            },
        }
        located = skeleton.locate(self.value)
        return located.start, located.end, _encode(shortened) if self.in_order else b"null"


def sent_features(body: RequestBody, config: MediaConfig) -> SentFeatures | None:
    """Return the processed items of a prompt of token ids, None if it has none. Raises InvalidRequest,
    TooManyMediaItems."""
    if body.token_ids is ABSENT or body.features in (ABSENT, NULL):
        return None
    try:
        features = _decode(body.features)
        features.check()
        items = {name: list(_items(name, features)) for name in features.mm_hashes}
    except UNREADABLE as error:
        message = "features must have mm_hashes and mm_placeholders, and kwargs_data for the same items or none"
        raise InvalidRequest(message, param=_NAME) from error
    sent = SentFeatures(body.features, features.mm_hashes, features.mm_placeholders, items)
    if len(sent.in_order) > config.max_items:
        message = f"the request has {len(sent.in_order)} media items, more than {config.max_items}"
        raise TooManyMediaItems(message, param=sent.in_order[config.max_items].param)
    return sent


def _items(name: str, features: _Features) -> Iterator[SentItem]:
    """Raises InvalidRequest."""
    if (modality := _MODALITIES.get(name)) is None:
        raise InvalidRequest("this modality is not supported", param=f"{_NAME}.mm_hashes.{name[:64]}")
    hashes = features.mm_hashes[name]
    given = [NULL] * len(hashes) if features.kwargs_data is None else features.kwargs_data[name]
    field = "mm_hashes" if features.kwargs_data is None else "kwargs_data"
    for number, (mm_hash, value) in enumerate(zip(hashes, given, strict=True)):
        param = f"{_NAME}.{field}.{name}[{number}]"
        if value != NULL and first_byte(value) != QUOTE:
            raise InvalidRequest("an item is base64 of its tensors, a reference, or null", param=param)
        yield SentItem(modality, param, mm_hash, ABSENT if value == NULL else value)


def placeholder_field(ref: MediaRef) -> str:
    """Return the field of the placeholder of an item."""
    return f"{_NAME}.mm_placeholders.{ref.param.rpartition('.')[2]}"
