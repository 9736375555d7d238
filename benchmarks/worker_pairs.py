"""Two real vLLM workers and their store, on this host, and gateways over them with different routers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from medialane.testing.tiny_model import TINY_MODEL_ENVIRON
from medialane.tools.check import free_port

START_S = 300.0


@asynccontextmanager
async def worker_pair(
    folder: Path, model: str, *, name: str, routers: Sequence[str], flags: Sequence[str], encode_cache: str = "auto"
) -> AsyncIterator[dict[str, str]]:
    """Run two workers of `model`, and one gateway for each of `routers`: router -> base URL, ending in /v1.

    `flags` are vLLM's. Logs and sockets are in `folder`, under `name`.
    """
    async with AsyncExitStack() as stack:
        store = f"unix:{folder}/{name}-store.sock"
        log = folder / name
        commands = [
            _Command(log, "store", model, "--listen", store, "--preparers", "1", "--arena-size", "1GiB", vllm=flags)
        ]
        addresses = [f"unix:{folder}/{name}-worker-{n}.sock" for n in range(2)]
        for n, address in enumerate(addresses):
            own = ["--listen", address, "--store", store, "--encode-cache", encode_cache]
            commands.append(_Command(log.with_name(f"{name}-{n}"), "worker", model, *own, vllm=flags))
        to_workers = [word for address in addresses for word in ("--worker", address)]
        ports = {router: free_port() for router in routers}
        for router, port in ports.items():
            own = [*to_workers, "--store", store, "--port", str(port), "--router", router]
            commands.append(_Command(log.with_name(f"{name}-{router}"), "gateway", model, *own, vllm=flags))
        for command in commands:
            stack.enter_context(command)
        urls = {router: f"http://127.0.0.1:{port}" for router, port in ports.items()}
        for url in urls.values():
            await _both_workers_ready(url, commands)
        yield {router: f"{url}/v1" for router, url in urls.items()}


class _Command:
    """Runs a `medialane` command inside the context; `log` is the start of the path of its log."""

    def __init__(self, log: Path, *arguments: str, vllm: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "medialane", *arguments, "--", *vllm]
        self._log = log.with_name(f"{log.name}-{arguments[0]}.log")

    def __enter__(self) -> None:
        with self._log.open("wb") as log:
            environ = {**os.environ, **TINY_MODEL_ENVIRON}
            self._process = subprocess.Popen(self._command, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def check_running(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"{' '.join(self._command[2:4])} exited: {self._log.read_text()[-1000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


async def _both_workers_ready(url: str, commands: Sequence[_Command]) -> None:
    """Raises RuntimeError if a process has exited."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            for command in commands:
                command.check_running()
            try:
                async with session.get(f"{url}/metrics") as response:
                    page = await response.text()
                    ready = [line for line in page.splitlines() if "worker_state" in line and 'state="ready"' in line]
                    if sum(line.endswith(" 1.0") for line in ready) == 2:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
