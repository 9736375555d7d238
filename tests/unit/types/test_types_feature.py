"""Features and placeholders check themselves, and never print bytes."""

import pytest

from medialane.types.feature import Feature, MediaPrompt, PlaceholderRange, PreparedPrompt
from medialane.types.media import MediaRef, MediaSize
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec

RANGE = ArenaRange("0" * 32, 4096, 4096, 1)


def test_placeholders_are_half_open():
    assert PlaceholderRange(3, 4).end == 7
    assert PlaceholderRange(3, 4).end == PlaceholderRange(7, 1).offset


@pytest.mark.parametrize(("offset", "length"), [(-1, 3), (0, 0), (0, -1)])
def test_empty_or_negative_placeholder_is_rejected(offset, length):
    with pytest.raises(ValueError, match="placeholder"):
        PlaceholderRange(offset, length)


def test_only_masked_tokens_take_an_embedding():
    assert PlaceholderRange(0, 4).num_embeds == 4
    assert PlaceholderRange(0, 4, b"\1\0\0\1").num_embeds == 2
    with pytest.raises(ValueError, match="is_embed"):
        PlaceholderRange(0, 4, b"\1")


def test_feature_counts_tensor_bytes_and_its_repr_omits_them():
    tensors = tuple(TensorDescriptor(TensorSpec("float32", (n,)), RANGE, 64 * n) for n in (1, 2))
    feature = Feature("image", "ab" * 32, b"secret header", tensors, MediaSize(width=1, height=1))
    assert feature.nbytes == 12
    assert "secret" not in repr(feature)
    source = MediaPrompt([1, 2], (MediaRef("image", "p", data=b"secret"),))
    assert "secret" not in repr(PreparedPrompt([1], (), (), source, None)) + repr(source)
