"""Starts plain vLLM and `medialane serve` to be compared, on free ports of the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from medialane.cluster.vllm_flags import has_flag
from medialane.runtime.phase import PhaseFile
from medialane.runtime.tasks import gather_or_cancel
from medialane.tools.check.client import CheckClient
from medialane.tools.check.progress import CheckProgress
from medialane.tools.check.revived_server import RevivedServer
from medialane.tools.check.server_process import PLAIN_VLLM, ServerProcess, plain_vllm, server_process
from medialane.types.errors import StartupFailed

PLAIN_LOG = "plain.log"
OUR_LOG = "medialane.log"
_STOP_S = 60.0
_OPTIONS = "--trust-request-mm-kwargs"
_NOTHING_TO_COMPARE = "plain vLLM alone does not start with this model and these flags: there is nothing to compare"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How plain vLLM and medialane are started to be compared.

    `environ` is the whole environment of plain vLLM, `own_environ` that of medialane, its settings included;
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
class Setup(Launch):
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


def plain_server(setup: Setup, progress: CheckProgress) -> AbstractAsyncContextManager[RevivedServer]:
    """Run plain vLLM, again if a request ends its engine. Raises StartupFailed with the end of its log.

    Requests at which it fails are sent again: of several choices (n=2), it may answer 500 if its processes disagree on
    which processed media are cached ("P0/P1 cache drift" in its log).
    """
    start = partial(_connected, plain_process, setup, progress, wants_report=False)
    return RevivedServer.opened("plain vLLM", start, progress, asks_again=True)


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


def medialane_server(setup: Setup, progress: CheckProgress) -> AbstractAsyncContextManager[RevivedServer]:
    """Run `medialane serve`, again if a request ends its worker. Raises StartupFailed with the end of its log."""
    start = partial(_connected, medialane_process, setup, progress, wants_report=True)
    return RevivedServer.opened("medialane", start, progress)


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
async def both_servers(setup: Setup, progress: CheckProgress) -> AsyncIterator[tuple[RevivedServer, RevivedServer]]:
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
    start: Start, setup: Setup, progress: CheckProgress, number: int, *, wants_report: bool
) -> AsyncIterator[CheckClient]:
    async with start(setup, progress, number) as process:
        url = process.base_url.removesuffix("/v1")
        async with CheckClient.opened(url, api_key=setup.api_key, wants_report=wants_report) as client:
            yield client
