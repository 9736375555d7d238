"""`medialane serve` with one worker and plain vLLM's API server, both running, each with its defaults.

No setting that affects speed is changed for either: no thread counts, no binding to cores. The only settings are those
that two servers on one machine need (a bound on the KV cache, whose default is most of the memory) and those that keep
them off the network.

Each server is idle while the other is measured. An engine's processes may busy-wait for a second after their last step
(vLLM 0.32, `SpinCondition.busy_loop_s`), which on two cores takes half of what the other one has: so every turn starts
after that (`settle`).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import observers
from load import process_tree
from medialane.testing.tiny_model import TINY_MODEL_FLAGS
from medialane.tools.check import ServerProcess, plain_vllm, server_process

#: More than the second for which vLLM's idle engine busy-waits.
SETTLE_S = 1.5

#: Variables that affect vLLM's speed on a CPU, which `medialane bench` or its user may have set for this process.
_SPEED = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_KVCACHE_SPACE")

#: Render servers, each followed by the model. `vllm launch` itself needs the metadata of a distribution that is named
#: vllm, which the build for CPUs is not.
PLAIN_RENDER = ("-m", "vllm.entrypoints.launchers.render.entry", "--model")
MEDIALANE_RENDER = ("-m", "medialane", "render")

#: Names of servers.
OURS, PLAIN = "medialane", "plain vLLM"

_NOTHING: Mapping[str, str] = {}
_ENVIRON = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Server:
    """A ready server: its OpenAI base URL (ends in /v1), and all of its processes."""

    name: str
    base_url: str
    pids: Callable[[], list[int]]


async def settle() -> None:
    """Wait until no engine busy-waits any more."""
    await asyncio.sleep(SETTLE_S)


@asynccontextmanager
async def both_servers(
    model: str, *, flags: Sequence[str] = TINY_MODEL_FLAGS, observed: bool = False
) -> AsyncIterator[tuple[Server, Server]]:
    """medialane, then plain vLLM, serving `model`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        async with (
            plain_server(model, log / "plain.log", flags=flags) as plain,
            medialane_server(model, log / "medialane.log", flags=flags, observed=observed) as ours,
        ):
            yield ours, plain


@asynccontextmanager
async def plain_server(
    model: str, log: Path, *, flags: Sequence[str] = TINY_MODEL_FLAGS, own: Mapping[str, str] = _NOTHING
) -> AsyncIterator[Server]:
    """Plain vLLM's API server, with `own` variables."""
    async with plain_vllm(model, flags, environ={**clean_environ(), **own}, log=log) as process:
        yield server_of(PLAIN, process)


@asynccontextmanager
async def medialane_server(
    model: str,
    log: Path,
    *,
    sources: Path | None = None,
    settings: Sequence[str] = ("--workers", "1"),
    flags: Sequence[str] = TINY_MODEL_FLAGS,
    own: Mapping[str, str] = _NOTHING,
    observed: bool = False,
) -> AsyncIterator[Server]:
    """`medialane serve` with vLLM's `flags` and `own` variables, by default of the installed package, otherwise of the
    sources in this folder."""
    with observers.start_observers(is_on=observed) as watchers:
        environ = {**clean_environ(), **watchers.environ, **own}
        if sources is not None:
            environ["PYTHONPATH"] = str(sources)
        command = ["-m", "medialane", "serve", model, *settings, *watchers.settings]
        own_flags = ["--arena-size", "1GiB", "--", *flags, *watchers.flags]
        async with server_process(
            "medialane", command, own_flags, model=model, environ=environ, log=log, stop_s=60
        ) as process:
            with watchers.watching(process.base_url):
                yield server_of(OURS, process)


@asynccontextmanager
async def render_servers(model: str, flags: Sequence[str]) -> AsyncIterator[tuple[Server, Server]]:
    """`medialane render` with one gateway, then vLLM's own render server, for `model` with vLLM's `flags`."""
    with tempfile.TemporaryDirectory() as folder:

        def server(name: str, command: Sequence[str], *separator: str) -> AbstractAsyncContextManager[ServerProcess]:
            log = Path(folder) / f"{name.replace(' ', '-')}.log"
            return server_process(
                name, [*command, model], [*separator, *flags], model=model, environ=clean_environ(), log=log, stop_s=60
            )

        async with (
            server("vllm launch render", PLAIN_RENDER) as plain,
            server("medialane render", MEDIALANE_RENDER, "--") as ours,
        ):
            yield server_of("medialane render", ours), server_of("vllm launch render", plain)


def clean_environ() -> dict[str, str]:
    """Return the environment of a server: without what affects its speed."""
    given = {name: value for name, value in os.environ.items() if name not in _SPEED}
    # Empty is not set; an earlier medialane refuses settings that it does not know.
    return {name: value for name, value in given.items() if value or not name.startswith("MEDIALANE_")} | _ENVIRON


def server_of(name: str, process: ServerProcess) -> Server:
    return Server(name, process.base_url, lambda: process_tree(process.process_id))
