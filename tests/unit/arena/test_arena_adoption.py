"""The next owner of an arena's file: what it finds, wherever the earlier one was killed, and whatever was damaged."""

import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import full_owner
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from medialane.arena import Arena, ArenaConfig, ArenaView, ClientSlot, FillWriter, Lineage, describe, layout, reap
from medialane.arena.index import ROW_BYTES, index_bytes
from medialane.arena.layout import COMPLETED_WORD, GENERATION_WORD
from medialane.runtime.private_files import OwnedFolder
from medialane.types.errors import ArenaFull, HandoverFailed
from medialane.types.feature import Embedding, Feature
from medialane.types.media import EncodedMedia, MediaSize
from medialane.types.tensor import TensorSpec

#: Of 16 parts of an arena, which is as small as that for the sake of speed: it is read and compared hundreds of times.
PART = 1 << 16
LINEAGE = Lineage(b"o" * 16, b"s" * 16)
#: Of a description that does not fit behind its entry: for the next owner, the entry has no key.
LONG_HEADER = bytes(4096)
ARENA_FILES = str(Path(sys.modules[Arena.__module__].__file__).parent)


def feature(key, range_, num_bytes):
    specs = [TensorSpec("uint8", (num_bytes,))]
    return Feature("image", key, b"header of " + key.encode(), describe(range_, specs), MediaSize(3, 4))


def write(arena, key, num_bytes=1000):
    reservation = arena.reserve(layout([TensorSpec("uint8", (num_bytes,))])[1])
    reservation.buffer[:] = fill(key) * num_bytes
    return arena.publish(reservation, key, feature(key, reservation.range, num_bytes))


def write_encoded(arena, key, num_bytes=300):
    reservation = arena.reserve(2 * num_bytes, "encoded")
    reservation.trim(num_bytes)
    reservation.buffer[:] = fill(key) * num_bytes
    return arena.publish(
        reservation, key, EncodedMedia("image", key, "image/png", reservation.range, 64, num_bytes)
    )  # fmt: skip


def reserve_embedding(arena, key, writer=7):
    """A range that a process of the client `writer` may write."""
    reservation = arena.reserve(8, "embedded", writer=writer)
    (tensor,) = describe(reservation.range, [TensorSpec("uint8", (2, 4))])
    value = Feature("image", f"mm {key}", b"", (), MediaSize(), Embedding(key, tensor))
    arena.note(reservation, key, value)
    return reservation, value


def fill(key):
    return bytes([sum(key.encode()) % 255 + 1])


def content(arena, key, kind):
    """The bytes of a cached entry; None if there is none."""
    if not arena.contains(key, kind):
        return None
    with arena.lookup(key, kind) as pin:
        return set(bytes(arena.view.entry(pin.range)[64:]))


@pytest.fixture(autouse=True, scope="module")
def small_arenas():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medialane.arena.config.MIN_BYTES", 16 * PART)
        yield


@pytest.fixture
def config(shm):
    return ArenaConfig(size_bytes=16 * PART, directory=shm)


@pytest.fixture
def arena(config):
    arena = Arena.open(config, lineage=LINEAGE)
    yield arena
    arena.close()


def next_owner(arena, config, **options):
    """End the owner as if it had been killed, and return the next one."""
    arena.close(keep=True)
    return Arena.open(config, lineage=LINEAGE, **options)


def settle(arena):
    for unfinished in arena.unfinished():
        unfinished.reservation.abandon()
    arena.end_takeover()


def test_next_owner_has_all_entries_with_their_values_and_bytes(arena, config):
    values = {}
    for key, kind, make in (("a", "processed", write), ("b", "encoded", write_encoded)):
        with make(arena, key) as pin:
            values[key, kind] = pin.value
    reservation, values["c", "embedded"] = reserve_embedding(arena, "c")
    with FillWriter.open(reservation.range, config.directory) as payload:
        payload[:] = fill("c") * 8
    arena.publish(reservation, "c", values["c", "embedded"]).release()
    stats = arena.stats()
    later = next_owner(arena, config)
    assert later.was_adopted
    assert (later.id, later.nonce) == (arena.id, arena.nonce)
    for (key, kind), value in values.items():
        with later.lookup(key, kind) as pin:
            assert pin.value == value
        assert content(later, key, kind) == set(fill(key))
    assert later.stats().free_bytes == stats.free_bytes
    assert later.stats().num_entries == 3
    later.close()


