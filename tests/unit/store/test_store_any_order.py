"""Any order of connect, find, send, receive, release, write embeddings, lose the connection, die and replace the store:
no byte is reused while it is held or written, and nothing else is held."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_world import DIRECTORY, ITEM_BYTES, World, pattern, wanted

from medialane.arena import FillWriter
from medialane.arena.layout import COMPLETED_WORD
from medialane.store import HoldPasser, StoreEntries, StoreLink
from medialane.types.errors import HandoverFailed
from waiting import eventually

CONTENTS = st.sampled_from("abcdefgh")
EMBEDDED = st.sampled_from("def")
MAX_CLIENTS = 4


#: What the engine of a worker does with a range for an embedding.
DOES = st.sampled_from(["nothing", "begins to write", "writes"])


class WatchedLink(StoreLink):
    """Notes with which requests holds have arrived."""

    def __init__(self, *address, **settings) -> None:
        super().__init__(*address, **settings)
        self.arrived = set()

    def watch_passed(self, listener):
        super().watch_passed(lambda passed: (listener(passed), self.arrived.add(passed.request_id)))


class Writing:
    """A process of an engine that writes to the range of a fill, from before `stop` to after it."""

    def __init__(self, fill, content, directory) -> None:
        self.fill, self.content = fill, content
        self._writer = FillWriter.open(fill.embedding.tensor.range, directory)
        self._payload = self._writer.__enter__()
        self.write(b"\1")

    @property
    def range(self):
        return self.fill.embedding.tensor.range

    def write(self, byte) -> None:
        self.byte = byte
        self._payload[:] = byte * len(self._payload)

    def complete(self) -> None:
        self.write(pattern(self.content))
        self._writer.__exit__(None, None, None)

    def kill(self) -> None:
        """The kernel drops its locks."""
        error = RuntimeError("killed")
        with suppress(RuntimeError):
            self._writer.__exit__(RuntimeError, error, None)


class Holding(RuleBasedStateMachine):
    """The arena has space for some thirty items; what is freed is overwritten."""

    retention_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr("medialane.store.client.INITIAL_BACKOFF_S", 0.001)
        self.world = self.loop.run_until_complete(self._start())
        self.clients = []
        self.sent = []  # (content, entry) of requests that no worker has received yet
        self.passed_ahead = {}  # request id: (worker, its view of the arena, content, entry), received after its hold
        self.passed = []  # (worker, hold, content, entry)
        self.num_sent = 0
        self.fills = []  # (worker, fill, content) that are not released
        self.writing = []  # by processes of engines, beyond the end of the fill and of the worker
        self.embedded = []  # (worker, content, found embedding)
        self.published = set()  # ranges of fills that others have found completed

    async def _start(self) -> World:
        self.directory = Path(DIRECTORY) / f"medialane-test-{secrets.token_hex(6)}"  # no other test reaps there
        self.directory.mkdir(mode=0o700)
        return await World(self.patches, directory=str(self.directory), revoke_interval_s=0.005).start()

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 10))

    def pick(self, number: int):
        return self.clients[number % len(self.clients)]

    def held(self):
        found = [found for client in self.clients for found in client.holds.values()]
        found += [(content, entry) for _, _, content, entry in self.passed_ahead.values()]
        found += [(content, found.embedding.tensor.range) for _, content, found in self.embedded]
        return found + [(content, entry) for _, _, content, entry in self.passed]

    has_client = precondition(lambda self: self.clients)
    number = st.integers(0, 7)

    @initialize()
    def connect_two(self):
        self.connect()
        self.connect()

    @precondition(lambda self: len(self.clients) < MAX_CLIENTS)
    @rule()
    def connect(self):
        client = self.run(self.world.client(link=WatchedLink))
        client.entries = self.view_of(client)
        self.clients.append(client)

    @has_client
    @rule(which=number, content=CONTENTS)
    def find(self, which, content):
        self.run(self.pick(which).find(content))

    @has_client
    @rule(which=number, hold=number)
    def send(self, which, hold):
        """A gateway sends a request; its own hold may end before a worker asks for one."""
        gateway = self.pick(which)
        if gateway.holds:
            self.sent.append(list(gateway.holds.values())[hold % len(gateway.holds)])

    @has_client
    @rule(which=number, hold=number, to=number)
    def pass_on(self, which, hold, to):
        """A gateway passes a hold to the worker that it sends a request to."""
        gateway, worker = self.pick(which), self.pick(to)
        if gateway.holds:
            content, entry = list(gateway.holds.values())[hold % len(gateway.holds)]
            self.num_sent += 1
            entries = self.run(self._passed(gateway, entry, worker, str(self.num_sent)))
            self.passed_ahead[str(self.num_sent)] = worker, entries, content, entry

    async def _passed(self, gateway, entry, worker, request_id, embedding=()) -> StoreEntries:
        """Return the view of the arena at which the hold has arrived."""
        entries = self.entries(worker)
        HoldPasser(gateway.link, retention_s=0).pass_on(
            [entry], to=worker.link.client_id, request_id=request_id, wanted=embedding
        )
        await eventually(lambda: request_id in worker.link.arrived)
        return entries

    @precondition(lambda self: self.passed_ahead)
    @rule(request=number)
    def receive_after_its_hold(self, request):
        request_id = list(self.passed_ahead)[request % len(self.passed_ahead)]
        worker, entries, content, entry = self.passed_ahead.pop(request_id)
        hold = self.run(entries.hold([entry], passed_with=request_id))
        self.passed.append((worker, hold, content, entry))

    @precondition(lambda self: self.clients and self.sent)
    @rule(to=number, request=number)
    def receive(self, to, request):
        """A worker can hold what anybody holds, and nothing else: its range may have another item's bytes."""
        worker = self.pick(to)
        content, entry = self.sent.pop(request % len(self.sent))
        self.run(self._settled())
        is_held = (content, entry) in self.held()
        try:
            hold = self.run(self.entries(worker).hold([entry]))
        except HandoverFailed:
            assert not is_held
        else:
            self.passed.append((worker, hold, content, entry))
            assert is_held or self.retention_s

    def entries(self, worker) -> StoreEntries:
        """Return the worker's view of the arena: unless it retains holds, another one for each request, so that the
        holds of all requests are counted."""
        return worker.entries if self.retention_s else self.view_of(worker)

    def view_of(self, client) -> StoreEntries:
        """A request may take any number of steps to arrive after its holds."""
        return StoreEntries(client.link, retention_s=self.retention_s, max_age_s=60)

    @has_client
    @rule(which=number, hold=number)
    def release(self, which, hold):
        client = self.pick(which)
        if client.holds:
            client.release(list(client.holds)[hold % len(client.holds)])

    @precondition(lambda self: self.passed)
    @rule(which=number)
    def finish_request(self, which):
        _, held, _, _ = self.passed.pop(which % len(self.passed))
        self.loop.call_soon(held.release)
        self.run(asyncio.sleep(0))

    @has_client
    @rule(which=number, content=EMBEDDED, does=DOES)
    def find_embedding(self, which, content, does):
        """Found if it is cached; if no other worker writes it, the engine of this one may."""
        self.run(self._settled())
        worker = self.pick(which)
        self._use_embedding(worker, self.entries(worker), content, does)

    @has_client
    @rule(which=number, hold=number, to=number, embedded=EMBEDDED, does=DOES)
    def find_passed_embedding(self, which, hold, to, embedded, does):
        """As if the worker had asked, if the gateway has passed the embedding with a hold."""
        gateway, worker = self.pick(which), self.pick(to)
        if gateway.holds:
            content, entry = list(gateway.holds.values())[hold % len(gateway.holds)]
            self.num_sent += 1
            self.run(self._settled())
            entries = self.run(self._passed(gateway, entry, worker, str(self.num_sent), [wanted(embedded)]))
            held = self.run(entries.hold([entry], passed_with=str(self.num_sent)))
            self.passed.append((worker, held, content, entry))
            self._use_embedding(worker, entries, embedded, does, passed_with=str(self.num_sent))

    def _use_embedding(self, worker, entries, content, does, *, passed_with=None):
        filling = [fill for _, fill, other in self.fills if other == content]
        ranges = {fill.embedding.tensor.range for fill in filling} - self.published
        is_completed = any(self.world.arena.view.words[entry.offset // 8 + COMPLETED_WORD] for entry in ranges)
        is_cached = is_completed or self.world.arena.contains(content * 64, "embedded")
        found = self.run(entries.embedding(wanted(content), wait_s=0, passed_with=passed_with))
        if found is None:
            assert (ranges and not is_completed) or self.is_full()
        elif found.is_filled:
            assert is_cached or self.retention_s
            self.embedded.append((worker, content, found))
            self.published.add(found.embedding.tensor.range)
        else:
            assert not is_cached
            assert not ranges
            self.fills.append((worker, found, content))
            if does != "nothing":
                self.writing.append(Writing(found, content, self.world.directory))
            if does == "writes":
                self.stop_writing(-1, completes=True)

    @has_client
    @rule(which=number, content=EMBEDDED)
    def write_embedding(self, which, content):
        """As most do: found, or encoded and written."""
        self.find_embedding(which, content, "writes")
        if self.fills and self.fills[-1][2] == content:
            self.end_fill(-1)

    def is_full(self):
        return self.world.arena.stats().largest_hole_bytes < 2 * ITEM_BYTES

    @precondition(lambda self: self.writing)
    @rule(which=number, completes=st.booleans())
    def stop_writing(self, which, completes):
        found = self.writing.pop(which % len(self.writing))
        if completes:
            found.complete()
        else:
            found.kill()

    @precondition(lambda self: self.fills)
    @rule(which=number)
    def end_fill(self, which):
        _, fill, _ = self.fills.pop(which % len(self.fills))
        self.loop.call_soon(fill.hold.release)
        self.run(asyncio.sleep(0))

    @precondition(lambda self: self.embedded)
    @rule(which=number)
    def release_embedding(self, which):
        _, _, found = self.embedded.pop(which % len(self.embedded))
        self.loop.call_soon(found.hold.release)
        self.run(asyncio.sleep(0))

    @has_client
    @rule(which=number)
    def lose_connection(self, which):
        self.run(self.pick(which).lose_connection())

    @rule()
    def replace_store(self):
        """The next one takes over the arena."""
        links = [(client.link, client.cable, client.cable.num_made) for client in self.clients]
        self.run(self.world.replace_store())
        self.run(
            eventually(lambda: all(cable.num_made > made and link.status is not None for link, cable, made in links))
        )

    @has_client
    @rule(which=number)
    def die(self, which):
        client = self.pick(which)
        self.clients.remove(client)
        self.passed = [found for found in self.passed if found[0] is not client]
        self.fills = [found for found in self.fills if found[0] is not client]
        self.embedded = [found for found in self.embedded if found[0] is not client]
        self.passed_ahead = {name: found for name, found in self.passed_ahead.items() if found[0] is not client}
        self.run(client.exit())

    @rule()
    def evict(self):
        self.world.arena.clear()

    @invariant()
    def held_bytes_are_intact(self):
        for content, entry in self.held():
            assert self.world.bytes_of(entry) == pattern(content) * ITEM_BYTES

    @invariant()
    def ranges_are_not_reused_while_they_are_written(self):
        for writing in self.writing:
            assert self.world.bytes_of(writing.range) == writing.byte * ITEM_BYTES

    def teardown(self):
        try:
            while self.clients:
                self.die(0)
            self.run(self._settled())
            self.ranges_are_not_reused_while_they_are_written()
            while self.writing:
                self.stop_writing(0, completes=False)
            self.run(self._settled())
        finally:
            self.run(self.world.close())
            self.loop.close()
            for path in self.directory.iterdir():
                path.unlink()
            self.directory.rmdir()
            self.patches.undo()

    async def _settled(self) -> None:
        """Wait until the store has processed every release and exit: it holds for its clients what they hold, and for
        processes of their engines what these write."""
        stats = self.world.arena.stats
        is_counted = not (self.retention_s and self.clients)  # otherwise, holds are shared and retained
        num_held = len(self.held())
        fills = {fill.embedding.tensor.range for _, fill, _ in self.fills} - self.published
        ranges = fills | {found.range for found in self.writing}
        embeddings = self.world.items.embeddings
        await eventually(
            lambda: (
                stats().num_reservations == len(ranges)
                and embeddings.stats.num_writing <= len(fills)
                and (stats().num_leases == num_held or not is_counted)
            ),
            f"the store holds what its {len(self.clients)} clients hold",
            5,
            more=lambda: f"{stats().num_leases} pins, {num_held} held",
        )


Holding.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes: more than a test's timeout
)
TestAnyOrder = Holding.TestCase


class Retaining(Holding):
    """Workers share and retain their holds."""

    retention_s = 0.05


Retaining.TestCase.settings = Holding.TestCase.settings
TestAnyOrderWithRetention = Retaining.TestCase
