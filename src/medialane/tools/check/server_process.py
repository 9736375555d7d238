"""An OpenAI server in a subprocess, for comparisons: medialane's own, or plain vLLM's API server.

The server leads its own process group, so that all of its processes are killed with it. If this process is killed, the
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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from medialane.cluster import HttpAnswers
from medialane.cluster.child_process import spawn_leader
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.runtime.private_file import private
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


@dataclass(frozen=True)
class ServerProcess:
    """A ready server. `base_url` is that of an OpenAI client (it ends in /v1), `model` the model name in requests;
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
    host, while this process lives: servers take many seconds until they listen. They are not among those that the
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
