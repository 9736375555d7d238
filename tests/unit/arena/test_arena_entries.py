"""The entry table: its life cycle by table, its invariants against a naive model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from medialane.arena.entries import KINDS, Entry, EntryTable, State
from medialane.types.errors import ArenaFull
from medialane.types.tensor import ArenaRange

UNIT = 64
START = 4096
ARENA = "ab" * 16


class Freed(list):
    """Records ranges as they are freed."""

    def __call__(self, range_):
        self.append(range_)


def make(units, **shares):
    freed = Freed()
    table: EntryTable[str] = EntryTable(ARENA, START, units * UNIT, freed, shares=shares)
    return table, freed


def cached(table, key, units=1, kind="processed"):
    """Publish an entry of `units` under `key` and release it."""
    entry, _ = table.publish(table.reserve(units * UNIT, kind), key, key.upper())
    table.unpin(entry)
    return entry


def test_entries_start_after_the_header_with_unique_generations():
    table, _ = make(4)
    seen = []
    for _ in range(6):
        entry = table.reserve(UNIT)
        assert entry.range.offset == START
        seen.append(entry.range.generation)
        table.abandon(entry)
    assert seen == sorted(set(seen))
    assert seen[0] > 0


def test_published_entry_is_found_until_it_is_evicted():
    table, freed = make(4)
    entry = cached(table, "a")
    assert table.contains("a")
    found = table.lookup("a")
    assert found == (entry, "A")
    assert not table.evict("a"), "pinned"
    table.unpin(entry)
    assert table.evict("a")
    assert not table.evict("a")
    assert table.lookup("a") is None
    assert freed == [entry.range]
    assert entry.state is State.FREED
    stats = table.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_evictions, stats.free_bytes) == (1, 1, 1, 4 * UNIT)


def test_least_recently_used_entry_is_evicted():
    table, freed = make(3)
    a, b, c = (cached(table, key) for key in "abc")
    table.unpin(table.lookup("a")[0])
    table.reserve(UNIT)
    assert freed == [b.range]
    table.reserve(UNIT)
    assert freed == [b.range, c.range]
    assert table.contains("a")
    assert a.state is State.PUBLISHED


def test_freed_range_is_announced_before_reuse():
    events = []
    table: EntryTable[str] = EntryTable(ARENA, START, UNIT, lambda r: events.append(("freed", r.generation)))
    old = cached(table, "a")
    new = table.reserve(UNIT)
    events.append(("reserved", new.range.generation))
    assert new.range.offset == old.range.offset
    assert events == [("freed", old.range.generation), ("reserved", new.range.generation)]


def test_publishing_an_existing_key_keeps_the_older_entry():
    table, freed = make(4)
    old, _ = table.publish(table.reserve(UNIT), "a", "old")
    new = table.reserve(UNIT)
    assert table.publish(new, "a", "new") == (old, "old")
    assert freed == [new.range]
    assert (old.pins, table.stats().num_leases, table.stats().num_entries) == (2, 2, 1)


def unkeyed(generation, kind="processed"):
    """An entry of one unit of an earlier owner, without a key; generation 1 is the first of the arena."""
    return Entry(ArenaRange(ARENA, START + (generation - 1) * UNIT, UNIT, generation), UNIT, kind)


def test_unkeyed_entry_is_freed_with_its_last_pin():
    table, freed = make(4)
    entry = unkeyed(1)
    table.restore(1, [], [(entry, "", None)])
    assert table.pin_range(entry.range) == (entry, None)
    table.pin(entry)
    table.unpin(entry)
    assert freed == []
    table.unpin(entry)
    assert freed == [entry.range]


def test_full_of_pinned_entries_raises_without_evicting():
    table, freed = make(4)
    table.reserve(UNIT)
    cached(table, "a")
    table.publish(table.reserve(UNIT), "c", "C")
    cached(table, "b")
    with pytest.raises(ArenaFull) as caught:
        table.reserve(2 * UNIT)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert freed == []
    assert table.contains("a")
    assert table.contains("b")


def test_entry_that_can_never_fit_is_not_retryable():
    table, _ = make(4)
    cached(table, "a")
    with pytest.raises(ArenaFull) as caught:
        table.reserve(4 * UNIT + 1)
    assert caught.value.retry_after_s is None
    assert table.contains("a")


def test_clear_spares_pinned_entries():
    table, _ = make(6)
    cached(table, "a")
    cached(table, "b")
    table.lookup("b")
    writing = table.reserve(UNIT)
    assert table.clear() == 1
    assert not table.contains("a")
    assert table.contains("b")
    assert writing.state is State.WRITING


@pytest.mark.parametrize("life", ["published", "abandoned"])
def test_only_an_entry_being_written_can_be_taken_over(life):
    table, _ = make(4)
    entry = table.reserve(UNIT)
    if life == "published":
        table.publish(entry, "a", "A")
    else:
        table.abandon(entry)
    with pytest.raises(RuntimeError, match="not being written"):
        table.abandon(entry)
    with pytest.raises(RuntimeError, match="not being written"):
        table.publish(entry, "b", "B")


def test_entry_of_another_table_is_rejected():
    table, _ = make(4)
    other, _ = make(4)
    table.reserve(UNIT)
    with pytest.raises(RuntimeError, match="not being written"):
        table.abandon(other.reserve(UNIT))


def test_pins_require_a_published_entry_and_never_go_below_zero():
    table, _ = make(4)
    entry = table.reserve(UNIT)
    with pytest.raises(RuntimeError, match="writing"):
        table.pin(entry)
    with pytest.raises(RuntimeError, match="not pinned"):
        table.unpin(entry)
    table.abandon(entry)
    with pytest.raises(RuntimeError, match="freed"):
        table.pin(entry)


def test_keys_are_separate_per_kind():
    table, _ = make(4)
    entries = {kind: cached(table, "a", kind=kind) for kind in KINDS}
    for kind, entry in entries.items():
        assert table.lookup("a", kind)[0] is entry
        table.unpin(entry)
    assert table.evict("a", "encoded")
    assert [table.contains("a", kind) for kind in KINDS] == [False, True, True, True]


def test_kind_may_use_all_unused_space():
    table, freed = make(4, encoded=0.25)
    for key in "abcd":
        cached(table, key, kind="encoded")
    assert freed == []
    assert (table.stats().encoded_bytes, table.stats().free_bytes) == (4 * UNIT, 0)


def test_kind_over_its_share_is_evicted_before_older_entries_of_others():
    table, _ = make(4, encoded=0.25)
    cached(table, "old")
    for key in "abc":
        cached(table, key, kind="encoded")
    cached(table, "new")
    assert [table.contains(key, "encoded") for key in "abc"] == [False, True, True]
    cached(table, "newer")
    assert [table.contains(key, "encoded") for key in "abc"] == [False, False, True]
    cached(table, "newest")  # encoded is within its share now: plain order of use
    assert (table.contains("old"), table.contains("c", "encoded")) == (False, True)


def test_new_entry_counts_towards_the_share_of_its_kind():
    table, _ = make(4, encoded=0.5)
    cached(table, "old")
    cached(table, "a", kind="encoded")
    cached(table, "b", kind="encoded")
    cached(table, "other")
    cached(table, "c", kind="encoded")
    assert [table.contains(key, "encoded") for key in "abc"] == [False, True, True]
    assert table.contains("old")


def test_other_kinds_are_evicted_if_the_kind_over_its_share_cannot_free_a_hole():
    table, _ = make(4, encoded=0.25)
    for key, kind in (("a", "encoded"), ("x", "processed"), ("b", "encoded"), ("y", "processed")):
        cached(table, key, kind=kind)
    table.reserve(2 * UNIT)
    assert not table.contains("a", "encoded")
    assert not table.contains("x")


def kept(table, keys):
    return [key for key in keys if table.contains(key)]


def test_demoted_entry_is_evicted_before_older_ones_of_any_kind():
    table, _ = make(4)
    for key, kind in (("old", "encoded"), ("a", "processed"), ("b", "processed"), ("c", "processed")):
        cached(table, key, kind=kind)
    table.demote("c")
    table.demote("unknown")
    cached(table, "new")
    assert kept(table, "abc") == ["a", "b"]
    assert table.contains("old", "encoded")


def test_demoted_entry_is_evicted_first_when_its_pins_end():
    table, _ = make(3)
    cached(table, "a")
    entry, _ = table.publish(table.reserve(UNIT), "b", "B")
    table.pin(entry)
    table.demote("b")
    table.unpin(entry)
    cached(table, "c")
    cached(table, "d")
    assert kept(table, "abcd") == ["b", "c", "d"], "it is held"
    table.unpin(entry)
    cached(table, "e")
    assert kept(table, "abcde") == ["c", "d", "e"]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_demoted_entry_that_is_looked_up_counts_as_used(is_pinned):
    table, _ = make(2)
    entry, _ = table.publish(table.reserve(UNIT), "a", "A")
    if not is_pinned:
        table.unpin(entry)
    cached(table, "b")
    table.demote("a")
    table.lookup("a")
    for _ in range(1 + is_pinned):
        table.unpin(entry)
    cached(table, "c")
    assert kept(table, "abc") == ["a", "c"]


def test_trimmed_entry_frees_its_tail():
    table, _ = make(4)
    entry = table.reserve(3 * UNIT, "encoded")
    table.trim(entry, UNIT + 1)
    assert entry.range.nbytes == UNIT + 1
    stats = table.stats()
    assert (stats.writing_bytes, stats.encoded_bytes, stats.free_bytes) == (2 * UNIT, 2 * UNIT, 2 * UNIT)
    assert stats.largest_hole_bytes == 2 * UNIT
    with pytest.raises(ValueError, match="cannot be trimmed"):
        table.trim(entry, UNIT + 2)
    table.publish(entry, "a", "A")
    with pytest.raises(RuntimeError, match="not being written"):
        table.trim(entry, UNIT)


class EntryMachine(RuleBasedStateMachine):
    """Against a model that only knows what must never happen: a held byte given away, a wrong count."""

    UNITS = 24
    writing = Bundle("writing")
    pinned = Bundle("pinned")
    KEYS = st.sampled_from("abcde")
    KIND = st.sampled_from(KINDS)
    SHARES = {"encoded": 0.25, "decoded": 0.5}  # noqa: RUF012 - the machine is made once a run

    def __init__(self):
        super().__init__()
        self.freed = Freed()
        self.table: EntryTable[int] = EntryTable(ARENA, START, self.UNITS * UNIT, self.freed, shares=self.SHARES)
        self.unclaimed = [unkeyed(number, kind) for number, kind in enumerate(KINDS, 1)]
        self.table.restore(len(self.unclaimed), [], [(entry, "", None) for entry in self.unclaimed])
        #: Per unit the entry that has it.
        self.owner = [*self.unclaimed, *[None] * (self.UNITS - len(self.unclaimed))]
        self.pins = dict.fromkeys(self.unclaimed, 0)  # entry -> pins; every published entry
        self.keys = {}  # kind and key -> entry
        self.written = set()
        self.hits = self.misses = 0

    def settle(self):
        """Take what the table freed out of the model; none of it may have been held."""
        for range_ in self.freed:
            entries = {e for e in self.owner if e is not None and e.range.generation == range_.generation}
            assert len(entries) == 1, "freed twice, or never there"
            entry = entries.pop()
            assert entry not in self.written, "freed while it was written"
            assert not self.pins.pop(entry, 0), "freed while it was pinned"
            self.owner = [None if e is entry else e for e in self.owner]
            self.keys = {k: e for k, e in self.keys.items() if e is not entry}
        self.freed.clear()

    def largest_possible_hole(self, kinds=KINDS):
        """The largest hole that evicting entries of these kinds can make."""
        best = run = 0
        for entry in self.owner:
            held = entry in self.written or entry in self.unclaimed or self.pins.get(entry)
            run = 0 if held or (entry is not None and entry.kind not in kinds) else run + 1
            best = max(best, run)
        return best

    def over_share(self, kind, units):
        taken = {k: units if k == kind else 0 for k in KINDS}
        for entry in self.owner:
            if entry is not None:
                taken[entry.kind] += 1
        return [k for k in KINDS if taken[k] > self.SHARES.get(k, 1.0) * self.UNITS]

    @rule(target=writing, units=st.integers(1, 10), slack=st.integers(0, 63), kind=KIND)
    def reserve(self, units, slack, kind):
        possible = self.largest_possible_hole() >= units
        over = self.over_share(kind, units)
        enough_over = self.largest_possible_hole(over) >= units
        kinds = {e.range.generation: e.kind for e in self.owner if e is not None}
        try:
            entry = self.table.reserve(units * UNIT - slack, kind)
        except ArenaFull:
            assert not possible
            assert not self.freed, "evicted for nothing"
            return multiple()
        assert possible
        if enough_over:
            assert {kinds[r.generation] for r in self.freed} <= {*over}, "a kind within its share made room"
        self.settle()
        first = (entry.range.offset - START) // UNIT
        assert self.owner[first : first + units] == [None] * units, "bytes of a live entry were given away"
        self.owner[first : first + units] = [entry] * units
        self.written.add(entry)
        return entry

    @rule(target=writing, entry=consumes(writing), nbytes=st.integers(1, 10 * UNIT))
    def trim(self, entry, nbytes):
        nbytes = min(nbytes, entry.range.nbytes)
        self.table.trim(entry, nbytes)
        first = self.owner.index(entry)
        left = -(-nbytes // UNIT)
        self.owner = [None if e is entry and i >= first + left else e for i, e in enumerate(self.owner)]
        return entry

    @rule(entry=consumes(writing))
    def abandon(self, entry):
        self.table.abandon(entry)
        self.written.remove(entry)
        self.settle()
        assert entry not in self.owner

    @rule(target=pinned, entry=consumes(writing), key=KEYS)
    def publish(self, entry, key):
        got, value = self.table.publish(entry, key, entry.range.generation)
        self.written.remove(entry)
        self.settle()
        assert got is self.keys.setdefault((entry.kind, key), entry)
        assert value == got.range.generation
        self.pins[got] = self.pins.get(got, 0) + 1
        return got

    @precondition(lambda self: self.unclaimed)
    @rule(target=pinned)
    def claim(self):
        entry = self.unclaimed.pop()
        assert self.table.pin_range(entry.range) == (entry, None)
        self.pins[entry] = 1
        return entry

    @rule()
    def free_unclaimed(self):
        self.unclaimed.clear()
        self.table.free_unclaimed()
        self.settle()

    @rule(target=pinned, kind=KIND, key=KEYS)
    def lookup(self, kind, key):
        found = self.table.lookup(key, kind)
        if (kind, key) not in self.keys:
            assert found is None
            self.misses += 1
            return multiple()
        entry, value = found
        assert entry is self.keys[kind, key]
        assert value == entry.range.generation
        self.hits += 1
        self.pins[entry] += 1
        return entry

    @rule(target=pinned, entry=pinned)
    def duplicate(self, entry):
        self.table.pin(entry)
        self.pins[entry] += 1
        return entry

    @rule(entry=consumes(pinned))
    def release(self, entry):
        self.pins[entry] -= 1
        self.table.unpin(entry)
        self.settle()
        assert (entry in self.owner) == (self.pins.get(entry, 0) > 0 or entry in self.keys.values())

    @rule(kind=KIND, key=KEYS)
    def evict(self, kind, key):
        idle = (kind, key) in self.keys and not self.pins[self.keys[kind, key]]
        assert self.table.evict(key, kind) == idle
        self.settle()
        assert ((kind, key) in self.keys) == self.table.contains(key, kind)

    @rule(kind=KIND, key=KEYS)
    def demote(self, kind, key):
        self.table.demote(key, kind)

    @rule()
    def clear(self):
        idle = sum(not pins for pins in self.pins.values()) - len(self.unclaimed)
        assert self.table.clear() == idle
        self.settle()

    @invariant()
    def accounts(self):
        stats = self.table.stats()
        units = {e: self.owner.count(e) for e in {*self.owner} - {None}}
        assert stats.free_bytes == self.owner.count(None) * UNIT
        assert stats.writing_bytes == sum(units[e] for e in self.written) * UNIT
        assert stats.published_bytes == sum(units[e] for e in self.pins) * UNIT
        assert stats.pinned_bytes == sum(units[e] for e, pins in self.pins.items() if pins) * UNIT
        by_kind = {kind: sum(n for e, n in units.items() if e.kind == kind) * UNIT for kind in KINDS}
        assert by_kind == {
            "encoded": stats.encoded_bytes,
            "decoded": stats.decoded_bytes,
            "processed": stats.processed_bytes,
            "embedded": stats.embedded_bytes,
        }
        assert stats.free_bytes + stats.writing_bytes + stats.published_bytes == stats.size_bytes
        assert (stats.num_reservations, stats.num_entries) == (len(self.written), len(self.pins))
        assert stats.num_leases == sum(self.pins.values())
        assert (stats.num_hits, stats.num_misses) == (self.hits, self.misses)

    def teardown(self):
        for entry in self.written:
            self.table.abandon(entry)
        for entry, pins in self.pins.items():
            for _ in range(pins):
                self.table.unpin(entry)
        self.table.clear()
        self.table.free_unclaimed()
        assert self.table.stats().largest_hole_bytes == self.UNITS * UNIT


TestEntryMachine = EntryMachine.TestCase
TestEntryMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
