"""The servers of the check, plain vLLM and medialane: processes in groups of their own, alone or side by side, each
started again after a request has ended it, so that the next case has an answer. `CheckProgress` shows what they do.

A server leads its own process group, so that all of its processes are killed with it. If this process is killed, the
kernel stops the server, and an orphan reaper what is left of its group. The server is polled, not watched by a loop's
child watcher, because the object may be created in one event loop and used in another, as in a test session.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markup import escape

from medialane.cluster import HttpAnswers
from medialane.cluster.child_process import spawn_leader
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.cluster.vllm_flags import has_flag
from medialane.runtime.phase import PhaseFile
from medialane.runtime.private_files import private
from medialane.runtime.tasks import gather_or_cancel
from medialane.tools.check.case import Answer, CaseRequest
from medialane.tools.check.client import CheckClient
from medialane.types.errors import StartupFailed

#: Plain vLLM's API server, as arguments of Python.
PLAIN_VLLM = ("-P", "-m", "vllm.entrypoints.openai.api_server")

#: Below the ports that Linux gives to sockets which ask for none in particular, by default.
PORTS = range(15_000, 32_768)
PORT_RESERVATION = "\0medialane-port-"
_reservations = ExitStack()

_POLL_S = 0.1
_LOG_LINES = 30
_LINE_CHARS = 400


#: Without a terminal: interval at which long work is reported again.
REMIND_S = 15.0
TICK_S = 1.0


class CheckProgress:
    """Writes to `console`; `close` removes the live line."""

    def __init__(self, console: Console, *, tick_s: float = TICK_S, remind_s: float = REMIND_S) -> None:
        self._tick_s, self._remind_s = tick_s, remind_s
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._reported = time.monotonic()
        if self._status is not None:
            self._status.start()

    def note(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def case(self, number: int, total: int, name: str) -> None:
        self._show(f"{number}/{total} {name}")

    @asynccontextmanager
    async def starting(self, name: str, phases: PhaseFile | None = None) -> AsyncIterator[None]:
        """Show that a server starts, and its phase if it reports any, until the end of the block."""
        started = time.monotonic()
        self.note(f"{name}: starting")
        ticking = asyncio.create_task(self._tick(name, phases, started), name=f"progress of {name}")
        try:
            yield
        finally:
            ticking.cancel()
        self.note(f"{name}: ready after {time.monotonic() - started:.0f} s")

    def close(self) -> None:
        """Idempotent."""
        if self._status is not None:
            self._status.stop()

    async def _tick(self, name: str, phases: PhaseFile | None, started: float) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            phase = phases.read() if phases is not None else None
            self._show(f"{name}: {phase or 'starting'}, {time.monotonic() - started:.0f} s")

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))
        elif time.monotonic() - self._reported >= self._remind_s:
            self._reported = time.monotonic()
            self.note(text)


@dataclass(frozen=True)
class ServerProcess:
    """A ready server. `base_url` is for an OpenAI client (it ends in /v1), `model` the model name in requests;
    `process_id` is the leader of its process group. `log` has its output, unless that is shown on the terminal."""

    base_url: str
    model: str
    process_id: int
    log: Path | None


@asynccontextmanager
async def server_process(
    name: str,
    command: Sequence[str],
    flags: Sequence[str],
    *,
    model: str,
    environ: Mapping[str, str],
    log: Path | None,
    start_s: float = 300,
    stop_s: float = 20,
    python: str = sys.executable,
) -> AsyncIterator[ServerProcess]:
    """Run `python` with the arguments `command`, `--port` with a free port of the loopback interface, and `flags`.

    `environ` is the whole environment of the server; its output goes to `log`, if given. Raises StartupFailed with the
    end of the log if it exits early or is not ready after `start_s`. On exit, even if cancelled, all of its processes
    are gone: it has `stop_s` to stop before it is killed.
    """
    port = free_port()
    argv = [python, *command, "--port", str(port), *flags]
    async with logged_process(argv, environ, log, stop_s=stop_s) as process:
        await _wait_ready(process, f"http://127.0.0.1:{port}/health", name=name, log=log, start_s=start_s)
        yield ServerProcess(f"http://127.0.0.1:{port}/v1", model, process.pid, log)


def plain_vllm(
    model: str,
    flags: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    log: Path,
    start_s: float = 300,
    stop_s: float = 20,
    program: Sequence[str] = PLAIN_VLLM,
) -> AbstractAsyncContextManager[ServerProcess]:
    """Run `vllm serve`'s server, the reference for medialane's responses and times, without plugins."""
    command = [*program, "--model", model, "--host", "127.0.0.1"]
    # Our plugin, if installed, would change its engine processes, too.
    environ = {**environ, "VLLM_PLUGINS": ""}
    return server_process(
        "plain vLLM", command, flags, model=model, environ=environ, log=log, start_s=start_s, stop_s=stop_s
    )


@asynccontextmanager
async def logged_process(
    argv: Sequence[str], environ: Mapping[str, str], log: Path | None, *, stop_s: float = 0.0
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run a process that leads its own group; its output goes to `log`, or to this process's. At the end, the group has
    `stop_s` to stop before it is killed."""
    with closing(OrphanReaper()) as reaper:
        process = _spawn(argv, environ, log)
        reaper.watch(process.pid)
        try:
            yield process
        finally:
            await _stop(process, stop_s)


