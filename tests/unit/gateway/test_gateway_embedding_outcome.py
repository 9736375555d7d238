"""What a worker's first output says about the embedding of an item."""

import pytest

from medialane.core.feature import MediaSpan
from medialane.core.request import OutputDelta
from medialane.gateway.embedding_outcome import embedding_outcome


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"embedded": ("h",), "loaded": ("h",)}, "loaded"),
        ({"embedded": ("h", "other"), "loaded": ("other",)}, "encoded"),
        ({"embedded": ("other",)}, "unkept"),
        ({}, "unkept"),
        ({"num_cached_tokens": 29}, "unkept"),
        ({"num_cached_tokens": 30, "embedded": ("h",), "loaded": ("h",)}, "unneeded"),
    ],
)
def test_outcome(fields, outcome):
    assert embedding_outcome(MediaSpan("h", 10, 20), OutputDelta("r", [], **fields)) == outcome
