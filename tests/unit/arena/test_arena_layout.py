"""The file's layout: headers, names, where tensors go."""

import pytest

from medialane.arena import ENTRY_HEADER_BYTES, describe, is_valid, layout
from medialane.arena.layout import PAGE_BYTES, FileHeader, arena_of, clear, file_path, stamp
from medialane.types.tensor import ArenaRange, TensorSpec

ARENA = "0123456789abcdef" * 2
FILE_BYTES = 4 * PAGE_BYTES


@pytest.fixture
def words():
    return memoryview(bytearray(FILE_BYTES)).cast("Q")


def entry(offset=PAGE_BYTES, nbytes=256, generation=7):
    return ArenaRange(ARENA, offset, nbytes, generation)


def test_file_header_round_trips():
    header = FileHeader(ARENA, 1 << 40, b"n" * 16)
    assert FileHeader.decode(header.encode() + bytes(100)) == header
    assert len(header.encode()) <= PAGE_BYTES


@pytest.mark.parametrize(
    ("position", "byte", "message"),
    [(0, b"x", "not an arena"), (8, b"\x09", "version 9"), (12, b"\x01", "version")],
)
def test_foreign_header_is_rejected(position, byte, message):
    data = bytearray(FileHeader(ARENA, PAGE_BYTES, b"n" * 16).encode())
    data[position : position + 1] = byte
    with pytest.raises(ValueError, match=message):
        FileHeader.decode(bytes(data))


def test_truncated_header_is_rejected():
    with pytest.raises(ValueError, match="too short"):
        FileHeader.decode(b"medialan")


@pytest.mark.parametrize("arena", ["", "ab", ARENA.upper(), ARENA + "0", f"../{ARENA[3:]}", ARENA[:-1] + "\n", "/etc"])
def test_only_a_valid_arena_id_becomes_a_path(arena):
    with pytest.raises(ValueError, match="32 hex digits"):
        file_path("/dev/shm", arena)


def test_file_name_and_arena_id_round_trip():
    path = file_path("/dev/shm", ARENA)
    assert str(path) == f"/dev/shm/medialane-{ARENA}.arena"
    assert arena_of(path) == ARENA
    with pytest.raises(ValueError, match="not the name"):
        arena_of(path.with_name("other.arena"))


def test_entry_is_valid_from_its_stamp_until_cleared(words):
    assert not is_valid(words, entry())
    stamp(words, entry())
    assert is_valid(words, entry())
    clear(words, entry())
    assert not is_valid(words, entry())


@pytest.mark.parametrize(
    "wrong",
    [
        entry(generation=8),
        entry(generation=0),
        entry(generation=-7),
        entry(nbytes=128),
        entry(nbytes=63),
        entry(nbytes=FILE_BYTES),
        entry(offset=PAGE_BYTES + 8),
        entry(offset=PAGE_BYTES + 64),
        entry(offset=0),
        entry(offset=-64),
        entry(offset=FILE_BYTES),
        entry(offset=1 << 62, nbytes=64),
    ],
    ids=lambda r: f"{r.offset}+{r.nbytes} g{r.generation}",
)
def test_range_not_matching_the_entry_is_invalid(words, wrong):
    stamp(words, entry())
    assert not is_valid(words, wrong)


def test_generation_of_free_space_is_never_valid(words):
    stamp(words, entry())
    clear(words, entry())
    assert not is_valid(words, entry(generation=0))


def test_tensors_are_cache_line_aligned_after_the_header():
    specs = [TensorSpec("uint8", (3,)), TensorSpec("float32", (0, 4)), TensorSpec("bfloat16", (100, 2))]
    offsets, payload = layout(specs)
    assert offsets == (64, 128, 128)
    assert payload == 128 + 400 - ENTRY_HEADER_BYTES


def test_entry_without_tensors_has_no_payload():
    assert layout([]) == ((), 0)


def test_descriptors_follow_the_layout():
    specs = [TensorSpec("int64", (1, 3)), TensorSpec("uint8", (7,))]
    offsets, payload = layout(specs)
    range_ = entry(nbytes=ENTRY_HEADER_BYTES + payload)
    described = describe(range_, specs)
    assert tuple(d.offset for d in described) == offsets
    assert [d.spec for d in described] == specs
    assert {d.range for d in described} == {range_}


def test_tensors_exceeding_their_entry_are_rejected():
    with pytest.raises(ValueError, match="is not inside"):
        describe(entry(nbytes=128), [TensorSpec("uint8", (65,))])
