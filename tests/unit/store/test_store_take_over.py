"""A store that is killed, and the next one, which takes over its arena: in processes of their own, and so are clients
that stop in the middle of a write. What stores free is poisoned, and no client may ever read that."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
from store_world import ITEM_BYTES, RPC, Client, feature, pattern, reference, write

import medialane
from medialane.store import FindItem, HeldEntry, StoreClient, StoreEntries, StoreHello
from medialane.types.errors import ArenaFull, HandoverFailed, MedialaneError
from waiting import comes_true, eventually

#: A test starts up to seven processes, which import for seconds each on a loaded machine.
pytestmark = pytest.mark.timeout(60)

HERE = Path(__file__).parent


class Process:
    """A program of this folder, whose lines are read as they come."""

    def __init__(self, *words: str, prefix: tuple[str, ...] = ()) -> None:
        self._words = (*prefix, sys.executable, "-u", *words)

    async def start(self) -> Process:
        paths = [str(Path(medialane.__file__).parents[1]), str(HERE.parents[1])]
        self._process = await asyncio.create_subprocess_exec(
            *self._words,
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=asyncio.subprocess.PIPE,
        )
        self.pid = self._process.pid
        return self

    async def says(self, line: str, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            assert (await self._process.stdout.readline()).decode().strip() == line

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def wait(self) -> int:
        async with asyncio.timeout(10):
            await self._process.stdout.read()
            return await self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def kill(self) -> None:
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
        await self.wait()


class Host:
    """A store in a process of its own, with an arena directory that no other test reaps, and its clients."""

    wait_timeout_s = 20.0

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.address = f"unix:/tmp/medialane-test-{secrets.token_hex(6)}.sock"
        self._processes: list[Process] = []
        self._clients: list[Client] = []

    async def start_store(self) -> None:
        """Return when it serves."""
        self.store = await self._start("pattern_store.py", self.address, self.directory)
        await self.store.says("serves")

    async def kill_store(self) -> None:
        self.store.signal(signal.SIGKILL)
        await self.store.wait()

    async def replace_store(self) -> None:
        await self.kill_store()
        await self.start_store()

    async def client(self) -> Client:
        client = Client(self)
        self._clients.append(client)
        await asyncio.wait_for(client.link.ready(), 10)
        return client

    async def process(self, command: str, content: str, *, prefix: tuple[str, ...] = ()) -> Process:
        return await self._start("pattern_client.py", self.address, self.directory, command, content, prefix=prefix)

    def evict(self) -> None:
        self.store.signal(signal.SIGUSR1)

    async def evicts(self, content: str, client: Client) -> None:
        """Have the store evict the item, which nobody holds."""

        async def is_evicted() -> bool:
            self.evict()
            found = await find(client, content)
            client.link.release(found.hold_id, found.range.arena)
            return not found.is_hit

        await eventually(is_evicted)

    @property
    def arenas(self) -> list[str]:
        return sorted(path.name for path in Path(self.directory).glob("*.arena"))

    async def end(self) -> None:
        for client in self._clients:
            await client.exit()
        for process in self._processes:
            await process.kill()

    async def _start(self, *words: str, prefix: tuple[str, ...] = ()) -> Process:
        process = await Process(*words, prefix=prefix).start()
        self._processes.append(process)
        return process


@pytest.fixture
async def host():
    directory = Path("/dev/shm") / f"medialane-test-{secrets.token_hex(6)}"
    directory.mkdir(mode=0o700)
    host = Host(str(directory))
    try:
        await host.start_store()
        yield host
    finally:
        await host.end()
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


async def arena_stats(client: Client):
    await eventually(lambda: client.link.status is not None)
    await client.link.refresh(5)
    return client.link.status.stats.arena


def bytes_of(client: Client, content: str, hold_id: int) -> bytes:
    _, entry = client.holds[hold_id]
    return bytes(client.link.tensor(feature(content, entry).tensors[0]))


async def find(client: Client, content: str):
    return await client.link.call(lambda call_id: FindItem(call_id, reference(content), "processed"))


async def test_what_was_cached_is_a_hit_and_what_is_held_stays(host):
    gateway, other = await host.client(), await host.client()
    held = await gateway.find("a")
    other.release(await other.find("b"))
    arena = gateway.link.arena
    told = []
    gateway.link.watch(told.append)
    await host.kill_store()
    assert bytes_of(gateway, "a", held) == pattern("a") * ITEM_BYTES
    await host.start_store()
    found = await find(other, "b")
    assert found.is_hit
    assert found.range.arena == arena == gateway.link.arena
    host.evict()
    assert (await find(other, "a")).range == gateway.holds[held][1]
    assert bytes_of(gateway, "a", held) == pattern("a") * ITEM_BYTES
    assert len(told) == 1, "the arena is the same: nobody has to map it again"
    assert not (await find(other, "c")).is_hit


async def test_hit_follows_the_start_of_the_store_at_once(host):
    """Our own part of the time between kill -9 and the first hit: that of Python's start and imports is not."""
    gateway = await host.client()
    gateway.release(await gateway.find("a"))
    await host.kill_store()
    finding = asyncio.create_task(find(gateway, "a"))
    await host.start_store()
    started = time.monotonic()
    assert (await finding).is_hit
    assert time.monotonic() - started < 1.5


