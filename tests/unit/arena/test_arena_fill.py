"""Ranges that another process writes: completed once, and never reused while they may be written."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from medialane.arena import Arena, FillWriter
from medialane.types.errors import ArenaFull, HandoverFailed
from medialane.types.tensor import ArenaRange
from poison import POISON, poison_freed
from waiting import line_of, wait_until

WRITER = Path(__file__).with_name("writer.py")
NUM_BYTES = 10_000


@pytest.fixture
def arena(config, monkeypatch):
    poison_freed(monkeypatch)
    made = Arena.create(config)
    yield made
    assert made.stats().free_bytes == made.stats().size_bytes
    made.close()


@pytest.fixture
def reservation(arena):
    with arena.reserve(NUM_BYTES, "embedded") as made:
        made.buffer[:] = bytes(NUM_BYTES)
        yield made


@contextmanager
def writing(shm, entry):
    """A process that is writing to `entry`; killed in the end."""
    command = [sys.executable, str(WRITER), shm, msgspec.json.encode(entry).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert line_of(process) == b"writing\n"
            yield process
        finally:
            process.kill()


def test_payload_that_is_written_completes_the_entry(arena, reservation, shm):
    with arena.reserve(100) as before, arena.reserve(100) as after:
        for neighbour in (before, after):
            neighbour.buffer[:] = b"n" * 100
        assert not arena.is_completed(reservation)
        with FillWriter.open(reservation.range, shm) as payload:
            assert (len(payload), payload.readonly) == (NUM_BYTES, False)
            payload[:] = b"e" * NUM_BYTES
            assert not arena.is_completed(reservation)
        assert arena.is_completed(reservation)
        assert bytes(reservation.buffer) == b"e" * NUM_BYTES
        assert bytes(before.buffer) == bytes(after.buffer) == b"n" * 100
        assert arena.revoke(reservation)


@pytest.mark.parametrize("error", [KeyError, BufferError, HandoverFailed])
def test_entry_is_not_completed_if_writing_it_fails(arena, reservation, shm, error):
    with pytest.raises(error), FillWriter.open(reservation.range, shm):
        raise error("no")
    assert not arena.is_completed(reservation)
    with FillWriter.open(reservation.range, shm) as payload:
        payload[:] = b"2" * NUM_BYTES
    assert arena.is_completed(reservation)


def test_completed_entry_is_not_written_again(arena, reservation, shm):
    with FillWriter.open(reservation.range, shm):
        pass
    with pytest.raises(HandoverFailed, match="no such entry"), FillWriter.open(reservation.range, shm):
        pass


def test_range_that_is_reserved_again_is_to_be_written_again(arena, reservation, shm):
    with FillWriter.open(reservation.range, shm) as payload:
        payload[:] = b"\xff" * NUM_BYTES
    first = reservation.range
    reservation.abandon()
    with arena.reserve(NUM_BYTES, "embedded") as again:
        assert again.range.offset == first.offset
        assert not arena.is_completed(again)
        with FillWriter.open(again.range, shm):
            pass
        assert arena.is_completed(again)


def test_one_process_writes_at_a_time(arena, reservation, shm):
    first, second = (FillWriter.open(reservation.range, shm) for _ in range(2))
    with first, pytest.raises(HandoverFailed, match="another process"), second:
        pass
    assert arena.is_completed(reservation)


def test_neighbours_are_written_at_the_same_time(arena, reservation, shm):
    with arena.reserve(NUM_BYTES) as other:
        with FillWriter.open(reservation.range, shm), FillWriter.open(other.range, shm):
            pass
        assert arena.is_completed(reservation)
        assert arena.is_completed(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"arena": "0" * 32},
        {"arena": "../etc"},
        {"offset": 0},
        {"offset": 4096 + 1},
        {"offset": -4096},
        {"offset": 1 << 62},
        {"offset": 1 << 70},
        {"nbytes": 63},
        {"nbytes": 1 << 40},
        {"nbytes": (1 << 63) - 4097},
        {"generation": 0},
        {"generation": 99},
    ],
)
def test_only_the_range_of_an_entry_is_written(arena, reservation, shm, changed):
    descriptors = len(os.listdir("/proc/self/fd"))
    wrong = msgspec.structs.replace(reservation.range, **changed)
    with pytest.raises(HandoverFailed), FillWriter.open(wrong, shm):
        pass
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not arena.is_completed(reservation)


def test_only_the_pages_of_the_entry_are_mapped(arena, reservation, shm):
    def mapped():
        lines = Path("/proc/self/maps").read_text().splitlines()
        starts = [line.split()[0].split("-") for line in lines if line.endswith(str(arena.path))]
        return sum(int(end, 16) - int(start, 16) for start, end in starts)

    before = mapped()
    with FillWriter.open(reservation.range, shm):
        assert 0 < mapped() - before <= NUM_BYTES + 2 * 4096
    assert mapped() == before


def test_array_over_the_payload_may_outlive_the_block(arena, reservation, shm):
    with FillWriter.open(reservation.range, shm) as payload:
        array = np.frombuffer(payload, np.uint8)
        array[:] = 3
    assert arena.is_completed(reservation)
    assert array.sum() == 3 * NUM_BYTES
    assert arena.revoke(reservation), "the lock has ended"


def test_revoked_range_is_not_written_any_more(arena, reservation, shm):
    entry = reservation.range
    assert arena.revoke(reservation)
    with pytest.raises(HandoverFailed), FillWriter.open(entry, shm):
        pass
    with arena.reserve(NUM_BYTES), pytest.raises(HandoverFailed), FillWriter.open(entry, shm):
        pass


def test_range_that_is_being_written_is_freed_only_after_that(arena, reservation, shm):
    entry = reservation.range
    with FillWriter.open(entry, shm) as payload:
        assert not arena.revoke(reservation)
        assert arena.stats().num_reservations == 1
        with pytest.raises(HandoverFailed), FillWriter.open(entry, shm):
            pass
        payload[:] = b"l" * NUM_BYTES  # goes on, and is not used
    with pytest.raises(HandoverFailed), FillWriter.open(entry, shm):
        pass
    assert arena.revoke(reservation)
    assert arena.stats().num_reservations == 0


def test_range_of_a_writing_process_is_reused_when_that_is_killed(arena, reservation, shm):
    entry = reservation.range
    with writing(shm, entry) as process:
        assert not arena.revoke(reservation)
        assert payload_of(arena, entry)[:2] == b"\x01\x00", "nothing else writes there"
        with pytest.raises(ArenaFull):
            arena.reserve(arena.max_payload_bytes)
        process.kill()
        process.wait()
        wait_until(lambda: arena.revoke(reservation), "the lock has ended with the process")
    assert payload_of(arena, entry) == POISON * NUM_BYTES
    arena.reserve(arena.max_payload_bytes).abandon()


def test_entry_of_a_process_that_is_killed_is_not_completed(arena, reservation, shm):
    with writing(shm, reservation.range) as process:
        process.kill()
        process.wait()
    assert not arena.is_completed(reservation)
    with writing(shm, reservation.range) as process:
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert line_of(process) == b"completed\n"
        assert arena.is_completed(reservation)
    assert bytes(reservation.buffer) == b"\x02" * NUM_BYTES


def test_nothing_is_written_where_the_kernel_has_no_such_locks(arena, reservation, shm, request):
    request.getfixturevalue("_no_byte_locks")
    with pytest.raises(HandoverFailed, match="cannot be locked"), FillWriter.open(reservation.range, shm):
        pass
    assert arena.revoke(reservation)


def test_closed_arena_is_not_written_and_its_ranges_can_be_revoked(config, shm):
    arena = Arena.create(config)
    reservation = arena.reserve(10)
    entry: ArenaRange = reservation.range
    arena.close()
    with pytest.raises(HandoverFailed), FillWriter.open(entry, shm):
        pass
    assert not arena.is_completed(reservation)
    assert arena.revoke(reservation)
    assert arena.stats().num_reservations == 0


def payload_of(arena, entry):
    return bytes(arena.view.memory[entry.offset + 64 : entry.offset + entry.nbytes])
