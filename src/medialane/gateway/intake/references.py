"""References: the texts by which intake replaces media in a body, and back to what the client has sent.

A client cannot write a reference: it contains a random text that is chosen after the body was written, for one request.
So what a reference resolves to has been counted by intake.
"""

from __future__ import annotations

import json
import re
import secrets
from base64 import b64encode
from collections.abc import Sequence

import msgspec

from medialane.types.media import MediaRef

#: Scheme of all references. Clients must not use it as a URL.
REFERENCE_SCHEME = "medialane:"

#: By which a client names a feature, where its tensors could be.
FEATURE_SCHEME = f"{REFERENCE_SCHEME}feature/"

_NUM_RANDOM_BYTES = 9

#: Most characters of a client's URL in a message.
_MAX_QUOTED_CHARS = 80

#: Shorter beginnings of a reference may be the end of a word.
_MIN_HEAD = len("medial")


class References(msgspec.Struct, frozen=True):
    """The references of one request: `prefix`, and the item's number."""

    prefix: str

    @classmethod
    def random(cls) -> References:
        return cls(f"{REFERENCE_SCHEME}{secrets.token_urlsafe(_NUM_RANDOM_BYTES)}:")

    def text(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def number(self, text: str) -> int | None:
        """Return the item's number, None if the text is not a reference.

        If a client sends bare base64 (`input_audio`, an Anthropic image), vLLM's app builds a data: URL from its
        replacement: `data:audio/wav;base64,<reference>`.
        """
        if text.startswith("data:"):
            text = text.rpartition(";base64,")[2]
        number = text.removeprefix(self.prefix)
        return int(number) if text.startswith(self.prefix) and number.isdecimal() else None

    def quoting_client(self, document: bytes, refs: Sequence[MediaRef], *, is_error: bool) -> bytes:
        """Return a JSON document with the references in its strings replaced by the start of what the client sent; of
        an error, also without fragments of references, which elsewhere may be a model's words."""
        if is_error:
            document = re.sub(self._fragments(), b"...", document)
        if self.prefix.encode() not in document:
            return document

        def quote(match: re.Match[bytes]) -> bytes:
            number = int(match[1])
            return json.dumps(_quoted(refs[number]))[1:-1].encode() if number < len(refs) else match[0]

        return re.sub(rb"(?:data:[\w/.+-]*;base64,)?%b(\d+)" % re.escape(self.prefix.encode()), quote, document)

    def _fragments(self) -> bytes:
        """Return the expression for what pydantic leaves of a reference where it abridges a value in its middle."""
        size = len(self.prefix)
        heads = "|".join(re.escape(self.prefix[:n]) for n in range(size, _MIN_HEAD - 1, -1))
        tails = "|".join(re.escape(self.prefix[n:]) for n in range(1, size - 1))
        return rf"(?:{heads})\.\.\.(?:(?:{tails})\d+)?|\.\.\.(?:{tails})\d+".encode()


def _quoted(ref: MediaRef) -> str:
    if ref.alias is not None and (ref.is_alias or ref.is_embeds):  # their reference is in the uuid
        text = ref.alias.uuid
    elif ref.data is None:
        text = ref.content or "" if ref.is_feature else ref.url or ""
    else:
        text = f"data:{ref.media_type or ''};base64,{b64encode(ref.data[:_MAX_QUOTED_CHARS]).decode()}"
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
