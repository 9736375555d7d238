"""The right to read one entry of a store."""

import msgspec
import pytest

from medialane.transfer.peer_server import CAPABILITY_LIFETIME_S, Capabilities
from medialane.types.errors import HandoverFailed
from medialane.types.feature import RemoteEntry
from medialane.types.tensor import ArenaRange

RANGE = ArenaRange("a" * 32, 4096, 1088, 7)


@pytest.fixture
def capabilities(clock):
    return Capabilities("tcp://10.0.0.1:7100", clock)


def test_given_capability_is_accepted_after_a_round_trip(capabilities):
    entry = capabilities.give(RANGE, "processed", "key")
    assert entry.address == "tcp://10.0.0.1:7100"
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=RemoteEntry)
    capabilities.check(sent)
    capabilities.check(msgspec.structs.replace(sent, mover="tcp"))


@pytest.mark.parametrize(
    "changed",
    [
        {"range": msgspec.structs.replace(RANGE, offset=8192)},
        {"range": msgspec.structs.replace(RANGE, nbytes=4160)},
        {"range": msgspec.structs.replace(RANGE, generation=8)},
        {"range": msgspec.structs.replace(RANGE, arena="b" * 32)},
        {"kind": "encoded"},
        {"key": "other"},
        {"expires_ms": 1 << 60},
        {"capability": b""},
        {"capability": bytes(32)},
    ],
    ids=str,
)
def test_capability_for_anything_else_is_refused(capabilities, changed):
    entry = capabilities.give(RANGE, "processed", "key")
    with pytest.raises(HandoverFailed, match="not one of this store"):
        capabilities.check(msgspec.structs.replace(entry, **changed))


def test_capability_of_another_incarnation_is_refused(capabilities, clock):
    with pytest.raises(HandoverFailed):
        Capabilities(capabilities.address, clock).check(capabilities.give(RANGE, "processed", "key"))


def test_capability_expires(capabilities, clock):
    entry = capabilities.give(RANGE, "processed", "key")
    clock.now += CAPABILITY_LIFETIME_S - 1
    capabilities.check(entry)
    clock.now += 2
    with pytest.raises(HandoverFailed, match="expired"):
        capabilities.check(entry)
