"""Limits of an announcement."""

import math

import msgspec
import pytest

from medialane.types.stats import MAX_BLOCK_IDS, MAX_ITEMS, PendingWork

FINE = PendingWork(0, bytes(8 * MAX_BLOCK_IDS), (("a" * 64, 1),) * MAX_ITEMS, 5.0)


def test_work_at_the_limits_is_decoded_as_sent():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FINE), type=PendingWork) == FINE


@pytest.mark.parametrize(
    "fields",
    [
        (-1, b"", (), 0.0),
        (0, bytes(7), (), 0.0),
        (0, bytes(8 * MAX_BLOCK_IDS + 8), (), 0.0),
        (0, b"", (("a", 1),) * (MAX_ITEMS + 1), 0.0),
        (0, b"", (("a" * 1000, 1),), 0.0),
        (0, b"", (("a", -1),), 0.0),
        (0, b"", (), -1.0),
        (0, b"", (), math.nan),
        (0, b"", (), math.inf),
    ],
)
def test_work_beyond_a_limit_is_undecodable(fields):
    with pytest.raises(msgspec.ValidationError, match="out of range"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=PendingWork)
