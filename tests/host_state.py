"""What the processes of a host hold: compared before and after a fault."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from process_tree import all_pids, arenas_of, command_of, descendants, removed_arenas_of, shared_memory_of

from medialane.store import StoreLink
from medialane.types.stats import StoreStats
from medialane.wire import RpcConfig
from waiting import eventually

SHARED_MEMORY = Path("/dev/shm")
#: Descriptors and process ids in command lines.
FORK_SERVER = "medialane forkserver of store "
NUMBER = re.compile(r"\b\d+\b")


class HostState(msgspec.Struct, frozen=True):
    """`processes` by command line; the `arenas` that they have mapped; how many of them have mapped one, and one whose
    file is removed; what the store has pinned and reserved. `more` is what a test adds."""

    processes: dict[str, int]
    arenas: frozenset[Path]
    num_mapped: int
    num_removed: int
    num_leases: int | None
    num_reservations: int | None
    held_bytes: int | None
    num_preparers: int | None
    more: tuple[object, ...] = ()

    def equals(self, other: HostState) -> bool:
        """Return whether the states differ at most in the arenas whose users they count."""
        return self == msgspec.structs.replace(other, arenas=self.arenas)


async def state_of(pid: int, store: StoreLink, *more: object) -> HostState:
    """Return the state of the processes below `pid` and of their store."""
    stats = await stats_of(store)
    arena = None if stats is None else stats.arena
    pids = _processes(pid)
    return HostState(
        processes=dict(Counter(NUMBER.sub("N", command_of(found)) for found in pids)),
        arenas=frozenset().union(*map(arenas_of, pids)),
        num_mapped=sum(map(len, map(arenas_of, pids))),
        num_removed=sum(map(len, map(removed_arenas_of, pids))),
        num_leases=None if arena is None else arena.num_leases,
        num_reservations=None if arena is None else arena.num_reservations,
        held_bytes=None if arena is None else arena.pinned_bytes + arena.writing_bytes,
        num_preparers=None if stats is None else stats.preparers.num_alive,
        more=more,
    )


def _processes(pid: int) -> list[int]:
    """The processes below `pid`. A fork server that took over from a killed one, its parent, is a child of init: its
    last argument is its store."""
    pids = descendants(pid)
    servers = [(found, command.split()[-1]) for found in all_pids() if FORK_SERVER in (command := command_of(found))]
    adopted = [found for found, store in servers if int(store) in pids]
    return sorted({*pids, *adopted, *(below for found in adopted for below in descendants(found))})


@asynccontextmanager
async def store_link(address: str, directory: Path = SHARED_MEMORY, timeout_s: float = 60) -> AsyncIterator[StoreLink]:
    """The tests' own connection to a store, which holds nothing. It is lost and comes back with the store."""
    link = StoreLink(address, rpc=RpcConfig(), arena_directory=str(directory), wait_timeout_s=timeout_s)
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(timeout_s):
            await link.ready()
        yield link
    finally:
        running.cancel()
        await asyncio.wait([running])


async def stats_of(store: StoreLink) -> StoreStats | None:
    """What the store reports now; None while it is lost."""
    await store.refresh(5)
    return None if (status := store.status) is None else status.stats


@asynccontextmanager
async def as_before(state: Callable[[], Awaitable[HostState]], timeout_s: float = 20) -> AsyncIterator[None]:
    """Assert that after the block the host is as before it, with nothing held, and that no file is left in shared
    memory: neither an arena of the host, nor one of another kind that no process uses."""
    found = await state()
    before, files = found, _unused_files()

    async def is_idle() -> bool:
        nonlocal before
        last, before = before, await state()  # twice the same: no process is being started
        return before.equals(last) and (before.num_leases, before.num_reservations, before.num_removed) == (0, 0, 0)

    async def is_same() -> bool:
        nonlocal found
        found = await state()
        return found.equals(before) and not any(path.exists() for path in before.arenas - found.arenas)

    await eventually(is_idle, "nothing is held before", timeout_s, more=lambda: before)
    yield
    await eventually(is_same, "the host is as before", timeout_s, more=lambda: f"before: {before}\nnow: {found}")
    await eventually(lambda: not _unused_files() - files, "no file is left", 60, more=lambda: _unused_files() - files)


def _unused_files() -> set[str]:
    """The files of this user in shared memory that no process has mapped or open. No arenas and no semaphores:
    other tests that run now may be killing their owners."""
    files = set()
    for path in SHARED_MEMORY.iterdir():
        with suppress(FileNotFoundError):
            is_of_others = path.suffix == ".arena" or path.name.startswith("sem.")
            if not is_of_others and path.is_file() and path.stat().st_uid == os.getuid():
                files.add(path.name)
    return files - set().union(*map(shared_memory_of, all_pids())) if files else files
