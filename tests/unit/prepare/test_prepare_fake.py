import numpy as np
import pytest

from medialane.prepare import Assembler, Processor
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN, FakeAssembler, build_processor, num_placeholder_tokens
from medialane.types.errors import PromptRejected
from medialane.types.feature import Feature
from medialane.types.media import Image, MediaSize

PROCESSOR: Processor = build_processor(b"")
ASSEMBLER: Assembler = FakeAssembler()


def feature(width: int, height: int) -> Feature:
    return Feature("image", "a" * 64, b"", (), MediaSize(width, height))


def test_same_pixels_and_options_give_the_same_bytes():
    image = Image(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    first, second = (PROCESSOR.process(image, b'{"scale": 2}') for _ in range(2))
    assert [bytes(b) for b in first.buffers] == [bytes(b) for b in second.buffers]
    assert [spec.nbytes for spec in first.specs] == [b.nbytes for b in first.buffers]
    assert first.size == MediaSize(5, 4)


def test_placeholders_follow_the_sizes_in_order():
    assembled = ASSEMBLER.assemble(
        [1, PLACEHOLDER_TOKEN, 2, PLACEHOLDER_TOKEN], (feature(28, 28), feature(29, 56)), b"{}"
    )
    assert [(p.offset, p.length) for p in assembled.placeholders] == [(1, 1), (3, 4)]
    assert len(assembled.token_ids) == 2 + 1 + 4


def test_prompt_without_features_is_unchanged():
    assert ASSEMBLER.assemble([1, 2], (), b"{}").token_ids == [1, 2]


def test_wrong_number_of_placeholders_is_rejected():
    with pytest.raises(PromptRejected):
        ASSEMBLER.assemble([1], (feature(28, 28),), b"{}")


def test_partial_patch_counts_as_a_token():
    assert num_placeholder_tokens(feature(29, 1)) == 2
