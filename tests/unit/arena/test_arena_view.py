"""Another process's mapping: what it rejects, and what outlives it."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from medialane.arena import Arena, ArenaConfig, ArenaView, describe, layout
from medialane.types.errors import HandoverFailed
from medialane.types.tensor import TensorDescriptor, TensorSpec

SPECS = (TensorSpec("float32", (3, 4)), TensorSpec("int64", (2,)))
PAGE_BYTES, MIB = 4096, 1 << 20


@pytest.fixture
def file(config):
    made = Arena.create(config)
    yield made
    made.close()


@pytest.fixture
def view(file, shm):
    opened = ArenaView.open(file.view.id, shm)
    yield opened
    opened.close()


@pytest.fixture
def reservation(file):
    with file.reserve(layout(SPECS)[1]) as made:
        yield made


@pytest.fixture
def entry(reservation):
    return reservation.range


def test_reads_the_owners_nonce_and_size(file, view, config):
    assert view.nonce == file.view.nonce
    assert len(view.nonce) == 16
    assert any(view.nonce)
    assert view.size_bytes == config.size_bytes == len(view.memory)


def test_tensors_written_by_one_process_are_read_by_another_without_a_copy(file, view, entry, shm):
    preparer = ArenaView.open(file.view.id, shm, writable=True)
    descriptors = describe(entry, SPECS)
    seen = np.frombuffer(view.tensor(descriptors[0]), np.float32)
    np.frombuffer(preparer.tensor(descriptors[0], writable=True), np.float32)[:] = np.arange(12)
    preparer.entry(entry, writable=True)[descriptors[1].offset :][:16] = np.array([7, -1]).tobytes()
    assert seen.tolist() == list(range(12))
    assert np.frombuffer(view.tensor(descriptors[1]), np.int64).tolist() == [7, -1]
    assert bytes(view.entry(entry))[descriptors[0].offset :][:48] == seen.tobytes()
    preparer.close()


def test_views_are_read_only_unless_asked(file, view, entry, shm):
    with pytest.raises(ValueError, match="read-only"):
        view.entry(entry, writable=True)
    assert view.memory.readonly
    writable = ArenaView.open(file.view.id, shm, writable=True)
    assert writable.entry(entry).readonly
    assert writable.tensor(describe(entry, SPECS)[0]).readonly
    writable.close()


@pytest.mark.parametrize(
    "change",
    [
        {"arena": "cd" * 16},
        {"generation": 6},
        {"generation": 0},
        {"generation": -7},
        {"offset": PAGE_BYTES + 8},
        {"offset": PAGE_BYTES + 64},
        {"offset": 0},
        {"offset": -64},
        {"offset": -PAGE_BYTES},
        {"offset": 16 << 20},
        {"offset": 1 << 62},
        {"nbytes": 63},
        {"nbytes": 128},
        {"nbytes": 1 << 40},
    ],
    ids=str,
)
def test_range_without_an_entry_fails(view, entry, change):
    with pytest.raises(HandoverFailed, match="no such entry"):
        view.entry(msgspec.structs.replace(entry, **change))


def test_freed_entry_fails(view, reservation):
    entry = reservation.range
    descriptor = describe(entry, SPECS)[0]
    view.tensor(descriptor)
    reservation.abandon()
    for generation in (entry.generation, 0):
        with pytest.raises(HandoverFailed):
            view.entry(msgspec.structs.replace(entry, generation=generation))
    with pytest.raises(HandoverFailed):
        view.tensor(descriptor)


def test_tensor_cannot_overlap_the_entry_header(view, entry):
    with pytest.raises(HandoverFailed, match="header"):
        view.tensor(TensorDescriptor(TensorSpec("uint8", (8,)), entry, 0))


@pytest.mark.parametrize("arena", ["", "../../etc/passwd", "AB" * 16, "ab" * 17])
def test_received_id_is_never_a_path(shm, arena):
    with pytest.raises(HandoverFailed, match="32 hex digits"):
        ArenaView.open(arena, shm)


def test_unknown_arena_fails(shm):
    with pytest.raises(HandoverFailed, match="cannot be opened"):
        ArenaView.open("ab" * 16, shm)


def test_symlink_instead_of_the_file_fails(file, shm):
    link = Path(shm, f"medialane-{'cd' * 16}.arena")
    link.symlink_to(file.path)
    with pytest.raises(HandoverFailed, match="cannot be opened"):
        ArenaView.open("cd" * 16, shm)
    link.unlink()


def test_file_with_the_header_of_another_arena_fails(file, shm):
    other = Path(shm, f"medialane-{'cd' * 16}.arena")
    os.link(file.path, other)
    with pytest.raises(HandoverFailed, match="another arena"):
        ArenaView.open("cd" * 16, shm)
    other.unlink()


@pytest.mark.parametrize(
    ("position", "byte", "message"),
    [(0, b"x", "not an arena"), (8, b"\x09", "version 9"), (12, b"\x01", "version"), (16, b"\x01", "damaged")],
)
def test_file_of_another_format_fails(file, shm, position, byte, message):
    with file.path.open("r+b") as stream:
        stream.seek(position)
        stream.write(byte)
    with pytest.raises(HandoverFailed, match=message):
        ArenaView.open(file.view.id, shm)


def test_file_without_a_header_fails(shm):
    path = Path(shm, f"medialane-{'cd' * 16}.arena")
    path.write_bytes(b"medialan")
    with pytest.raises(HandoverFailed, match="too short"):
        ArenaView.open("cd" * 16, shm)
    path.unlink()


def test_truncated_file_fails(file, shm):
    os.truncate(file.path, PAGE_BYTES * 2)  # no process has touched the pages behind
    with pytest.raises(HandoverFailed, match="size"):
        ArenaView.open(file.view.id, shm)


def test_close_keeps_live_views_readable_and_forbids_new_ones(file, view, entry, shm):
    held = np.frombuffer(view.entry(entry), np.uint8)
    before = held.tobytes()
    view.close()
    view.close()
    assert held.tobytes() == before
    with pytest.raises(HandoverFailed, match="closed"):
        view.entry(entry)
    with pytest.raises(ValueError, match="released"):
        view.memory  # noqa: B018 - the access is what is tested


def test_large_arena_is_mapped_in_pieces_that_the_kernel_walks_one_by_one(shm):
    file = Arena.create(ArenaConfig(size_bytes=80 * MIB, directory=str(shm)))
    try:
        assert mappings(file.view.id) >= 5
        with file.view.memory as memory:
            memory[16 * MIB - 8 : 16 * MIB + 8] = bytes(range(16))
            assert bytes(memory[16 * MIB - 8 : 16 * MIB + 8]) == bytes(range(16))
    finally:
        file.close()


def mappings(name):
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_is_unmapped_with_the_last_view(file, entry, shm):
    name = file.path.name
    before = mappings(name)
    view = ArenaView.open(file.view.id, shm)
    held = view.entry(entry)
    assert mappings(name) == before + 1
    view.close()
    assert mappings(name) == before + 1
    del held
    assert mappings(name) == before
