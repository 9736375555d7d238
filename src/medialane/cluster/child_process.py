"""Child processes: what is to run, and when it is ready (`ProcessSpec`); one run of it (`ChildProcess`): a child
that leads its own session, so that all of its descendants can be killed; the warm process, of which it may be a fork
(`WarmProcess`), and its log (`ProcessLog`).

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
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from medialane.cluster.orphan_reaper import CLEANUP_S, kill_members, members, send
from medialane.config import changed_imports
from medialane.observability.logging import REPORTED_ERROR, as_text, is_json
from medialane.runtime.heartbeat import TICK_S, HangWatch, HeartbeatPipe
from medialane.runtime.linux import dies_with_this_process
from medialane.runtime.private_files import OwnedFolder, try_lock, write_private
from medialane.runtime.resources import LACK_OF_MEMORY, OomKills
from medialane.runtime.stop import PidfdProcess
from medialane.types.errors import StartupFailed
from medialane.wire import child_channel

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

_MAX_READ_BYTES = 1 << 18
_NUM_TAIL_LINES = 200
_MAX_LINE_CHARACTERS = 2000
#: As JSON, in which a line is one object with a message and a traceback, each of at most 8000 characters.
_MAX_JSON_CHARACTERS = 1 << 16
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EXCEPTION = re.compile(r"(?<![\w.])([\w.]*(?:Error|Exception|Exit)): (\S.*)")
#: vLLM's front end reports that its engine failed, after the engine has logged the cause.
_SECONDARY_ERRORS = re.compile(r"Engine core initialization failed|EngineDeadError|died unexpectedly|resource_tracker")
#: Folders of failed runs that are kept; older ones are removed when the next run starts.
NUM_KEPT = 5
_PREFIX = "medialane-logs-"
_LOCK = ".lock"
_SHOWN_LINES = 15
#: Below the kernel's send buffer (`child_channel.send`).
_MAX_FORK_BYTES = 200_000
#: Output, and `ProcessSpec.pass_fds`.
_MAX_DESCRIPTORS = 7
_MAX_PID_BYTES = 20


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


class ForkRequest(msgspec.Struct, frozen=True):
    """Fork a process for `medialane COMMAND ...`. The first descriptor of the message becomes its output."""

    command: str


class ForkStart(msgspec.Struct, frozen=True):
    """What a fork becomes: `medialane ARGV...` with the whole environment `environ`; the descriptors after the first
    get the numbers `pass_fds`. Only the fork receives it: its secrets must not be in the memory of the warm process,
    and so of every other fork."""

    argv: list[str]
    environ: dict[str, str]
    pass_fds: list[int]


class NotForked(Exception):
    """The process has to be started from scratch."""


class WarmProcessGone(NotForked):
    """Nothing listens, or no longer: the warm process has exited, or imports."""


@dataclass(frozen=True)
class WarmProcess:
    """Where the warm process listens, and the environment with which it has imported everything.

    Importing vLLM takes ten seconds of CPU time and 700 MB of memory. The warm process (`cli/warm.py`) does that once,
    and reads the model; gateways, workers and the store are its forks: there in milliseconds, sharing those pages. A
    fork becomes a child of the supervisor (`runtime.linux.fork_child_of`), and is supervised like a process that was
    started. What cannot be forked now is not waited for: it is started from scratch.

    Each request is a connection of its own to the warm process's unix socket, in a folder that only this user may
    enter. So nothing has to be matched, and a request that is given up ends with its connection:

        supervisor                    warm process
        ForkRequest + descriptors --> forks, and closes its end: the rest is between the supervisor and the fork
              <---------------------- the fork's process id, when it is a child of the supervisor
        ForkStart ------------------> becomes what it is to be; without it, it exits
    """

    path: Path
    environ: Mapping[str, str] = field(repr=False)

    async def fork(
        self, argv: Sequence[str], environ: Mapping[str, str], output: int, pass_fds: Sequence[int], *, timeout_s: float
    ) -> int:
        """Have `medialane ARGV...` forked and return its process id. Raises NotForked."""
        if changed := changed_imports(environ, self.environ):
            raise NotForked(f"{', '.join(changed)} may change what is imported")
        loop, start = asyncio.get_running_loop(), ForkStart(list(argv), dict(environ), list(pass_fds))
        try:
            async with asyncio.timeout(timeout_s):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.setblocking(False)
                    await loop.sock_connect(sock, str(self.path))
                    child_channel.send(sock, ForkRequest(argv[0]), [output, *pass_fds], max_bytes=_MAX_FORK_BYTES)
                    if not (pid := await loop.sock_recv(sock, _MAX_PID_BYTES)):
                        raise NotForked("the warm process has exited, or cannot fork (see its log)")
                    child_channel.send(sock, start, max_bytes=_MAX_FORK_BYTES)
                    return int(pid)
        except TimeoutError:
            raise NotForked(f"the warm process has not answered within {timeout_s:g} s") from None
        except (ConnectionError, FileNotFoundError) as error:  # reset: it has exited before it has read the request
            raise WarmProcessGone(f"the warm process cannot be asked: {error}") from error
        except (OSError, ValueError) as error:
            raise NotForked(f"the warm process cannot be asked: {error}") from error


def receive_fork(sock: socket.socket) -> tuple[ForkRequest | None, list[int]]:
    """Return a request and its descriptors; None if it was given up. Raises ValueError, OSError."""
    decode = msgspec.msgpack.Decoder(ForkRequest).decode
    return child_channel.receive(sock, decode, max_bytes=_MAX_FORK_BYTES, max_descriptors=_MAX_DESCRIPTORS)


def receive_start(sock: socket.socket) -> ForkStart | None:
    """Report this process, a fork, to the supervisor, and return what it becomes; None if the request was given up.
    Raises ValueError, OSError."""
    with suppress(BrokenPipeError):  # read below
        sock.send(str(os.getpid()).encode())
    return child_channel.receive(sock, msgspec.msgpack.Decoder(ForkStart).decode, max_bytes=_MAX_FORK_BYTES)[0]


class LogFolder:
    """The folder of the logs: a private one, which only failed runs leave behind, or one that the operator has chosen:
    its files are appended to and never removed."""

    def __init__(self, path: Path, owned: OwnedFolder | None = None, lock: int | None = None) -> None:
        self.path = path
        #: Whether `close` leaves the logs there: of a chosen folder always, of a private one if the run fails.
        self.keep = True
        self._owned = owned
        self._lock = lock

    @classmethod
    def create(cls, chosen: str, prefix: str = _PREFIX, *, shared: bool = False) -> LogFolder:
        """Use the folder `chosen`, without others unless it is `shared`; if empty, create a private one. Raises
        StartupFailed."""
        if not chosen:
            owned = OwnedFolder.create(Path(tempfile.gettempdir()), prefix, num_kept=NUM_KEPT)
            return cls(owned.path, owned)
        path = Path(chosen).expanduser().absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = None if shared else os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(f"--log-dir {chosen}: {error.strerror}") from error
        if lock is not None and not try_lock(lock):
            os.close(lock)
            raise StartupFailed(f"--log-dir {chosen} is in use by another `medialane serve`: choose another folder")
        return cls(path, lock=lock)

    def close(self) -> None:
        """Remove a private folder whose logs are not to be kept. Idempotent."""
        if self._owned is not None:
            self._owned.close(keep=self.keep)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class ProcessLog:
    """Reads a log file incrementally. Lines of text are cut at 2000 characters and stripped of ANSI codes.

    A process writes to its file directly. It holds the descriptor itself, so it never blocks on the supervisor, not
    even on a stopped one. The size of the file is bounded by rotation: the newer half is kept in `<name>.old`, and the
    file is truncated. Output written during a rotation may be lost; that is the price of not piping the log through the
    supervisor.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._offset = path.stat().st_size if path.exists() else 0  # the rest is of earlier runs
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)

    def open(self) -> int:
        """Return a descriptor for the process to write to, appending; the caller closes its own copy."""
        self._tail.clear()
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def read(self) -> list[str]:
        """Return the complete lines since the last call, from at most a quarter of a MiB."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_MAX_JSON_CHARACTERS:]
        cleaned = [_clean(line) for line in lines]
        self._tail.extend(text for line in cleaned if line for text in as_text(line))
        if self._offset > self._max_bytes and len(data) < _MAX_READ_BYTES:
            self._cut()
        return cleaned

    def tail(self, num_lines: int) -> list[str]:
        """Return the last non-empty lines that were read, as text."""
        return list(self._tail)[-num_lines:]

    def reported_error(self) -> str | None:
        """Return the error that one of our own commands reported on exit."""
        errors = [line.partition(REPORTED_ERROR)[2] for line in self._tail if line.startswith(REPORTED_ERROR)]
        return errors[-1] if errors else None

    def first_exception(self) -> str | None:
        """Return the first exception that is not merely the consequence of another one."""
        exceptions = (_EXCEPTION.search(line) for line in self._tail if not _SECONDARY_ERRORS.search(line))
        return next((f"{m[1]}: {m[2]}" for m in exceptions if m), None)

    def failure_report(self, name: str, how: str, *, was_ready: bool = False) -> str:
        """Return one line with the cause; unless the process reported it itself, the end of the log follows."""
        why = f" ({how})" if LACK_OF_MEMORY in how else ""  # the log does not have it
        cause = self.first_exception()
        if (ours := self.reported_error()) is not None:
            if cause is not None and _SECONDARY_ERRORS.search(ours):  # of its engine, which has said more
                ours = f"vLLM failed to start: {cause}"
            return f"{name}: {ours}{why}"
        head = f"{name} {'exited again and again' if was_ready else 'did not start'}: {cause + why if cause else how}"
        lines = self.tail(_SHOWN_LINES)
        if not lines:
            return head
        return "\n".join([head, f"  the end of {self.path} ({how}):", *(f"  | {line}" for line in lines)])

    def _cut(self) -> None:
        keep = min(self._max_bytes // 2, self._offset)
        with self.path.open("rb") as file:
            file.seek(self._offset - keep)
            write_private(self.path.with_suffix(".old"), file.read(keep))
        os.truncate(self.path, 0)  # O_APPEND: the process continues at the new end
        self._offset = 0


def _clean(line: bytes) -> str:
    text = line.rsplit(b"\r", 1)[-1] if b"\r" in line.rstrip(b"\r") else line  # progress bars rewrite their line
    decoded = text.decode(errors="replace")
    return decoded if is_json(decoded) else _ANSI.sub("", decoded).rstrip()[:_MAX_LINE_CHARACTERS]
