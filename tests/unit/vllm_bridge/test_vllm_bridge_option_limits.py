import math
import re
import time

import pytest

from medialane.types.errors import InvalidRequest
from medialane.vllm_bridge.items import check_options
from medialane.vllm_bridge.items.options import MAX_BYTES, MAX_DEPTH, MAX_VALUES


def nested(depth: int, make=lambda inner: {"a": inner}) -> object:
    value: object = {}
    for _ in range(depth - 1):
        value = make(value)
    return value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_pixels": 4, "size": {"shortest_edge": 56 * 56}, "do_resize": True, "fps": 2.0, "name": "x", "none": None},
        {"frames_indices": list(range(768))},
        {"big": (1 << 64) - 1, "small": -(1 << 63)},
        nested(MAX_DEPTH),
    ],
)
def test_realistic_options_pass(options):
    check_options(options, "mm_processor_kwargs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a": "x" * (MAX_BYTES + 1)}, "bytes"),
        ({"x" * (MAX_BYTES + 1): 1}, "bytes"),
        ({"a": ["x" * 1024] * 100}, "bytes"),
        ({"a": [0] * (MAX_VALUES + 1)}, "values"),
        ({str(n): n for n in range(MAX_VALUES + 1)}, "values"),
        ({"a": [[]] * (MAX_VALUES + 1)}, "values"),
        (nested(MAX_DEPTH + 2), "deeper"),
        (nested(100_000), "deeper"),
        (nested(MAX_DEPTH + 2, lambda inner: [inner]), "deeper"),
        ({"a": math.nan}, "number"),
        ({"a": [-math.inf]}, "number"),
        ({"a": 1 << 64}, "64 bits"),
        ({"a": {1: 2}}, "strings"),
        ({"a": b"bytes"}, "JSON"),
        ({"a": object()}, "JSON"),
    ],
)
def test_options_too_large_too_deep_or_not_json_are_rejected_by_field(options, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        check_options(options, "mm_processor_kwargs")
    assert refused.value.status == 400
    assert re.fullmatch(r"mm_processor_kwargs([.\[].*)?", refused.value.param)


def test_check_stops_at_the_limit():
    huge = {"a": [[0] * 1000] * 100_000}
    started = time.thread_time()
    with pytest.raises(InvalidRequest):
        check_options(huge, "mm_processor_kwargs")
    assert time.thread_time() - started < 0.1  # the whole would take seconds
