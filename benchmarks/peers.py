"""What medialane is compared with beside plain vLLM: SGLang's gateway, in an environment of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from harness import REPOSITORY
from medialane.testing.tiny_model import build_once, cache_folder
from medialane.tools.check import server_process
from medialane.types.errors import StartupFailed
from medialane.types.hashing import content_hash
from servers import Server, clean_environ, server_of

REQUIREMENTS = REPOSITORY / "requirements" / "peers.txt"
INSTALL_S = 600
READY_S = 60


def peer_environment() -> Path:
    """Return the folder of the environment with exactly what requirements/peers.txt lists, by hash; install it if it is
    missing. Raises StartupFailed."""
    wanted = content_hash(REQUIREMENTS.read_bytes() + sys.version.encode())[:12]
    return build_once(cache_folder(os.environ) / f"peers-{wanted}", _install)


def _install(folder: Path) -> None:
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), *pip, "--only-binary", ":all:", "-r", str(REQUIREMENTS)],
    ]
    for command in commands:
        done = subprocess.run(command, timeout=INSTALL_S, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StartupFailed(
                f"SGLang's gateway, which medialane is compared with, cannot be installed from {REQUIREMENTS.name}:\n"
                f"{done.stderr[-1000:]}"
            )


def smg_version() -> str:
    """The version in requirements/peers.txt."""
    (version,) = (line.split()[0] for line in REQUIREMENTS.read_text().split("smg==")[1:])
    return version


@asynccontextmanager
async def smg_gateway(environment: Path, workers: Sequence[Server], log: Path) -> AsyncIterator[Server]:
    """SGLang's gateway with its defaults, in front of these servers, whose processes are not among its own."""
    python = str(environment / "bin" / "python")
    urls = [worker.base_url.removesuffix("/v1") for worker in workers]
    command = ["-m", "smg", "launch", "--host", "127.0.0.1", "--worker-urls", *urls]
    async with server_process("smg", command, [], model="", environ=clean_environ(), log=log, python=python) as process:
        await _until_healthy(process.base_url.removesuffix("/v1"), len(workers))
        yield server_of("smg", process)


async def _until_healthy(url: str, num_workers: int) -> None:
    """It listens before it knows its workers. Raises TimeoutError."""
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/readiness") as response:
                if (await response.json(content_type=None)).get("healthy_workers") == num_workers:
                    return
            await asyncio.sleep(0.1)