def test_generations_of_an_earlier_owner_are_not_used_again(arena, config):
    seen = set()
    for _ in range(3):
        for index in range(50):
            with write(arena, f"{index}") as pin:
                seen.add(pin.range.generation)
            assert arena.evict(f"{index}")
        arena = next_owner(arena, config)
        settle(arena)
    assert len(seen) == 150
    arena.close()


def test_another_lineage_finds_nothing_and_other_settings_replace_the_file(arena, config, shm):
    write(arena, "a").release()
    arena.close(keep=True)
    stranger = Arena.open(config, lineage=Lineage(b"x" * 16, b"s" * 16))
    assert not stranger.was_adopted
    assert len(os.listdir(shm)) == 2
    stranger.close()
    changed = Arena.open(config, lineage=Lineage(b"o" * 16, b"t" * 16))
    assert not changed.was_adopted
    assert os.listdir(shm) == [changed.path.name]
    changed.close()


def test_arena_of_another_size_is_replaced(arena, config, shm):
    arena.close(keep=True)
    larger = Arena.open(ArenaConfig(size_bytes=17 * PART, directory=shm), lineage=LINEAGE)
    assert not larger.was_adopted
    assert os.listdir(shm) == [larger.path.name]
    larger.close()


def test_arena_of_a_live_owner_is_left_alone(arena, config, shm):
    other = Arena.open(config, lineage=LINEAGE)
    assert not other.was_adopted
    assert len(os.listdir(shm)) == 2
    other.close()


def test_prefaulting_goes_on_where_it_was(config):
    arena = Arena.open(config, lineage=LINEAGE, grows=True)
    arena.prefaulted(8 * PART)
    write(arena, "a").release()
    later = next_owner(arena, config, grows=True)
    settle(later)
    assert later.contains("a")
    assert later.is_growing
    with pytest.raises(ArenaFull):
        later.reserve(9 * PART)
    later.prefaulted(16 * PART)
    later.reserve(9 * PART).abandon()
    later.close()


def test_nothing_is_reserved_or_evicted_before_the_clients_are_back(arena, config):
    write(arena, "a", 10 * PART).release()
    later = next_owner(arena, config)
    with pytest.raises(ArenaFull):
        later.reserve(10)
    later.allow_reserving()
    later.reserve(10).abandon()
    with pytest.raises(ArenaFull):
        later.reserve(10 * PART)
    assert not later.evict("a")
    assert later.clear() == 0
    later.end_takeover()
    later.reserve(10 * PART).abandon()
    assert not later.contains("a")
    later.close()


def test_client_claims_what_it_holds(arena, config):
    cached = write(arena, "a")
    kept, unclaimed = (
        arena.publish(arena.reserve(10), key, Feature("image", key, LONG_HEADER, (), MediaSize())) for key in "ku"
    )
    later = next_owner(arena, config)
    claimed = [later.claim(pin.range) for pin in (cached, kept)]
    later.end_takeover()
    for pin in claimed:
        assert later.view.entry(pin.range).nbytes == pin.range.nbytes
        pin.release()
    for pin in (cached, kept, unclaimed):
        pin.release()
    assert later.claim(unclaimed.range) is None
    assert later.claim(kept.range) is None, "freed with its last pin"
    assert later.contains("a")
    assert later.stats().num_entries == 1
    later.close()


def test_ranges_that_were_being_written_are_neither_cached_nor_reused(arena, config):
    body = arena.reserve(1000, "encoded", writer=5)
    noted, value = reserve_embedding(arena, "e", writer=6)
    revoked, _ = reserve_embedding(arena, "r", writer=7)
    with FillWriter.open(revoked.range, config.directory) as payload:
        assert not arena.revoke(revoked)
        later = next_owner(arena, config)
        unfinished = {each.writer: each for each in later.unfinished()}
        assert later.unfinished() == []
        assert [unfinished[n].reservation.range for n in (5, 6, 7)] == [body.range, noted.range, revoked.range]
        assert [unfinished[n].value for n in (5, 6)] == [None, value]
        assert [unfinished[n].is_revoked for n in (5, 6, 7)] == [False, False, True]
        assert not later.revoke(unfinished[7].reservation), "it is still being written"
        payload[:] = bytes(8)
    assert later.revoke(unfinished[7].reservation)
    with FillWriter.open(noted.range, config.directory) as payload:
        payload[:] = fill("e") * 8
    assert later.is_completed(unfinished[6].reservation)
    later.publish(unfinished[6].reservation, "e", value).release()
    assert content(later, "e", "embedded") == set(fill("e"))
    unfinished[5].reservation.abandon()
    assert later.stats().num_entries == 1
    for reservation in (body, noted, revoked):
        reservation.abandon()
    later.close()


