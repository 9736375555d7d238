"""Names are read back as they were written last, or not at all."""

import random

import pytest

from limits import files_up_to
from medialane.arena import NamesArea
from medialane.arena.names import MAX_PAYLOAD_BYTES, RECORD_BYTES

FIRST = 8192
NONCE = b"n" * 16
KEYS = [bytes([i]) * 32 for i in range(8)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "arena"
    path.write_bytes(b"a" * FIRST)
    yield path
    assert path.read_bytes()[:FIRST] == b"a" * FIRST, "the mapped part"


def opened(path, *, nonce=NONCE, max_records=6) -> NamesArea:
    return NamesArea(path, first_byte=FIRST, nonce=nonce, max_records=max_records)


def kept(path, kind="uuid", **settings) -> dict[bytes, bytes]:
    area = opened(path, **settings)
    try:
        return dict(area.records(kind).read())
    finally:
        area.close()


def written(path, entries, *, kind="uuid") -> None:
    area = opened(path)
    for key, payload in entries.items():
        area.records(kind).write(key, payload)
    area.close()


def test_next_owner_reads_the_last_payload_of_each_key(path):
    area = opened(path)
    uuids, urls = area.records("uuid"), area.records("url")
    uuids.write(KEYS[0], b"first")
    uuids.write(KEYS[1], b"other")
    urls.write(KEYS[0], b"url")
    uuids.write(KEYS[0], b"second")
    uuids.erase(KEYS[1])
    uuids.write(KEYS[2], b"x" * MAX_PAYLOAD_BYTES)
    area.close()
    assert kept(path) == {KEYS[0]: b"second", KEYS[2]: b"x" * MAX_PAYLOAD_BYTES}
    assert kept(path, "url") == {KEYS[0]: b"url"}


def test_key_with_a_payload_that_does_not_fit_has_no_record(path):
    written(path, {KEYS[0]: b"first"})
    written(path, {})
    area = opened(path)
    area.records("uuid").write(KEYS[0], b"x" * (MAX_PAYLOAD_BYTES + 1))
    area.close()
    assert kept(path) == {}


def test_more_than_the_limit_is_not_kept_until_another_is_erased(path):
    area = opened(path, max_records=2)
    names = area.records("uuid")
    for key in KEYS[:3]:
        names.write(key, b"p")
    assert path.stat().st_size == FIRST + 2 * RECORD_BYTES
    names.erase(KEYS[0])
    names.write(KEYS[3], b"q")
    area.close()
    assert kept(path) == {KEYS[1]: b"p", KEYS[3]: b"q"}


def test_lower_limit_cuts_off_records(path):
    written(path, dict.fromkeys(KEYS[:6], b"p"))
    assert len(kept(path, max_records=2)) == 2
    assert len(kept(path, max_records=6)) == 2


def test_records_of_another_arena_are_not_read(path):
    written(path, {KEYS[0]: b"p"})
    assert kept(path, nonce=b"m" * 16) == {}


def test_record_that_was_moved_or_torn_is_not_read(path):
    written(path, {KEYS[0]: b"p" * 100, KEYS[1]: b"q"})
    data = bytearray(path.read_bytes())
    first, second = data[FIRST : FIRST + RECORD_BYTES], data[FIRST + RECORD_BYTES :]
    path.write_bytes(data[:FIRST] + second + first)
    assert kept(path) == {}
    path.write_bytes(data[:FIRST] + first[:90] + bytes(RECORD_BYTES - 90) + second[: RECORD_BYTES // 2])
    assert kept(path) == {}


def test_place_of_an_invalid_record_is_used_again(path):
    written(path, dict.fromkeys(KEYS[:6], b"p"))
    with path.open("r+b") as file:
        file.seek(FIRST + 3 * RECORD_BYTES + 70)
        file.write(b"\xff")
    written(path, {KEYS[7]: b"new"})
    assert len(found := kept(path)) == 6
    assert found[KEYS[7]] == b"new"


def test_no_flipped_bit_yields_a_wrong_name(path):
    entries = {KEYS[0]: b"content", KEYS[1]: b"other content"}
    written(path, entries)
    data = path.read_bytes()
    for bit in random.Random(1).sample(range(FIRST * 8, len(data) * 8), 400):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        names = kept(path)
        assert names.items() <= entries.items()
        assert not kept(path, "url")


def test_full_file_system_ends_persistence_and_nothing_else(path, caplog):
    area = opened(path)
    names = area.records("uuid")
    names.write(KEYS[0], b"before")

    with files_up_to(0):
        names.write(KEYS[1], b"p")
    assert "File too large" in caplog.text
    names.write(KEYS[0], b"after")
    names.erase(KEYS[0])
    area.close()
    assert kept(path) == {}, "not even what was written before: it may have changed since"


def test_area_without_a_file_keeps_nothing(tmp_path, caplog):
    area = opened(tmp_path / "none")
    area.records("url").write(KEYS[0], b"p")
    assert list(area.records("url").read()) == []
    area.close()
    assert "not kept" in caplog.text
