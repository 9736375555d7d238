from base64 import b64encode

import pytest

from medialane.media import decode_base64, parse_header, split_data_url
from medialane.types.errors import EmptyMedia, InvalidBase64, InvalidDataUrl, MediaTooLarge

LIMIT = 1000


def parse(url):
    header, payload = split_data_url(url)
    return parse_header(header), decode_base64(payload, LIMIT)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_any_buffer_is_accepted(form):
    assert parse(form(b"data:image/png;base64,AAEC")) == ("image/png", b"\0\1\2")


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        ("data:image/png;base64", "image/png"),
        ("DATA:Image/SVG+xml;BASE64", "image/svg+xml"),
        ("data:;base64", None),
        ("data:image/jpeg;charset=utf-8;base64", "image/jpeg"),
        ("data:image;base64", None),
        ("data:image/*;base64", None),
        ("data: image/png ; base64", None),
        ("data:imag\u00e9/png;base64", None),
        ("data:image/png;;base64", "image/png"),
    ],
)
def test_media_type(head, media_type):
    assert parse(f"{head},AAEC".encode())[0] == media_type


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png,AAEC",
        "data:image/png;base64;charset=x,AAEC",
        "data:image/png;base64x,AAEC",
        "data:image/png;" + "x" * 5000 + ";base64,AAEC",
        "data:base64,AAEC",
        "base64,AAEC",
        "http://a/b;base64,AAEC",
        "",
    ],
    ids=lambda url: url[:40],
)
def test_other_data_url_forms_are_invalid(url):
    with pytest.raises(InvalidDataUrl):
        parse(url.encode())


@pytest.mark.parametrize("payload", ["A", "AA", "AAA", "AA=A", "A===", "AA==AA==", "AA AA", "AAAA\n", "_-_-", "AAA%"])
def test_non_strict_base64_is_invalid(payload):
    with pytest.raises(InvalidBase64) as raised:
        decode_base64(payload.encode(), LIMIT)
    assert payload not in raised.value.message


def test_limit_applies_to_encoded_bytes():
    assert len(decode_base64(b64encode(bytes(750)), LIMIT)) == 750
    with pytest.raises(MediaTooLarge):
        decode_base64(b64encode(bytes(751)), LIMIT)


def test_size_is_checked_first():
    with pytest.raises(MediaTooLarge):
        decode_base64(b"?" * 2000, LIMIT)


def test_empty_input_is_empty_media():
    with pytest.raises(EmptyMedia):
        parse(b"data:image/png;base64,")
