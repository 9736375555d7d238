"""Uploads in forms: extracted with the parser of the app behind us, which sees references."""

import time
from functools import partial

import numpy as np
import pytest
from starlette.formparsers import MultiPartParser
from starlette.requests import Request

from medialane.gateway import GatewayConfig, References
from medialane.gateway.intake import extract_files as extract_files_with
from medialane.media import MediaConfig
from medialane.types.errors import (
    BodyTooLarge,
    EmptyMedia,
    InvalidRequest,
    InvalidUpload,
    TooManyMediaItems,
    UnsupportedMediaType,
)

CONFIG = MediaConfig(max_items=2, max_audio_bytes=5000)
TYPE = b'multipart/form-data; boundary="b0"'
SOUND = bytes(range(256)) * 3 + b"\r\n--b\r\n--b0x\r\n-"


def field(name, value):
    return b'--b0\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, value)


def file(name, data, filename=b"a.wav"):
    head = b'--b0\r\nContent-Disposition: form-data; name="%b"; filename="%b"\r\nContent-Type: audio/wav\r\n\r\n'
    return head % (name, filename) + data + b"\r\n"


extract_files = partial(extract_files_with, references=References("medialane:"))


def extracted(*parts, content_type=TYPE, limits=None):
    body = b"".join(parts) + b"--b0--\r\n"
    limits = limits or GatewayConfig()
    return extract_files(bytearray(body + b"rest"), content_type, CONFIG, limits, size=len(body))


async def read_by_app(body, content_type=TYPE):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", content_type)]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    form = await MultiPartParser(request.headers, request.stream()).parse()
    found = {name: value if isinstance(value, str) else await value.read() for name, value in form.multi_items()}
    await form.close()
    return found


async def test_app_gets_a_reference_instead_of_the_file():
    found = extracted(field(b"model", b"m"), file(b"file", SOUND), field(b"language", b"en"))
    (ref,) = found.refs
    assert (ref.modality, ref.param, ref.data) == ("audio", "file", SOUND)
    assert await read_by_app(found.body) == {"model": "m", "file": b"medialane:0", "language": "en"}
    assert not found.wants_report


async def test_content_that_looks_like_a_reference_is_a_file_like_any_other():
    found = extracted(file(b"one", b"medialane:1"), file(b"two", SOUND))
    assert [ref.data for ref in found.refs] == [b"medialane:1", SOUND]
    assert await read_by_app(found.body) == {"one": b"medialane:0", "two": b"medialane:1"}


@pytest.mark.parametrize("filename", [b"", b'a\\"b.wav', "é.wav".encode()])
async def test_every_file_name_is_recognised(filename):
    found = extracted(file(b"file", SOUND, filename))
    assert [ref.data for ref in found.refs] == [SOUND]


@pytest.mark.parametrize(
    ("parts", "error", "param"),
    [
        ([file(b"file", b"")], EmptyMedia, "file"),
        ([file(b"file", b"a" * 5001)], InvalidUpload, "file"),
        ([file(b"f%d" % n, b"a") for n in range(3)], TooManyMediaItems, "f2"),
        ([field(b"medialane", b'{"reprot": true}')], InvalidRequest, "medialane.reprot"),
    ],
)
def test_error_names_the_field(parts, error, param):
    with pytest.raises(error) as caught:
        extracted(*parts)
    assert caught.value.param == param


def test_form_is_bounded_without_its_files():
    limits = GatewayConfig(max_text_bytes=1000)
    assert extracted(file(b"file", b"a" * 4000), limits=limits).refs
    with pytest.raises(BodyTooLarge):
        extracted(field(b"prompt", b"a" * 1000), limits=limits)


def test_field_medialane_requests_a_report():
    assert extracted(field(b"medialane", b'{"report": true}'), file(b"file", SOUND)).wants_report


@pytest.mark.parametrize(
    ("content_type", "parts"),
    [
        (b"multipart/form-data", [file(b"file", SOUND)]),
        (TYPE, [b"no part at all"]),
        (TYPE, [b"--b0\r\nbad header\r\n\r\n", SOUND]),
        (b"multipart/form-data; boundary=" + b"b" * 1000, [file(b"file", SOUND)]),
    ],
)
def test_form_that_cannot_be_parsed_is_left_to_the_app(content_type, parts):
    found = extracted(*parts, content_type=content_type)
    assert found.body == b"".join(parts) + b"--b0--\r\n"
    assert (found.refs, bool(found.parse_error)) == ((), True)
    with pytest.raises(BodyTooLarge):
        extracted(*parts, content_type=content_type, limits=GatewayConfig(max_text_bytes=10))


def test_part_that_does_not_end_is_left_to_the_app():
    found = extract_files(file(b"file", SOUND), TYPE, CONFIG, GatewayConfig(), size=len(file(b"file", SOUND)))
    assert not found.refs


def test_large_upload_is_extracted_at_memory_speed():
    data = np.random.default_rng(0).bytes(20 << 20)
    body = file(b"file", data) + b"--b0--\r\n"
    started = time.process_time()
    found = extract_files(body, TYPE, MediaConfig(), GatewayConfig(), size=len(body))
    assert time.process_time() - started < 0.5
    assert found.refs[0].data == data


@pytest.mark.parametrize(
    ("data", "source"),
    [(b"%PDF-1.7\n", "document"), (b"\n\n%PDF-1.7", "document"), (b"GIF89a" + bytes(9), "image")],
)
def test_files_that_are_kept_are_documents_and_images(data, source):
    body = file(b"file", data) + b"--b0--\r\n"
    (ref,) = extract_files(body, TYPE, CONFIG, GatewayConfig(), size=len(body), are_kept=True).refs
    assert (ref.source, ref.data) == (source, data)


@pytest.mark.parametrize("data", [b"a \xe4 text", b"RIFF\0\0\0\0WAVEfmt \0", b"PK\3\4"])
def test_other_files_are_not_kept(data):
    body = file(b"file", data) + b"--b0--\r\n"
    with pytest.raises(UnsupportedMediaType) as raised:
        extract_files(body, TYPE, CONFIG, GatewayConfig(), size=len(body), are_kept=True)
    assert raised.value.param == "file"


async def test_salt_of_a_form_is_that_of_its_files():
    (ref,) = extracted(file(b"file", SOUND), field(b"cache_salt", b"tenant")).refs
    assert ref.salt == "tenant"


async def test_required_salt_is_named_if_a_form_has_none():
    limits = GatewayConfig(require_salt=True)
    with pytest.raises(InvalidRequest) as raised:
        extracted(file(b"file", SOUND), limits=limits)
    assert raised.value.param == "cache_salt"
    assert extracted(field(b"model", b"m"), limits=limits).refs == ()
    assert extracted(field(b"cache_salt", b"a"), file(b"file", SOUND), limits=limits).refs
