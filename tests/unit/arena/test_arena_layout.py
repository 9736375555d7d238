"""Where the tensors of an entry go."""

import pytest

from medialane.arena import ENTRY_HEADER_BYTES, describe, layout
from medialane.types.tensor import ArenaRange, TensorSpec


def entry(nbytes):
    return ArenaRange("0123456789abcdef" * 2, 4096, nbytes, 7)


def test_tensors_are_cache_line_aligned_after_the_header():
    specs = [TensorSpec("uint8", (3,)), TensorSpec("float32", (0, 4)), TensorSpec("bfloat16", (100, 2))]
    offsets, payload = layout(specs)
    assert offsets == (64, 128, 128)
    assert payload == 128 + 400 - ENTRY_HEADER_BYTES


def test_entry_without_tensors_has_no_payload():
    assert layout([]) == ((), 0)


def test_descriptors_follow_the_layout():
    specs = [TensorSpec("int64", (1, 3)), TensorSpec("uint8", (7,))]
    offsets, payload = layout(specs)
    range_ = entry(ENTRY_HEADER_BYTES + payload)
    described = describe(range_, specs)
    assert tuple(d.offset for d in described) == offsets
    assert [d.spec for d in described] == specs
    assert {d.range for d in described} == {range_}


def test_tensors_exceeding_their_entry_are_rejected():
    with pytest.raises(ValueError, match="is not inside"):
        describe(entry(128), [TensorSpec("uint8", (65,))])
