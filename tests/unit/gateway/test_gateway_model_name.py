"""Finding the model's name in bodies, whole and in pieces."""

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medialane.gateway.models import MAX_NAME_BYTES, search_of

JSON = b"application/json"
FORM = b"multipart/form-data; boundary=xyz"
IMAGE = "iVBORw0KGgo/" * 1000


def found(body, content_type=JSON, size=1 << 16):
    """The name, and how many bytes it took to find it."""
    search, fed = search_of(content_type), 0
    if search is None:
        return None, 0
    while fed < len(body) and not search.is_over:
        search.feed(body[fed : fed + size])
        fed = min(len(body), fed + size)
    return search.name, fed


def name_in(body, content_type=JSON, size=1 << 16):
    return found(body, content_type, size)[0]


def part(disposition, value):
    return b"--xyz\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (disposition, value)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "a", "messages": []}', "a"),
        (b'{"messages": [{"model": "no", "content": "\\"model\\": \\"no\\""}], "model":"a"}', "a"),
        (b' \r\n\t{"m":{"model":"no"},"model"  :\n "a" }', "a"),
        (b'\xef\xbb\xbf{"model": "a"}', "a"),
        (b'{"\\u006dodel": "\\u00e9\\ud83d\\ude00"}', "é😀"),
        ('{"model": "é"}'.encode(), "é"),
        (b'{"a": "\\\\", "model": "x\\\\"}', "x\\"),
        (b'{"a": "\\\\\\"", "model": "b\\"c"}', 'b"c'),
        (b'{"model": null, "n": "model"}', None),
        (b'{"model": 7, "x": "a"}', None),
        (b'{"model": ["a"], "x": {"model": "b"}}', None),
        (b'{"x": "model", "y": "a"}', None),
        (b'{"models": "a"}', None),
        (b'[{"model": "a"}]', None),
        (b'"model"', None),
        (b"", None),
        (b'{"model": "\\ud800"}', None),
        (b'{"model": "a', None),
        (b'{} {"model": "a"}', None),
    ],
)
def test_name_is_the_string_of_the_outermost_object(body, name, size):
    assert name_in(body, size=size) == name


def test_nothing_is_read_after_the_name():
    body = json.dumps({"model": "a", "messages": IMAGE * 100}).encode()
    assert found(body, size=1000) == ("a", 1000)


def test_first_of_several_names_counts():
    assert name_in(b'{"model": "a", "model": "b"}') == "a"


@pytest.mark.parametrize("length", [MAX_NAME_BYTES, MAX_NAME_BYTES + 1])
def test_name_that_is_too_long_is_not_found(length):
    name = "n" * length
    expected = name if length <= MAX_NAME_BYTES else None
    assert name_in(json.dumps({"model": name}).encode(), size=1000) == expected
    assert name_in(part(b'name="model"', name.encode()) + b"--xyz--\r\n", FORM, size=1000) == expected


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["model", "a", '"\\']), inner),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first body takes seconds on a loaded machine
@given(
    body=st.dictionaries(st.sampled_from(["model", "b", "messages", '\\"', "ключ"]), _VALUES),
    size=st.integers(1, 40),
    escapes=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_name_is_what_a_parser_finds(body, size, escapes, indent):
    text = json.dumps(body, ensure_ascii=escapes, indent=indent).encode()
    name = body.get("model")
    assert name_in(text, size=size) == (name if isinstance(name, str) else None)


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_read_to_their_end(body, size):
    for content_type in (JSON, FORM, b"multipart/form-data"):
        name = name_in(body, content_type, size)
        assert name is None or isinstance(name, str)


LETTER = '"a'
MANY = {
    "escaped quotes": {"m": LETTER * 200_000},
    "objects": {"m": [{"a": "b"}] * 40_000},
    "token ids": {"m": [[number] for number in range(60_000)]},
    "members": {str(number): number for number in range(60_000)},
    "small values": {str(number): [] for number in range(2000)} | {"m": [{"a": "b"}] * 40_000},
    "backslashes": {"m": "\\" * 300_000},
}


@pytest.mark.parametrize("kind", MANY)
def test_no_body_keeps_the_event_loop_busy(kind):
    body, size, search, longest = json.dumps(MANY[kind]).encode(), 1 << 16, search_of(JSON), 0.0
    for at in range(0, len(body), size):
        began = time.process_time()
        search.feed(body[at : at + size])
        longest = max(longest, time.process_time() - began)
    assert longest < 0.05  # 2 ms, but for the interruptions of a busy machine


def test_name_after_very_many_members_is_not_found():
    assert name_in(json.dumps({**MANY["members"], "model": "a"}).encode()) is None
    parts = b"".join(part(b'name="a"', b"b") for _ in range(2000))
    assert name_in(parts + part(b'name="model"', b"a") + b"--xyz--\r\n", FORM) is None


@pytest.mark.parametrize("size", [1, 10, 1 << 16])
def test_name_in_a_form_is_that_of_its_field(size):
    file = part(b'name="file"; filename="model"', b'{"model": "no"}\r\n' * 100)
    trap = part(b'name="model"; filename="a.txt"', b"no")
    body = file + trap + part(b'name="model"', b"whisper") + part(b'name="model"', b"no") + b"--xyz--\r\n"
    assert name_in(body, FORM, size) == "whisper"
    assert name_in(file + b"--xyz--\r\n", FORM, size) is None


@pytest.mark.parametrize("boundary", [b"", b"b" * 257, b"boundary=" * 1000, b'"' * 60_000])
def test_form_whose_boundary_no_parser_takes_has_no_name(boundary):
    if (search := search_of(b"multipart/form-data; boundary=" + boundary)) is not None:
        search.feed(b"--b\r\n\r\n")
        assert search.name is None
