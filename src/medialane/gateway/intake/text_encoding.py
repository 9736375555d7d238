"""Bodies in the other encodings that Python's JSON parser, and so vLLM's app, accepts: UTF-8 with a byte order mark,
UTF-16, UTF-32. They are converted to UTF-8."""

from __future__ import annotations

import codecs
import json

#: Bytes decoded at a time, a few milliseconds, so that other threads get the GIL in between.
_PIECE_BYTES = 1 << 20


def as_utf8(body: bytes | bytearray | memoryview) -> bytes | None:
    """Return the body in UTF-8 without a byte order mark; None if it is UTF-8 already or invalid in its encoding.

    Lone surrogates are preserved, like in `json.loads`.
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
