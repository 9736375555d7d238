"""Child processes: what is to run, and when it is ready (`ProcessSpec`), and one run of it (`ChildProcess`): a child
that leads its own session, so that all of its descendants can be killed.

The process may have children (a worker has vLLM's EngineCore, which has more). They stay in its process group. When the
group's leader exits, for whatever reason, the whole group is killed before the exit is reported: a restarted worker
finds no old engine on its GPU. The group id cannot be reused in the meantime: the leader is not reaped before the group
has been killed.

A process that hangs (`runtime.heartbeat`) is killed with its group.

Two mechanisms keep processes from outliving a supervisor that was killed: the kernel's parent-death signal terminates
the process itself, and the orphan reaper then kills the rest of its group.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp

from medialane.cluster.orphan_reaper import CLEANUP_S, kill_members, members, send
from medialane.cluster.warm import WarmProcess
from medialane.runtime.heartbeat import TICK_S, HangWatch, HeartbeatPipe
from medialane.runtime.linux import dies_with_this_process
from medialane.runtime.resources import OomKills
from medialane.runtime.stop import PidfdProcess

_POLL_S = 0.02
#: Within which a process that is ready answers a check.
_ANSWER_S = 2.0
#: How a process has ended that was asked to, and has drained (`ChildProcess.describe_exit`).
CLEAN_EXIT = "exit status 0"
#: SIGKILL is not immediate: a process that frees much memory, or a GPU's, needs some time.
_GROUP_END_S = 10.0
#: Exit status of a process that is not needed (EX_UNAVAILABLE of sysexits.h): it is not started again.
NOT_NEEDED = 69
#: Begins the command lines of our processes. -P: nothing is imported from the working directory.
INTERPRETER = (sys.executable, "-P", "-m", "medialane")


class ReadyCheck(Protocol):
    """Checks whether a process is ready."""

    def reset(self) -> None:
        """Forget the previous run; called before each start."""
        ...

    async def passes(self) -> bool:
        """Check once. Must return within seconds, and False instead of raising."""
        ...


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running. `environ` is its whole environment. It inherits the descriptors `pass_fds`, which
    must stay open here.

    With `is_ready_later` the check passes before the process has loaded everything: it is shown as ready when it enters
    the phase `READY`.

    Processes of a higher `layer` are stopped first; `after` names a process that must have been ready before this one
    is started for the first time. `not_needed` is what is shown if it exits with that status.

    One that `reloads` reads its settings again on SIGHUP. `tick_s` is the interval of its `HangWatch`.

    With `warm` it is a fork of that process if possible.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    ready: ReadyCheck
    layer: int = 0
    after: str | None = None
    stop_timeout_s: float = 10.0
    pass_fds: tuple[int, ...] = ()
    is_ready_later: bool = False
    not_needed: str = "not needed"
    warm: WarmProcess | None = None
    reloads: bool = False
    tick_s: float = TICK_S


@dataclass(frozen=True)
class SocketExists:
    """Ready when the process has created its unix socket, which a worker does last. The check does not disturb it."""

    path: Path

    def reset(self) -> None:
        self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        return self.path.is_socket()


@dataclass(frozen=True)
class HttpAnswers:
    """Ready when `url` returns 200, or another of `statuses`, over the unix socket `path` if given. The certificate is
    not verified: the request goes to this host."""

    url: str
    path: Path | None = None
    statuses: frozenset[int] = frozenset({200})

    def reset(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            connector = aiohttp.UnixConnector(str(self.path)) if self.path is not None else None
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(self.url, ssl=False) as response,
            ):
                return response.status in self.statuses
        except (aiohttp.ClientError, TimeoutError):
            return False


class ForkedChild:
    """A child that another process has forked for this one (`runtime.linux.fork_child_of`), as `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Reap it, and return its exit status, -N for signal N."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ChildProcess:
    """A running child process and its group. Bound to the event loop that spawned it. `hang` is how it hung, if it was
    killed for that. Owns the end of `heartbeat` that is read."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedChild,
        started_at: float,
        heartbeat: HeartbeatPipe | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self.hang: str | None = None
        self._tick_s = tick_s
        self._process = process
        self._heartbeat = heartbeat
        self._watching = asyncio.create_task(self._end_if_it_hangs(), name=f"heartbeat of {process.pid}")
        self._started_at = started_at
        self._lifetime_s: float | None = None
        self._oom_kills = OomKills(process.pid)
        self._first = PidfdProcess(process.pid, os.pidfd_open(process.pid), self._on_end)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        output: int,
        *,
        pass_fds: Sequence[int] = (),
        tick_s: float = TICK_S,
    ) -> ChildProcess:
        """Start `argv` with the whole environment `environ`. Its output goes to the descriptor `output`; it inherits
        `pass_fds`.

        Call it from the main thread: the kernel sends the parent-death signal when the calling thread exits. Raises
        OSError if the program cannot be started.
        """
        started_at, heartbeat = time.monotonic(), HeartbeatPipe()
        with heartbeat.passed():
            passed = (*pass_fds, heartbeat.writer)
            process = spawn_leader(argv, {**environ, **heartbeat.environ}, output, pass_fds=passed)
        return cls(process, started_at, heartbeat, tick_s)

    @classmethod
    async def fork(
        cls,
        warm: WarmProcess,
        argv: Sequence[str],
        environ: Mapping[str, str],
        output: int,
        *,
        pass_fds: Sequence[int] = (),
        timeout_s: float,
        tick_s: float = TICK_S,
    ) -> ChildProcess:
        """As `spawn`, with `argv` from the command on, as a fork of the warm process. Raises NotForked."""
        started_at, heartbeat = time.monotonic(), HeartbeatPipe()
        with heartbeat.passed():
            passed = (*pass_fds, heartbeat.writer)
            pid = await warm.fork(argv, {**environ, **heartbeat.environ}, output, passed, timeout_s=timeout_s)
        return cls(ForkedChild(pid), started_at, heartbeat, tick_s)

    @property
    def pid(self) -> int:
        """Process id of the first process, and of the group and session that it leads."""
        return self._process.pid

    @property
    def lifetime_s(self) -> float:
        return time.monotonic() - self._started_at if self._lifetime_s is None else self._lifetime_s

    @property
    def ended(self) -> bool:
        return self._first.exited.is_set()

    async def wait(self) -> int:
        """Wait until the process has exited and its group is killed. Returns the exit status, -N for signal N."""
        await self._first.exited.wait()
        self._watching.cancel()
        await asyncio.wait((self._watching,))
        try:
            self.kill()
            await self._empty(CLEANUP_S)
        finally:
            if self._process.returncode is None:
                send(self.pid, signal.SIGKILL)
        await self._empty(_GROUP_END_S)
        return self._reap()

    def describe_exit(self) -> str:
        """Return how it ended (see `OomKills`). To be called when `wait` has returned."""
        return self.hang or self._oom_kills.describe_exit(self._process.returncode or 0)

    def terminate(self) -> None:
        """Send SIGTERM to the first process only."""
        with suppress(ProcessLookupError):
            self._first.send_signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Send SIGHUP to the first process only."""
        with suppress(ProcessLookupError):
            self._first.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Kill the whole group except its resource trackers, which `wait` ends."""
        if self._process.returncode is None:
            kill_members(self.pid)

    async def stop(self, timeout_s: float) -> int:
        """Terminate, wait up to `timeout_s`, kill. Returns the exit status. If cancelled, it kills at once."""
        self.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self._first.exited.wait()
        except TimeoutError:
            pass  # killed below
        finally:
            self.kill()
        return await self.wait()

    async def _end_if_it_hangs(self) -> None:
        self.hang = await HangWatch(self.pid, self._heartbeat, tick_s=self._tick_s).hung()
        self.kill()

    def _on_end(self) -> None:
        self._lifetime_s = time.monotonic() - self._started_at
        self._oom_kills.close()
        self._watching.cancel()
        if self._heartbeat is not None:
            self._heartbeat.close()

    async def _empty(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while members(self.pid):  # noqa: ASYNC110 - not our children: there is no event to wait for
                    await asyncio.sleep(_POLL_S)

    def _reap(self) -> int:
        status = self._process.wait()
        with suppress(ChildProcessError):  # as PID 1 of a container we inherit orphans and must reap them
            while os.waitpid(-self.pid, os.WNOHANG) != (0, 0):
                pass
        return status


def spawn_leader(
    argv: Sequence[str], environ: Mapping[str, str], output: int | None = None, *, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own; its output goes to `output`, or to this process's."""
    return subprocess.Popen(  # noqa: S603 - our own command lines, no shell
        list(argv),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=dies_with_this_process(signal.SIGTERM),
    )
