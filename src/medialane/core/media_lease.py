"""Media that a client has sent once, to be referred to by later requests: `medialane:media/HASH`.

The hash is one of content, owner and salt: it is the same on all hosts, and says nothing about what others have sent.
It is no capability: who may use it is decided by the owner of the request that has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from blake3 import blake3

from medialane.core.errors import InvalidMediaUrl, InvalidRequest
from medialane.core.media import Modality

#: The beginning of such a URL.
MEDIA_SCHEME = "medialane:media/"

#: Beginning of the owner that is a tenant (`--keys`): its share of all leased bytes is limited.
TENANT = "tenant:"

#: As the member of bodies: the path of a request is logged, headers are not.
SALT_HEADER = b"x-cache-salt"

_HASH = re.compile(r"[0-9a-f]{64}")


class LeasedMedia(msgspec.Struct, frozen=True, array_like=True):
    """A lease, and what is known of its media: width and height of images, as they are displayed; the duration of
    others; 0 what does not apply or is not known."""

    hash: str
    modality: Modality
    media_type: str
    num_bytes: int
    remaining_s: float = 0.0
    width: int = 0
    height: int = 0
    duration_s: float = 0.0


def media_hash(*, owner: str, salt: str, content: str) -> str:
    """Return the hash by which an owner's requests refer to media, 64 hex digits."""
    return blake3(msgspec.msgpack.encode(("medialane-media-1", owner, salt, content))).hexdigest()


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


def is_leased(url: str | None) -> bool:
    """Return whether a URL that intake has accepted refers to leased media."""
    return url is not None and url.startswith(MEDIA_SCHEME)


def leased_hash(url: str) -> str:
    """Return the hash in the URL of leased media. Raises InvalidMediaUrl."""
    found = url.removeprefix(MEDIA_SCHEME)
    if not is_hash(found):
        raise InvalidMediaUrl(f"{MEDIA_SCHEME} must be followed by a hash of 64 hexadecimal digits in lower case")
    return found


def salt_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the `cache_salt` of a request without a JSON body; empty without one. Raises InvalidRequest."""
    try:
        return next((value for name, value in headers if name == SALT_HEADER), b"").decode()
    except UnicodeDecodeError as error:
        name = SALT_HEADER.decode()
        raise InvalidRequest(f"the header {name} is not valid UTF-8", param=name) from error
