"""Tensor metadata validates itself."""

import msgspec
import pytest

from medialane.types.tensor import (
    ALIGNMENT,
    MAX_RANK,
    MAX_TENSOR_BYTES,
    ArenaRange,
    InlineTensor,
    TensorDescriptor,
    TensorSpec,
    align,
)

RANGE = ArenaRange("0" * 32, 4096, 64 + 128, 1)


@pytest.mark.parametrize(("given", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_align_rounds_up_to_cache_lines(given, expected):
    assert align(given) == expected


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("uint8", (), 1), ("float32", (3, 4), 48), ("bfloat16", (5,), 10), ("int64", (0,), 0)],
)
def test_bytes_follow_from_dtype_and_shape(dtype, shape, nbytes):
    assert TensorSpec(dtype, shape).nbytes == nbytes


def test_negative_dimension_is_rejected():
    with pytest.raises(ValueError, match="negative"):
        TensorSpec("uint8", (2, -1))


@pytest.mark.parametrize(
    "shape", [(1,) * (MAX_RANK + 1), (MAX_TENSOR_BYTES + 1,), (1 << 40, 1 << 40), (1 << 47,), (0, -1)]
)
def test_shape_that_no_tensor_has_is_rejected(shape):
    with pytest.raises(ValueError, match="shape"):
        TensorSpec("float32", shape)


def test_shape_within_the_bounds_is_accepted():
    assert TensorSpec("uint8", (1,) * MAX_RANK).nbytes == 1
    assert TensorSpec("uint8", (MAX_TENSOR_BYTES,)).nbytes == MAX_TENSOR_BYTES


@pytest.mark.parametrize("offset", [-ALIGNMENT, 1, RANGE.nbytes, 128])
def test_out_of_bounds_or_unaligned_descriptor_is_rejected(offset):
    with pytest.raises(ValueError, match="is not inside"):
        TensorDescriptor(TensorSpec("uint8", (100,)), RANGE, offset)


def test_descriptor_may_extend_to_the_end_of_its_entry():
    assert TensorDescriptor(TensorSpec("uint8", (128,)), RANGE, 64).offset == 64


def test_inline_bytes_must_match_their_shape():
    assert "4 bytes" in repr(InlineTensor(TensorSpec("uint8", (4,)), b"abcd"))
    with pytest.raises(ValueError, match="3 bytes"):
        InlineTensor(TensorSpec("uint8", (4,)), b"abc")


def test_decoded_messages_are_validated():
    encoded = msgspec.msgpack.encode({"type": "inline", "spec": {"dtype": "uint8", "shape": [4]}, "data": b"abc"})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=TensorDescriptor | InlineTensor)
    unknown = msgspec.msgpack.encode({"dtype": "complex32", "shape": [1]})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(unknown, type=TensorSpec)
