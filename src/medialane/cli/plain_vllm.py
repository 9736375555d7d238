"""Plain vLLM's API server in a subprocess: the reference for medialane's responses and times.

The server gets its own process group, so that its engine is always killed with it, and the kernel stops it if this
process is killed. It is polled, not watched by a loop's child watcher, because the object may be created in one event
loop and used in another, as in a test session.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from medialane.core.errors import StartupFailed
from medialane.core.parent_death import dies_with_this_process

_POLL_S = 0.1
_LOG_LINES = 30


@dataclass(frozen=True)
class PlainVllm:
    """A ready server. `base_url` is that of an OpenAI client (it ends in /v1), `model` the model name in requests;
    `process_id` is the pid of the API server, the leader of its process group."""

    base_url: str
    model: str
    process_id: int
    log: Path


@asynccontextmanager
async def plain_vllm(
    model: str,
    flags: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    log: Path,
    start_s: float = 300,
    stop_s: float = 20,
) -> AsyncIterator[PlainVllm]:
    """Run `vllm serve`'s server for `model` with vLLM's `flags` on a free port of the loopback interface.

    `environ` is the whole environment of the server (it loads no plugins), `log` receives its output. Raises
    StartupFailed with the end of the log if it exits early or is not ready after `start_s`. On exit, even if cancelled,
    all of its processes are gone: it has `stop_s` to stop before it is killed.
    """
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    # Our plugin, if installed, would change its engine processes, too.
    environ = {**environ, "VLLM_PLUGINS": ""}
    process = _spawn([*command, "--host", "127.0.0.1", "--port", str(port), *flags], environ, log)
    try:
        await _wait_ready(process, f"http://127.0.0.1:{port}/health", log, start_s)
        yield PlainVllm(f"http://127.0.0.1:{port}/v1", model, process.pid, log)
    finally:
        await _stop(process, stop_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _spawn(command: list[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603 - our own command line, no shell
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_this_process(signal.SIGTERM),
        )


async def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, start_s: float) -> None:
    try:
        async with asyncio.timeout(start_s), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while not await _is_healthy(session, url):
                if _has_ended(process):
                    raise StartupFailed(f"plain vLLM exited before it was ready; last log lines:\n{_tail(log)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise StartupFailed(f"plain vLLM was not ready after {start_s:g} s; its last lines:\n{_tail(log)}") from error


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Check without reaping: until the leader is reaped, its group id cannot be reused."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def _stop(process: subprocess.Popen[bytes], stop_s: float) -> None:
    os.kill(process.pid, signal.SIGTERM)  # not terminate(), which reaps
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(stop_s):
                while not _has_ended(process):  # noqa: ASYNC110 - no event is available in every loop
                    await asyncio.sleep(_POLL_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # returns quickly after SIGKILL


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
