from pathlib import Path

import pytest

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.core.errors import HandoverFailed
from medialane.core.feature import Feature
from medialane.core.media import MediaSize
from medialane.core.tensor import TensorSpec
from medialane.transfer import AttachedArenas

SPEC = TensorSpec("uint8", (1000,))


@pytest.fixture
def arena():
    arena = Arena.create(ArenaConfig(size_bytes=16 << 20))
    yield arena
    arena.close()


@pytest.fixture
def attached():
    attached = AttachedArenas("/dev/shm")
    yield attached
    attached.close()


@pytest.fixture
def tensor(arena):
    reservation = arena.reserve(layout([SPEC])[1])
    (tensor,) = describe(reservation.range, [SPEC])
    arena.view.tensor(tensor, writable=True)[:] = bytes(range(250)) * 4
    lease = arena.publish(reservation, "k", Feature("image", "k", b"", (tensor,), MediaSize()))
    yield tensor
    lease.release()


def test_attached_arena_is_read_without_a_copy(arena, attached, tensor):
    assert attached.attach(arena.id, arena.nonce)
    data = attached.receiver.fetch(tensor)
    assert data[:3] == b"\0\1\2"
    arena.view.tensor(tensor, writable=True)[0] = 9
    assert data[0] == 9
    assert data.readonly


def test_attaching_again_is_the_same_mapping(arena, attached, tensor):
    assert attached.attach(arena.id, arena.nonce)
    assert attached.attach(arena.id, arena.nonce)
    assert attached.receiver.fetch(tensor)


@pytest.mark.parametrize("arena_id", ["f" * 32, "../../etc/shadow", ""])
def test_arena_that_is_not_here_is_not_attached(attached, arena_id):
    assert not attached.attach(arena_id, b"n" * 16)


def test_arena_with_another_nonce_is_not_attached(arena, attached, tensor):
    """Another host may have an arena of the same name: only the nonce is proof."""
    assert not attached.attach(arena.id, b"n" * 16)
    with pytest.raises(HandoverFailed):
        attached.receiver.fetch(tensor)


def test_wrong_nonce_leaves_the_mapping_of_the_arenas_own_gateway(arena, attached, tensor):
    assert attached.attach(arena.id, arena.nonce)
    assert not attached.attach(arena.id, b"n" * 16)
    assert attached.receiver.fetch(tensor)
    assert attached.attach(arena.id, arena.nonce)


def test_detached_arena_is_unmapped_and_others_stay(attached, tensor, arena):
    other = Arena.create(ArenaConfig(size_bytes=16 << 20))
    assert attached.attach(arena.id, arena.nonce)
    assert attached.attach(other.id, other.nonce)
    num_mapped = Path("/proc/self/maps").read_text().count(other.id)
    for _ in range(2):
        attached.detach(other.id)
    assert Path("/proc/self/maps").read_text().count(other.id) == num_mapped - 1
    assert attached.receiver.fetch(tensor)
    other.close()


def test_bytes_that_are_held_outlive_the_mapping(arena, attached, tensor):
    attached.attach(arena.id, arena.nonce)
    data = attached.receiver.fetch(tensor)
    attached.close()
    assert data[:3] == b"\0\1\2"
    with pytest.raises(HandoverFailed):
        attached.receiver.fetch(tensor)
