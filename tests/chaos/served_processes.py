"""The processes of one `medialane serve`, by kind, and their deaths."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from medialane_process import MedialaneProcess, kill
from process_tree import command_of

from host_state import FORK_SERVER
from waiting import eventually

#: Long enough for a worker on a busy machine.
RESTART_S = 240
GONE_S = 60
#: How a process of each kind is titled. There are two fork servers: one is a spare.
TITLES = {
    "warm": "medialane warm",
    "gateway": "medialane gateway",
    "store": "medialane store",
    "preparer": "medialane preparer",
    "fork server": FORK_SERVER.strip(),
    "worker": "medialane worker",
    "prefill": "medialane prefill",
    "decode": "medialane decode",
    "engine": "EngineCore",
}


class ServedProcesses:
    """Of one `serve`. Listing them reads all of /proc, once, in a thread: on a busy machine that takes long."""

    def __init__(self, serve: MedialaneProcess) -> None:
        self.serve = serve

    async def by_kind(self) -> dict[str, list[int]]:
        """Living processes, and zombies."""
        return await asyncio.to_thread(self._by_kind)

    async def of(self, kind: str) -> list[int]:
        return (await self.by_kind())[kind]

    async def all(self) -> list[int]:
        """All but `serve` itself."""
        return sorted(pid for pids in (await self.by_kind()).values() for pid in pids)

    async def numbers(self) -> dict[str, int]:
        return {kind: len(pids) for kind, pids in (await self.by_kind()).items()}

    async def kill(self, pids: list[int]) -> None:
        """kill -9, and wait until they are gone."""
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended with one of the others
                kill(pid)
        await eventually(lambda: not any(map(is_running, pids)), "they are gone", GONE_S)

    async def num_descriptors(self) -> dict[int, int]:
        """By process, of `serve` itself and of what accepts connections."""
        found = await self.by_kind()
        kinds = ("store", "gateway", "worker", "prefill", "decode")
        pids = [self.serve.pid, *(pid for kind in kinds for pid in found[kind])]
        return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}

    def _by_kind(self) -> dict[str, list[int]]:
        parents, states = {}, {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and (fields := _stat(int(name))):
                states[int(name)], parents[int(name)] = fields[0], int(fields[1])
        mine = self._below({self.serve.pid}, parents)
        # A fork server that took over from a killed one, its parent, is a child of init.
        orphans = {pid for pid, parent in parents.items() if parent == 1 and self._is_of(mine, command_of(pid))}
        mine |= orphans | self._below(orphans, parents)
        found: dict[str, list[int]] = {kind: [] for kind in (*TITLES, "zombie")}
        for pid in sorted(mine):
            command = command_of(pid)
            kind = next((kind for kind, title in TITLES.items() if title in command), None)
            if states[pid] in "ZX":
                found["zombie"].append(pid)
            elif kind is not None:
                found[kind].append(pid)
        return found

    def _below(self, above: set[int], parents: dict[int, int]) -> set[int]:
        found: set[int] = set()
        new = set(above)
        while new:
            new = {pid for pid, parent in parents.items() if parent in new} - found
            found |= new
        return found

    def _is_of(self, mine: set[int], command: str) -> bool:
        return command.startswith(FORK_SERVER) and int(command.split()[-1]) in mine


def is_running(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/pid/stat from the state on; none if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
