"""A host with simulated workers, each process as a user starts it: a store, gateways, and worker processes that can be
killed, stopped and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from medialane.cluster import SocketExists, spawn_leader
from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, TINY_MODEL_FLAGS
from medialane.tools.check import log_tail, server_process

#: Of a gateway that imports vLLM on shared cores.
START_S = 300.0
_POLL_S = 0.05


def environ() -> dict[str, str]:
    return {**os.environ, **TINY_MODEL_ENVIRON}


class Process:
    """A process that runs Python with `command`; its output is in `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._argv = [sys.executable, *command]
        self._log = log
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return spawn_leader(self._argv, environ(), output.fileno())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def restart(self) -> None:
        """Kill it, without a chance to say goodbye, and start it again."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def end(self) -> None:
        """Stop it, also if it is stopped (SIGSTOP)."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._process.send_signal(number)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def listens_at(self, path: Path) -> None:
        """Raise RuntimeError if it does not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while self._process.poll() is None:
                    if await SocketExists(path).passes():
                        return
                    await asyncio.sleep(_POLL_S)
        raise RuntimeError(f"{self._argv[2:4]} does not listen at {path}{log_tail(self._log)}")


@dataclass(frozen=True)
class Host:
    """Where its processes listen and log, and its store."""

    model: str
    folder: Path
    store: Process

    @property
    def store_address(self) -> str:
        return f"unix:{self.folder}/store.sock"

    def worker_command(self, listen: str, settings: Sequence[str]) -> list[str]:
        """`medialane worker` with simulated engines, beside the store."""
        return [
            *("-m", "medialane", "worker", self.model, "--engine", "simulated"),
            *("--listen", listen, "--store", self.store_address, *settings),
        ]


@asynccontextmanager
async def host_store(model: str, folder: Path, settings: Sequence[str] = ()) -> AsyncIterator[Host]:
    """A host with a store and nothing else."""
    path = folder / "store.sock"
    command = ["-m", "medialane", "store", model, "--listen", f"unix:{path}", "--arena-size", "256MiB", *settings]
    store = Process([*command, "--", *TINY_MODEL_FLAGS], folder / "store.log")
    try:
        await store.listens_at(path)
        yield Host(model, folder, store)
    finally:
        store.end()


@asynccontextmanager
async def gateways(
    host: Host, addresses: Sequence[str], *, number: int, settings: Sequence[str] = (), name: str = "gateway"
) -> AsyncIterator[list[tuple[str, int]]]:
    """Gateways for the workers at these addresses, which count together as those of one `medialane serve`; yields the
    base URL and the process of each."""
    command = ["-m", "medialane", "gateway", host.model]
    flags = ["--store", host.store_address, *settings]
    for address in addresses:
        flags += ["--worker", address]
    sockets = [str(host.folder / f"{name}-{index}.sock") for index in range(number)] if number > 1 else []
    shared = [word for socket in sockets for word in ("--gateway-socket", socket)]
    flags += ["--", *TINY_MODEL_FLAGS, "--disable-uvicorn-access-log"]
    async with AsyncExitStack() as stack:
        starting = [
            stack.enter_async_context(
                server_process(
                    f"{name} {index}",
                    command,
                    [*shared, "--gateway-index", str(index), *flags],
                    model=host.model,
                    environ=environ(),
                    log=host.folder / f"{name}-{index}.log",
                    start_s=START_S,
                )
            )
            for index in range(number)
        ]
        started = await asyncio.gather(*starting)
        yield [(each.base_url, each.process_id) for each in started]
