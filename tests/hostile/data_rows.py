"""Rows 36 to 41: bodies and data: URLs."""

# ruff: noqa: RUF001 - look-alike letters are the attack

from __future__ import annotations

import base64

from corpus import Row, World, at, chat, data_url, media_part
from media_files import picture

_INVALID = {
    "36 without a comma": "data:image/jpeg;base64",
    "36 without base64": "data:image/jpeg,abcd",
    "36 nothing": "data:",
    "39 media type of 5 MB": "data:image/" + "x" * 5_000_000 + ";base64,AAAA",
    "+ 100 000 parameters": "data:image/jpeg" + ";a=b" * 100_000 + ";base64,AAAA",
    "+ base64 is not last": "data:image/jpeg;base64;charset=x,AAAA",
    "+ base64 with a value": "data:image/jpeg;base64=1,AAAA",
}

#: The bytes decide, as in vLLM.
_ODD_TYPES = (
    "image", "image/*", "*/*", "//image/jpeg", " image/jpeg", "image/jpeg\r\n", "imäge/jpeg", "text/html",
    "application/octet-stream", "image/jpeg;;",
)  # fmt: skip

_BASE64 = {
    "37 alphabet": "AA*A",
    "37 space": "AAAA AAAA",
    "37 line break": "AAAA\nAAAA",
    "37 URL-safe": "__--",
    "37 no padding": "AAAAA",
    "37 too much padding": "AAAA====",
    "37 padding inside": "AA==AAAA",
    "37 padding alone": "====",
    "+ NUL": "AAA\0",
    "+ other script": "ААAА",
    "+ escaped": "AAA%3D",
    "+ second URL": "AAAA,data:image/png;base64,AAAA",
    "+ fragment": "AAAA#x",
}


def _json_escaped(world: World) -> bytes:
    """All of the base64's slashes and pluses are escaped, in two ways."""
    body = chat(world.model, media_part(data_url(picture(4000, (400, 300)))))
    start = body.index(b"base64,")
    return body[:start] + body[start:].replace(b"/", b"\\/").replace(b"+", b"\\u002b")


_LARGE = base64.b64encode(bytes(16_000_000)).decode()

DATA_ROWS = (
    *(Row(name, at(url), 400, "invalid_data_url") for name, url in _INVALID.items()),
    *(Row(name, at("data:image/jpeg;base64," + data), 400, "invalid_base64") for name, data in _BASE64.items()),
    Row("57 nothing", at("data:image/jpeg;base64,"), 400, "empty_media"),
    Row("38 data: of 21 MB", at("data:image/png;base64," + _LARGE), 413, "media_too_large", mib=160),
    Row("40 escaped JSON", _json_escaped, 200),
    Row("40 upper case", lambda w: chat(w.model, media_part(data_url(picture(6)).replace("data:", "DATA:"))), 200),
    Row("40 parameters", lambda w: chat(w.model, media_part(data_url(picture(7), "image/jpeg;a=b"))), 200),
    *(
        Row(f"40 type {kind!r}", lambda w, kind=kind: chat(w.model, media_part(data_url(picture(6), kind))), 200)
        for kind in _ODD_TYPES
    ),
    *(Row(f"40 junk of type {kind!r}", at(f"data:{kind};base64,AAAA"), 400, "invalid_image") for kind in _ODD_TYPES),
    Row("40 no media type", lambda w: chat(w.model, media_part(data_url(picture(8), ""))), 200),
    Row("40 another media type", lambda w: chat(w.model, media_part(data_url(picture(9), "video/mp4"))), 200),
    Row(
        "41 1000 images",
        lambda w: chat(w.model, *[media_part(data_url(picture(10)))] * 1000),
        400,
        "too_many_media_items",
    ),
    Row(
        "41 17 images in 17 messages",
        lambda w: chat(w.model, *[media_part("http://{host}/good.jpg")] * 17),
        400,
        "too_many_media_items",
    ),
)

#: Bodies with a declared length; the bytes sent are zeros.
ANNOUNCED = {"38 data: of 1 GB": 1_400_000_000, "+ body over the limit by a byte": (64 << 20) + 1}
