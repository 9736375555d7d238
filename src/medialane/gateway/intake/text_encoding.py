"""Bodies in the encodings that Python's JSON parser takes, and so vLLM's app: UTF-8 with a byte order mark, UTF-16,
UTF-32. Behind us all is UTF-8."""

from __future__ import annotations

import codecs
import json

#: Decoded at a time: some milliseconds, between which other threads run.
_PIECE_BYTES = 1 << 20


def as_utf8(body: bytes | bytearray | memoryview) -> bytes | None:
    """The body in UTF-8 without a mark; None if it is that already, or not in the encoding that it seems to be in.

    Lone surrogates stay what they are, as `json.loads` leaves them.
    """
    encoding = json.detect_encoding(bytes(body[:4]))
    if encoding == "utf-8":
        return None
    if encoding == "utf-8-sig":
        return bytes(body[len(codecs.BOM_UTF8) :])
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    view = memoryview(body)
    parts = []
    try:
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            parts.append(decoder.decode(piece, final=start + _PIECE_BYTES >= len(view)).encode(errors="surrogatepass"))
    except UnicodeDecodeError:
        return None
    return b"".join(parts)
