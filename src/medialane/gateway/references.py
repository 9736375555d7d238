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

from medialane.core.media import MediaRef

#: Scheme of all references. Clients must not use it.
REFERENCE_SCHEME = "medialane:"

_NUM_RANDOM_BYTES = 9

#: Most characters of a client's URL in a message.
_MAX_QUOTED_CHARS = 80

#: Precedes the values in pydantic's messages.
_ABRIDGED = b"input_value="

#: Shorter starts of a reference say nothing.
_MIN_FRAGMENT = 3


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

    def quoting_client(self, document: bytes, refs: Sequence[MediaRef]) -> bytes:
        """Return a JSON document with the references in its strings replaced by the start of what the client sent."""
        if _ABRIDGED in document:
            document = re.sub(self._fragments(), b"...", document)
        if self.prefix.encode() not in document:
            return document

        def quote(found: re.Match[bytes]) -> bytes:
            number = int(found[1])
            return json.dumps(_quoted(refs[number]))[1:-1].encode() if number < len(refs) else found[0]

        return re.sub(rb"(?:data:[\w/.+-]*;base64,)?%b(\d+)" % re.escape(self.prefix.encode()), quote, document)

    def _fragments(self) -> bytes:
        """Return the expression for what pydantic leaves of a reference where it abridges a value in its middle."""
        ends = [(self.prefix[:n], self.prefix[n:]) for n in range(_MIN_FRAGMENT, len(self.prefix) - 1)]
        heads = "|".join(re.escape(head) for head, _ in reversed(ends))
        tails = "|".join(re.escape(tail) for _, tail in ends)
        return rf"(?:{heads})\.\.\.|\.\.\.(?:{tails})\d+".encode()


def _quoted(ref: MediaRef) -> str:
    if ref.alias is not None and (ref.is_alias or ref.is_embeds):  # their reference is in the uuid
        text = ref.alias.uuid
    elif ref.data is None:
        text = ref.url or ""
    else:
        text = f"data:{ref.media_type or ''};base64,{b64encode(ref.data[:_MAX_QUOTED_CHARS]).decode()}"
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
