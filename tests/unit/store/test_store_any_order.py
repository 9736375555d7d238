"""Any order of connect, find, pass on, release, lose the connection and die: no byte is reused while it is held."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_world import ITEM_BYTES, World, pattern

from medialane.core.errors import HandoverFailed
from medialane.store.holds import StoreEntries
from waiting import eventually

CONTENTS = st.sampled_from("abcdefgh")
MAX_CLIENTS = 4


class Holding(RuleBasedStateMachine):
    """The arena has space for some thirty items; what is freed is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patches = pytest.MonkeyPatch()
        self.world = self.loop.run_until_complete(self._start())
        self.clients = []
        self.passed = []  # (worker, hold, content, entry)

    async def _start(self) -> World:
        return await World(self.patches).start()

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 10))

    def pick(self, number: int):
        return self.clients[number % len(self.clients)]

    has_client = precondition(lambda self: self.clients)
    number = st.integers(0, 7)

    @precondition(lambda self: len(self.clients) < MAX_CLIENTS)
    @rule()
    def connect(self):
        self.clients.append(self.run(self.world.client()))

    @has_client
    @rule(which=number, content=CONTENTS)
    def find(self, which, content):
        self.run(self.pick(which).find(content))

    @has_client
    @rule(which=number, to=number, hold=number, dropped_first=st.booleans())
    def pass_on(self, which, to, hold, dropped_first):
        """A gateway sends a request; its own hold may end before the worker has asked for one."""
        gateway, worker = self.pick(which), self.pick(to)
        if not gateway.holds or gateway is worker:
            return
        hold_id = list(gateway.holds)[hold % len(gateway.holds)]
        content, entry = gateway.holds[hold_id]
        if dropped_first:
            gateway.release(hold_id)
        try:
            held = self.run(StoreEntries(worker.link).hold([entry]))
        except HandoverFailed:
            assert dropped_first
        else:
            self.passed.append((worker, held, content, entry))

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
        held.release()

    @has_client
    @rule(which=number)
    def lose_connection(self, which):
        self.run(self.world.lose_connection(self.pick(which)))

    @has_client
    @rule(which=number)
    def die(self, which):
        client = self.pick(which)
        self.clients.remove(client)
        self.passed = [found for found in self.passed if found[0] is not client]
        self.run(client.die())

    @rule()
    def evict(self):
        self.world.arena.clear()

    @invariant()
    def held_bytes_are_intact(self):
        held = [found for client in self.clients for found in client.holds.values()]
        for content, entry in held + [(content, entry) for _, _, content, entry in self.passed]:
            assert self.world.bytes_of(entry) == pattern(content) * ITEM_BYTES

    def teardown(self):
        for client in self.clients:
            self.run(client.die())
        self.run(self._nothing_is_held())
        self.run(self.world.close())
        self.loop.close()
        self.patches.undo()

    async def _nothing_is_held(self) -> None:
        stats = self.world.arena.stats
        await eventually(lambda: not stats().num_leases and not stats().num_reservations)


Holding.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = Holding.TestCase