def test_mapping_of_a_client_stays_valid_across_owners(arena, config, shm):
    with write(arena, "a") as pin:
        value = pin.value
    view = ArenaView.open(arena.id, shm)
    later = next_owner(arena, config)
    assert set(bytes(view.tensor(value.tensors[0]))) == set(fill("a"))
    settle(later)
    assert later.evict("a")
    with pytest.raises(HandoverFailed):
        view.tensor(value.tensors[0])
    view.close()
    later.close()


def test_arena_full_of_tiny_entries_is_taken_over_after_kill_9(shm):
    """Its owner goes on evicting for each new one, and is killed anywhere in that."""
    size_bytes = 16 << 20
    program = [sys.executable, str(Path(__file__).with_name("full_owner.py")), shm, str(size_bytes)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        num_entries, newest = map(int, process.stdout.readline().split())
        process.kill()
    assert num_entries == index_bytes(size_bytes) // ROW_BYTES - 2
    later = Arena.open(ArenaConfig(size_bytes=size_bytes, directory=shm), lineage=full_owner.LINEAGE)
    assert later.was_adopted
    settle(later)
    assert num_entries - 1 <= later.stats().num_entries <= num_entries
    kept = [n for n in range(newest - num_entries, newest + 1_000_000) if later.contains(str(n), "encoded")]
    assert kept == list(range(kept[-1] - len(kept) + 1, kept[-1] + 1))
    assert len(kept) >= num_entries - 1
    full_owner.store(later, "next")
    full_owner.store(later, "another")
    assert later.stats().num_entries == num_entries
    assert content(later, "another", "encoded") is not None
    later.close()


def test_tiny_entries_that_are_held_leave_no_place(arena):
    pins = []
    with pytest.raises(ArenaFull):
        pins.extend(write(arena, f"{index}", 10) for index in range(index_bytes(16 * PART) // ROW_BYTES))
    free_bytes = arena.stats().free_bytes
    with pytest.raises(ArenaFull):
        arena.reserve(10)
    assert arena.stats().free_bytes == free_bytes
    pins[0].release()
    write(arena, "next", 10).release()
    assert not arena.contains("0")
    for pin in pins[1:]:
        pin.release()


def test_file_is_spared_while_a_client_or_its_keeper_lives(arena, config, shm, tmp_path):
    slot = ClientSlot.take(arena.id, shm, 3)
    folder = OwnedFolder.create(tmp_path, "keeper-")
    arena.keep_for(str(folder.path / "owner.lock"))
    arena.close(keep=True)
    assert reap(shm) == []
    slot.release()
    assert reap(shm) == []
    folder.close(keep=True)
    assert [reaped.path for reaped in reap(shm)] == [str(arena.path)]


def test_damaged_header_of_a_cached_entry_is_no_freed_entry(arena, config):
    """Its bytes would be reused while a client reads them."""
    with write(arena, "a") as pin:
        arena.view.words[pin.range.offset // 8 + GENERATION_WORD] ^= 1 << 40
    later = next_owner(arena, config)
    assert not later.was_adopted
    later.close()


@pytest.mark.parametrize("generation", [1, 2, 4])
def test_no_flipped_bit_completes_an_entry(arena, generation):
    reservations = [arena.reserve(8, "embedded", writer=7) for _ in range(generation)]
    word = reservations[-1].range.offset // 8 + COMPLETED_WORD
    for bit in range(64):
        arena.view.words[word] = 1 << bit
        assert not arena.is_completed(reservations[-1])
    for reservation in reservations:
        reservation.abandon()


def test_arena_is_not_taken_over_where_slots_cannot_be_locked(arena, config, request):
    """Who still uses it is not known."""
    write(arena, "a").release()
    arena.close(keep=True)
    request.getfixturevalue("_no_byte_locks")
    later = Arena.open(config, lineage=LINEAGE)
    assert not later.was_adopted
    assert os.listdir(config.directory) == [later.path.name]
    later.close()


def test_files_that_only_look_like_an_arena_are_left_alone(arena, config, shm):
    copy, pipe = Path(shm, "medialane-copy.arena"), Path(shm, f"medialane-{'ab' * 16}.arena")
    copy.write_bytes(arena.path.read_bytes()[:8192])
    os.mkfifo(pipe)
    later = next_owner(arena, config)
    assert later.was_adopted
    assert copy.exists()
    assert pipe.exists()
    later.close()
    copy.unlink()
    pipe.unlink()


def test_file_that_is_about_to_be_taken_over_is_spared(arena, shm):
    arena.close(keep=True)
    assert reap(shm, successor=LINEAGE.owner) == []
    assert len(reap(shm, successor=b"x" * 16)) == 1


def snapshots(arena, act):
    """The contents of the arena's file after each line of the arena's code that `act` runs."""
    taken = []

    def snapshot():
        data = arena.path.read_bytes()
        if not taken or taken[-1] != data:
            taken.append(data)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(ARENA_FILES):
            return None
        snapshot()
        return trace

    snapshot()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    snapshot()
    return taken


def act_publish(arena):
    write(arena, "new").release()


def act_trim(arena):
    write_encoded(arena, "new").release()


def act_evict(arena):
    write(arena, "new", 13 * PART).release()


def act_embedding(arena):
    reservation, value = reserve_embedding(arena, "new")
    with FillWriter.open(reservation.range, str(arena.path.parent)) as payload:
        payload[:] = fill("new") * 8
    arena.publish(reservation, "new", value).release()


def act_revoke(arena):
    reservation, _ = reserve_embedding(arena, "new")
    assert arena.revoke(reservation)


@pytest.mark.parametrize("act", [act_publish, act_trim, act_evict, act_embedding, act_revoke])
def test_owner_may_be_killed_at_any_moment(arena, config, shm, act):
    held = write(arena, "held")
    write(arena, "idle", PART).release()
    write_encoded(arena, "encoded").release()
    taken = snapshots(arena, lambda: act(arena))
    held.release()
    assert len(taken) > 4
    folder = Path(shm, "snapshots")
    for data in taken:
        folder.mkdir()
        (folder / arena.path.name).write_bytes(data)
        later = Arena.open(ArenaConfig(size_bytes=16 * PART, directory=str(folder)), lineage=LINEAGE)
        assert later.was_adopted
        with later.claim(held.range) as claimed:
            settle(later)
            assert set(bytes(later.view.entry(claimed.range)[64:])) == set(fill("held"))
        kinds = {"new": ("processed", "encoded", "embedded"), "idle": ("processed",), "encoded": ("encoded",)}
        for key, kind in ((key, kind) for key, each in kinds.items() for kind in each):
            assert content(later, key, kind) in (None, set(fill(key)))
        if act is not act_evict:
            assert later.contains("idle")
            assert later.contains("encoded", "encoded")
        later.clear()
        assert later.stats().free_bytes == later.stats().size_bytes
        later.close()
        shutil.rmtree(folder)


def damaged_bytes(arena, ranges):
    """Offsets of what the next owner reads: file header, index, headers and records of entries."""
    index = arena.view.size_bytes
    offsets = [*range(128), *range(index, index + ROW_BYTES * (len(ranges) + 2))]
    for range_ in ranges:
        end = range_.offset + (range_.nbytes + 63) // 64 * 64
        offsets += [*range(range_.offset, range_.offset + 32), *range(end, end + 256)]
    return offsets[::2]


def test_damage_is_detected_or_harmless(arena, config, shm):
    """One bit of each byte that is read, flipped before the take-over: at worst there is a new arena."""
    ranges = {}
    for key, make, kind in (("a", write, "processed"), ("b", write_encoded, "encoded"), ("c", write, "processed")):
        with make(arena, key) as pin:
            ranges[key, kind] = pin.range
    good, name = arena.path.read_bytes(), arena.path.name
    offsets = damaged_bytes(arena, ranges.values())
    random_bits = random.Random(25)
    folder = Path(shm, "damaged")
    folder.mkdir()
    config = ArenaConfig(size_bytes=16 * PART, directory=str(folder))
    path, num_new = folder / name, 0
    for offset in offsets:
        if not path.exists():
            path.write_bytes(good)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([good[offset] ^ 1 << random_bits.randrange(8)]))
        later = Arena.open(config, lineage=LINEAGE)
        if later.was_adopted:
            for (key, kind), range_ in ranges.items():
                assert content(later, key, kind) in (None, set(fill(key)))
                pin = later.claim(range_)
                assert (pin is not None) == later.contains(key, kind), "an entry is there as a whole, or not at all"
                if pin is not None:
                    pin.release()
        num_new += not later.was_adopted
        later.close()
        for left in folder.iterdir():
            left.unlink()
    assert num_new > len(offsets) // 4
    shutil.rmtree(folder)


class Owners(RuleBasedStateMachine):
    """Owners of one arena, each of which is killed, against a model of what its clients hold and it has cached."""

    def __init__(self):
        super().__init__()
        self.shm = f"/dev/shm/medialane-test-{os.getpid()}-{random.getrandbits(40):x}"
        os.mkdir(self.shm)
        self.config = ArenaConfig(size_bytes=16 * PART, directory=self.shm)
        self.arena = Arena.open(self.config, lineage=LINEAGE)
        self.num_made = 0
        self.pins = {}  # by key
        self.writing = {}
        self.cached = {}

    @rule(num_bytes=st.sampled_from([10, 5000, 60_000, 250_000]), hold=st.booleans())
    def publish(self, num_bytes, hold):
        self.num_made += 1
        key = f"key {self.num_made}"
        with suppress(ArenaFull):
            pin = write(self.arena, key, num_bytes)
            self.cached[key] = pin.range
            if hold:
                self.pins[key] = pin
            else:
                pin.release()

    @rule()
    def start_writing(self):
        self.num_made += 1
        with suppress(ArenaFull):
            self.writing[self.num_made] = self.arena.reserve(5000, "encoded", writer=self.num_made)

    @rule(data=st.data())
    def end_writing(self, data):
        if self.writing:
            self.writing.pop(data.draw(st.sampled_from(sorted(self.writing)))).abandon()

    @rule(data=st.data())
    def release(self, data):
        if self.pins:
            self.pins.pop(data.draw(st.sampled_from(sorted(self.pins)))).release()

    @rule()
    def kill(self):
        known = {key for key in self.cached if self.arena.contains(key)}
        before, held, writing = self.arena, self.pins, self.writing
        num_entries = before.stats().num_entries
        before.close(keep=True)
        self.arena = Arena.open(self.config, lineage=LINEAGE)
        assert self.arena.was_adopted
        assert {key for key in self.cached if self.arena.contains(key)} == known
        assert self.arena.stats().num_entries == num_entries
        self.pins = {key: self.arena.claim(pin.range) for key, pin in held.items()}
        assert None not in self.pins.values()
        self.writing = {each.writer: each.reservation for each in self.arena.unfinished()}
        assert {n: r.range for n, r in self.writing.items()} == {n: r.range for n, r in writing.items()}
        self.arena.end_takeover()
        for pin in held.values():
            pin.release()
        for reservation in writing.values():
            reservation.abandon()

    @invariant()
    def held_bytes_are_in_place(self):
        for key, pin in self.pins.items():
            assert set(bytes(self.arena.view.entry(pin.range)[64:])) == set(fill(key))

    @invariant()
    def every_byte_is_accounted_for(self):
        stats = self.arena.stats()
        assert stats.free_bytes + stats.writing_bytes + stats.published_bytes == stats.size_bytes
        assert (stats.num_leases, stats.num_reservations) == (len(self.pins), len(self.writing))

    def teardown(self):
        for held in self.pins.values():
            held.release()
        for reservation in self.writing.values():
            reservation.abandon()
        self.arena.clear()
        stats = self.arena.stats()
        assert stats.free_bytes == stats.size_bytes
        self.arena.close()
        assert os.listdir(self.shm) == []
        os.rmdir(self.shm)


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