def _spawn(argv: Sequence[str], environ: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    if log is None:
        return spawn_leader(argv, environ)
    with open(log, "wb", opener=private) as output:
        return spawn_leader(argv, environ, output.fileno())


def free_port(num_in_row: int = 1, ports: range = PORTS) -> int:
    """Return a port that is free now, the first of `num_in_row`, which no other call returns, in any process of this
    host, while this process lives: servers take many seconds until they listen. They are not among the ports that the
    kernel gives to other sockets meanwhile (ip_local_port_range, ip(7)). Raises OSError if none of `ports` is."""
    firsts = list(range(ports.start, ports.stop - num_in_row + 1))
    random.shuffle(firsts)
    for first in firsts:
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + num_in_row):
                _reserve(port, stack)
            _reservations.push(stack.pop_all())
            return first
    raise OSError(f"no port of {ports.start} to {ports.stop - 1} is free")


def _reserve(port: int, stack: ExitStack) -> None:
    """Raise OSError if the port is reserved or in use. The reservation has an abstract name (unix(7)): unique in the
    network namespace, as ports are, and freed by the kernel with the process."""
    stack.enter_context(socket.socket(socket.AF_UNIX)).bind(f"{PORT_RESERVATION}{port}")
    with socket.socket() as probe:
        probe.bind(("", port))