async def test_new_items_wait_only_for_the_clients_to_return(host):
    gateway, other = await host.client(), await host.client()
    await other.find("a")
    await host.replace_store()
    started = time.monotonic()
    assert not (await find(gateway, "b")).is_hit
    assert time.monotonic() - started < 1.5


async def test_hold_that_is_released_while_the_store_is_away_is_not_kept(host):
    gateway = await host.client()
    kept, released = await gateway.find("a"), await gateway.find("b")
    await host.kill_store()
    gateway.release(released)
    await host.start_store()
    await host.evicts("b", gateway)
    assert bytes_of(gateway, "a", kept) == pattern("a") * ITEM_BYTES


async def test_two_clients_with_the_same_entry_hold_it_until_both_have_released_it(host):
    one, two = await host.client(), await host.client()
    first, second = await one.find("a"), await two.find("a")
    await host.replace_store()
    assert (await find(one, "a")).is_hit
    one.release(first)
    await eventually(lambda: two.link.status is not None)
    host.evict()
    assert bytes_of(two, "a", second) == pattern("a") * ITEM_BYTES


async def test_worker_holds_what_its_gateway_holds_although_it_returns_first(host):
    """A request that is on its way when the store is killed: the gateway has not listed its holds."""
    gateway, worker = await host.client(), await host.client()
    _, entry = gateway.holds[await gateway.find("a")]
    stopped = await host.process("hold", "b")
    await stopped.says("holds")
    await host.kill_store()
    stopped.signal(signal.SIGSTOP)  # the take-over goes on
    gateway.running.cancel()
    await asyncio.wait([gateway.running])
    holding = asyncio.create_task(StoreEntries(worker.link).hold([entry], passed_with="r"))
    await host.start_store()
    (await asyncio.wait_for(holding, 5)).release()
    stopped.signal(signal.SIGCONT)


