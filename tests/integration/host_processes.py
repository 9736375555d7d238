"""Hosts of host_program.py, as tests see them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from gates import Gates
from host_program import GATEWAYS, Line, Question, address
from medialane_process import launch
from process_tree import all_pids, arenas_of, command_of, descendants, is_alive, num_filters

from host_state import state_of, stats_of
from waiting import eventually, wait_until

TESTS = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("host_program.py")
START_S = 60


def started_host(folder: Path, prefix: tuple[str, ...] | list[str] = ()) -> subprocess.Popen:
    """Start the processes of a host, in a namespace if there is a `prefix`; see `wait_for_host`."""
    paths = [str(TESTS), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}
    return launch([*prefix, sys.executable, str(PROGRAM), "host", str(folder)], environ=environ, log=log_of(folder))


def wait_for_host(process: subprocess.Popen, folder: Path) -> None:
    ready = folder / "ready"
    wait_until(lambda: ready.exists() or process.poll() is not None, "the host is ready", START_S)
    assert process.poll() is None, log_of(folder).read_text()


def stop_host(process: subprocess.Popen, folder: Path) -> None:
    process.terminate()
    assert process.wait(START_S) == 0, log_of(folder).read_text()


def log_of(folder: Path) -> Path:
    return folder / "host.log"


class Host:
    """The processes of host_program.py, a connection of the tests to their store, and an origin of the images."""

    def __init__(self, pid, folder, link, origin):
        self.pid, self.folder, self.origin = pid, folder, origin
        self.gates = Gates(folder)
        self.link = link

    def pid_of(self, name):
        (found,) = [pid for pid in descendants(self.pid) if f"{PROGRAM.name} {name} " in command_of(pid)]
        return found

    def preparer(self):
        """One that is idle: a process that maps the store's arena and has a seccomp filter of its own."""
        store = self.pid_of("store")
        arenas, outer = arenas_of(store), num_filters(store)
        return next(pid for pid in all_pids() if arenas_of(pid) & arenas and num_filters(pid) > outer)

    async def ask(self, number, **image):
        """The tokens of a gateway's answer, or the code of its error."""
        tokens, last = [], Line()
        try:
            async for last in self._lines(number, Question(**image)):
                tokens += last.tokens
        except (ConnectionError, FileNotFoundError):  # the socket of a gateway that starts is not there yet
            return "connection lost"
        return last.error or tokens if last.ended else "connection lost"

    async def _lines(self, number, question):
        path = address(self.folder, GATEWAYS[number]).removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(msgspec.json.encode(question) + b"\n")
            while line := await reader.readline():
                yield msgspec.json.decode(line, type=Line)
        finally:
            writer.close()

    async def state(self):
        """Includes how many workers each gateway shares memory with."""
        try:
            mapped = [line.num_mapped for i in range(len(GATEWAYS)) async for line in self._lines(i, Question())]
        except OSError:
            mapped = []  # a gateway is starting
        return await state_of(self.pid, self.link, *mapped)

    async def kill(self, pid, *, is_holder):
        """With `is_holder`, wait until the store has ended its holds, too."""
        before = (await stats_of(self.link)).arena.num_leases
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not is_alive(pid), "it is dead")

        async def ended():
            return (await stats_of(self.link)).arena.num_leases < before

        if is_holder:
            await eventually(ended, "its holds have ended")

    async def evict(self):
        """Free, and overwrite, everything that is not held."""
        store = self.pid_of("store")

        async def evicted():
            os.kill(store, signal.SIGUSR1)  # each time: a hold may have ended since
            arena = (await stats_of(self.link)).arena
            return arena.published_bytes == arena.pinned_bytes

        await eventually(evicted, "all is evicted that is not held")