async def _wait_ready(
    process: subprocess.Popen[bytes], url: str, *, name: str, log: Path | None, start_s: float
) -> None:
    is_ready = HttpAnswers(url)
    try:
        async with asyncio.timeout(start_s):
            while not await is_ready.passes():
                if has_ended(process):
                    raise StartupFailed(f"{name} exited before it was ready{log_tail(log)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise StartupFailed(f"{name} was not ready after {start_s:g} s{log_tail(log)}") from error


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Check without reaping: until the leader is reaped, its group id cannot be reused."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def wait_ended(process: subprocess.Popen[bytes]) -> None:
    while not has_ended(process):  # noqa: ASYNC110 - no event is available in every loop
        await asyncio.sleep(_POLL_S)


async def _stop(process: subprocess.Popen[bytes], stop_s: float) -> None:
    os.kill(process.pid, signal.SIGTERM)  # not terminate(), which reaps
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(stop_s):
                await wait_ended(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # returns quickly after SIGKILL


def log_tail(log: Path | None) -> str:
    """Return the end of a server's log, for the end of an error message."""
    if log is None:
        return "; see its output above"
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "; its last lines:\n" + "\n".join(line[:_LINE_CHARS] for line in lines)


#: Is given how many times it was called, this time included.
StartAgain = Callable[[int], AbstractAsyncContextManager[CheckClient]]

_SERVER_ERROR = 500
#: Until a server has noticed that its engine has ended.
SETTLE_S = 1.0
#: More, and something else than single requests ends it.
MAX_STARTS = 20


class RevivedServer:
    """Use it in `async with RevivedServer(...)`. Not for concurrent requests. `client` is connected to the last
    start."""

    def __init__(
        self,
        name: str,
        start: StartAgain,
        progress: CheckProgress,
        *,
        asks_again: bool = False,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`start` runs the server and connects to it; `asks_again`: a request at which it fails is sent once more.
        `settle_s` passes before an error counts as one of a live server."""
        self._settle_s = settle_s
        self._name, self._start, self._progress = name, start, progress
        self._asks_again = asks_again
        self._running = AsyncExitStack()
        self._num_starts = 0
        self.client: CheckClient

    async def __aenter__(self) -> Self:
        await self._start_it()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._running.aclose()

    async def post(self, request: CaseRequest) -> Answer:
        """Send a request. If it ends the server, that is started again before this returns. Raises StartupFailed if it
        does not start, or has been started too often."""
        answer = await self.client.post(request)
        if answer.status and answer.status < _SERVER_ERROR:
            return answer
        await asyncio.sleep(self._settle_s)
        if not await self.client.is_healthy():
            self._progress.note(f"{self._name} has ended ({answer.status or answer.document}) and is started again")
            await self._running.aclose()
            await self._start_it()
        elif self._asks_again:
            return await self.client.post(request)
        return answer

    async def _start_it(self) -> None:
        if self._num_starts == MAX_STARTS:
            raise StartupFailed(f"{self._name} has ended {MAX_STARTS} times")
        self._num_starts += 1
        self.client = await self._running.enter_async_context(self._start(self._num_starts))


PLAIN_LOG = "plain.log"
OUR_LOG = "medialane.log"
_STOP_S = 60.0
_OPTIONS = "--trust-request-mm-kwargs"
_NOTHING_TO_COMPARE = "plain vLLM alone does not start with this model and these flags: there is nothing to compare"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How plain vLLM and medialane are started to be compared.

    `environ` is the whole environment of plain vLLM, `own_environ` medialane's, its settings included;
    `metrics_key` opens medialane's metrics; `logs` is a folder for their output. `plain_program` starts plain vLLM,
    `plain_flags` are further flags for it alone.
    """

    model: str
    vllm_args: Sequence[str]
    environ: Mapping[str, str]
    own_environ: Mapping[str, str]
    metrics_key: str = ""
    logs: Path
    plain_program: Sequence[str] = PLAIN_VLLM
    plain_flags: Sequence[str] = ()
    start_s: float = 1800.0

    @property
    def both_flags(self) -> Sequence[str]:
        """vLLM's flags of both servers."""
        return self.vllm_args

    @property
    def api_key(self) -> str:
        """What clients send to both."""
        return self.environ.get("VLLM_API_KEY", "")


@dataclass(frozen=True, kw_only=True)
class CheckSetup(Launch):
    """What is checked, and how. `only` selects cases whose name contains one of its words, `essential` the small
    matrix. `at_once`: both servers run at the same time."""

    only: Collection[str] = ()
    essential: bool = False
    at_once: bool = False
    tolerance: float = 0.0

    @property
    def both_flags(self) -> Sequence[str]:
        """Processor options of requests are part of the matrix, so they are allowed."""
        return self.vllm_args if has_flag(self.vllm_args, _OPTIONS) else [*self.vllm_args, _OPTIONS]


#: Runs a server once, the nth time.
Start = Callable[[Launch, CheckProgress, int], AbstractAsyncContextManager[ServerProcess]]


def plain_server(setup: CheckSetup, progress: CheckProgress) -> RevivedServer:
    """Run plain vLLM, again if a request ends its engine. Raises StartupFailed with the end of its log.

    Requests at which it fails are sent again: of several choices (n=2), it may answer 500 if its processes disagree on
    which processed media are cached ("P0/P1 cache drift" in its log).
    """
    start = partial(_connected, plain_process, setup, progress, wants_report=False)
    return RevivedServer("plain vLLM", start, progress, asks_again=True)


@asynccontextmanager
async def plain_process(launch: Launch, progress: CheckProgress, number: int = 1) -> AsyncIterator[ServerProcess]:
    """Run plain vLLM once, the `number`th time. Raises StartupFailed."""
    log = launch.logs / _log_name(PLAIN_LOG, number)
    flags = [*launch.both_flags, *launch.plain_flags]
    server = plain_vllm(
        launch.model,
        flags,
        environ=launch.environ,
        log=log,
        start_s=launch.start_s,
        stop_s=_STOP_S,
        program=launch.plain_program,
    )
    async with AsyncExitStack() as stack:
        async with progress.starting("plain vLLM"):
            try:
                process = await stack.enter_async_context(server)
            except StartupFailed as error:
                raise StartupFailed(f"{error.message}\n{_NOTHING_TO_COMPARE}") from error
        yield process


def medialane_server(setup: CheckSetup, progress: CheckProgress) -> RevivedServer:
    """Run `medialane serve`, again if a request ends its worker. Raises StartupFailed with the end of its log."""
    start = partial(_connected, medialane_process, setup, progress, wants_report=True)
    return RevivedServer("medialane", start, progress)


@asynccontextmanager
async def medialane_process(launch: Launch, progress: CheckProgress, number: int = 1) -> AsyncIterator[ServerProcess]:
    """Run `medialane serve` once, the `number`th time. Raises StartupFailed."""
    log = launch.logs / _log_name(OUR_LOG, number)
    phases = PhaseFile(log.with_suffix(".phase"))
    server = server_process(
        "medialane serve",
        ["-P", "-m", "medialane", "serve", launch.model, "--verbose", "--host", "127.0.0.1"],
        ["--", *launch.both_flags],
        model=launch.model,
        environ={**launch.own_environ, **phases.environ()},
        log=log,
        start_s=launch.start_s,
        stop_s=_STOP_S,
    )
    async with AsyncExitStack() as stack:
        stack.callback(phases.remove)
        async with progress.starting("medialane", phases):
            process = await stack.enter_async_context(server)
        yield process


@asynccontextmanager
async def both_servers(
    setup: CheckSetup, progress: CheckProgress
) -> AsyncIterator[tuple[RevivedServer, RevivedServer]]:
    """Run both: plain vLLM, then medialane. They start and stop side by side."""
    plain, ours = AsyncExitStack(), AsyncExitStack()
    try:
        first, second = await gather_or_cancel(
            [
                plain.enter_async_context(plain_server(setup, progress)),
                ours.enter_async_context(medialane_server(setup, progress)),
            ]
        )
        yield first, second
    finally:
        await asyncio.gather(plain.aclose(), ours.aclose())


def _log_name(first: str, number: int) -> str:
    return first if number == 1 else first.replace(".", f"-{number}.")


@asynccontextmanager
async def _connected(
    start: Start, setup: CheckSetup, progress: CheckProgress, number: int, *, wants_report: bool
) -> AsyncIterator[CheckClient]:
    async with start(setup, progress, number) as process:
        url = process.base_url.removesuffix("/v1")
        async with CheckClient.opened(url, api_key=setup.api_key, wants_report=wants_report) as client:
            yield client
