"""Keys: equal for equal things, different for everything else."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medialane.types.hashing import canonical_options, content_hash, digest, feature_key, merged_options

BASE = {"processor": "p", "content": "c", "io": b"{}", "options": b"{}", "salt": ""}


def test_content_hash_is_blake3_in_hex():
    assert content_hash(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert content_hash(bytearray(b"abc")) == content_hash(memoryview(b"abc")) == content_hash(b"abc")


def test_every_component_affects_the_feature_key():
    changed = [BASE, {**BASE, "processor": "q"}, {**BASE, "content": "d"}, {**BASE, "salt": "s"}]
    changed += [{**BASE, "options": b'{"a":1}'}, {**BASE, "io": b'{"a":1}'}]
    keys = [feature_key(**parts) for parts in changed]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)
    assert feature_key(**BASE) == keys[0]


@given(st.lists(st.text("ab{}", max_size=4), min_size=5, max_size=5, unique=True))
def test_feature_key_components_cannot_be_confused(parts):
    keys = {
        feature_key(processor=a, content=b, io=c.encode(), options=d.encode(), salt=e)
        for a, b, c, d, e in itertools.permutations(parts)
    }
    assert len(keys) == 120


@pytest.mark.parametrize(
    ("request_", "item", "merged"),
    [
        (b"{}", b"{}", b"{}"),
        (b'{"b":1}', b"{}", b'{"b":1}'),
        (b"{}", b'{"b":1}', b'{"b":1}'),
        (b'{"b":1,"c":2}', b'{"a":3,"b":4}', b'{"a":3,"b":4,"c":2}'),
        (b'{"size":{"x":1}}', b'{"size":{"y":2}}', b'{"size":{"y":2}}'),
    ],
)
def test_item_options_override_key_by_key(request_, item, merged):
    assert merged_options(request_, item) == merged


def test_options_do_not_depend_on_key_order():
    assert canonical_options({"b": 1, "a": {"d": 2, "c": 3}}) == canonical_options({"a": {"c": 3, "d": 2}, "b": 1})
    assert canonical_options({"a": [1, 2]}) != canonical_options({"a": [2, 1]})
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})


def test_non_json_option_raises():
    with pytest.raises(TypeError):
        canonical_options({"a": object()})