async def test_nothing_is_evicted_before_a_late_client_has_returned(host):
    gateway, late = await host.client(), await host.process("hold", "a")
    await late.says("holds")
    gateway.release(await gateway.find("b"))
    late.signal(signal.SIGSTOP)
    await host.replace_store()
    host.evict()
    for content in "ab":
        cached = await find(gateway, content)
        assert cached.is_hit
        gateway.link.release(cached.hold_id, cached.range.arena)
    free_bytes = (await arena_stats(gateway)).free_bytes
    contents = [chr(160 + number) for number in range(free_bytes // (ITEM_BYTES + 128))]
    found = [await find(gateway, content) for content in contents]  # what is free is used after a while
    for item in found:
        gateway.link.release(item.hold_id, item.range.arena)
    with pytest.raises(ArenaFull):
        await find(gateway, "~")
    late.signal(signal.SIGCONT)
    await host.evicts("b", gateway)
    assert not await comes_true(lambda: late.has_ended, 0.3), "it has read what it holds"


@pytest.mark.parametrize("prefix", [(), ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")])
async def test_client_that_is_killed_while_the_store_is_away_holds_nothing(host, prefix):
    """Also in another PID namespace, in which the store cannot see it."""
    gateway, other = await host.client(), await host.process("hold", "a", prefix=prefix)
    await other.says("holds")
    await host.kill_store()
    await other.kill()
    await host.start_store()
    await eventually(lambda: gateway.link.status is not None)

    async def is_free() -> bool:
        return (await arena_stats(gateway)).num_leases == 0

    await eventually(is_free)


async def test_range_of_a_stopped_writer_is_not_reused_before_it_has_returned(host):
    writer, gateway = await host.process("send", "u"), await host.client()
    await writer.says("writes")
    await host.replace_store()
    assert (await arena_stats(gateway)).num_reservations == 1
    contents = [chr(97 + number) for number in range(15)]
    for content in contents:
        await find(gateway, content)
    assert (await arena_stats(gateway)).num_reservations == 1
    writer.signal(signal.SIGCONT)
    await writer.says("sent")
    for content in contents:
        found = await find(gateway, content)
        assert bytes(gateway.link.tensor(found.feature.tensors[0])) == pattern(content) * ITEM_BYTES
    assert (await arena_stats(gateway)).num_reservations == 0


async def test_range_of_a_writer_that_is_killed_is_freed(host):
    writer, gateway = await host.process("send", "u"), await host.client()
    await writer.says("writes")
    await host.replace_store()
    await writer.kill()

    async def is_freed() -> bool:
        return (await arena_stats(gateway)).num_reservations == 0

    await eventually(is_freed)


async def test_embedding_that_is_being_written_is_found_when_it_is_written(host):
    writer, reader = await host.process("encode", "e"), await host.client()
    await writer.says("writes")
    await host.replace_store()
    await arena_stats(reader)
    assert await reader.embedding("e") is None, "another client writes it"
    writer.signal(signal.SIGCONT)
    await writer.says("written")

    async def is_found() -> bool:
        found = await reader.embedding("e")
        return found is not None and found.is_filled

    await eventually(is_found)


async def test_embedding_that_is_written_while_the_store_is_away_is_found(host):
    worker, reader = await host.client(), await host.client()
    fill = await worker.embedding("e")
    await host.kill_store()
    write(fill, "e", host.directory)
    fill.hold.release()
    await host.start_store()
    await eventually(lambda: reader.link.status is not None)
    found = await reader.embedding("e", wait_s=5)
    assert found.is_filled
    assert found.embedding.tensor == fill.embedding.tensor


async def test_embedding_whose_writer_has_given_up_is_written_by_another(host):
    worker, other = await host.client(), await host.client()
    fill = await worker.embedding("e")
    await host.kill_store()
    fill.hold.release()
    await host.start_store()
    await eventually(lambda: other.link.status is not None)
    again = await other.embedding("e", wait_s=5)
    assert not again.is_filled
    write(again, "e", host.directory)
    again.hold.release()
    with pytest.raises(HandoverFailed):
        write(fill, "f", host.directory)


async def test_store_that_is_killed_during_a_take_over_is_followed_by_another(host):
    gateway, late, writer = await host.client(), await host.process("hold", "a"), await host.process("send", "u")
    await late.says("holds")
    await writer.says("writes")
    held = await gateway.find("b")
    late.signal(signal.SIGSTOP)
    for _ in range(3):
        await host.replace_store()
        assert (await find(gateway, "a")).is_hit
    late.signal(signal.SIGCONT)
    writer.signal(signal.SIGCONT)
    await writer.says("sent")
    host.evict()
    assert bytes_of(gateway, "b", held) == pattern("b") * ITEM_BYTES
    assert not await comes_true(lambda: late.has_ended, 0.3), "it has read what it holds"
    assert len(host.arenas) == 1


async def test_arena_whose_table_does_not_know_a_hold_is_replaced(host):
    gateway = await host.client()
    held = await gateway.find("a")
    await host.kill_store()
    _, entry = gateway.holds[held]
    arena, read = gateway.link.arena, gateway.link.tensor(feature("a", entry).tensors[0])
    await host.start_store()
    unknown = msgspec.structs.replace(entry, generation=entry.generation + 1000)
    hello = StoreHello(client_id="another", arena=arena, slot=1, holds={7: HeldEntry(unknown)})
    with pytest.raises(MedialaneError):  # the store exits at once, changing nothing
        await StoreClient(RPC).connect(host.address, hello)
    assert await host.store.wait() == 0
    assert bytes(read) == pattern("a") * ITEM_BYTES, "nothing was reused"
    await host.start_store()
    assert not (await find(gateway, "a")).is_hit
    assert gateway.link.arena != arena
    assert gateway.link.num_held == 1
