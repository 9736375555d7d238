"""Administrative calls to the engines: each is sent to every worker, and complete when all workers have executed it.
Some also go to the encoders that are connected: a lost one has no state to be changed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from medialane.gateway.worker_link.link import WorkerLink
from medialane.gateway.worker_pool import WorkerPool
from medialane.runtime.tasks import gather_or_cancel
from medialane.types.admin import AddLora, AdminCall, AdminResult, UnloadLora, changes_encoder, concerns_encoders
from medialane.types.errors import AdminCallIncomplete, InvalidRequest, MedialaneError, NoWorkerReady

logger = logging.getLogger(__name__)

#: Workers that an error names; the others are in the log.
MAX_NAMED = 8


async def administer(workers: WorkerPool, call: AdminCall, *, timeout_s: float) -> list[AdminResult]:
    """Execute `call` at every worker and return their results, in the configured order of the workers. What it does to
    caches is reported by the workers, to all their gateways.

    Raises the workers' InvalidRequest if all reject the call with the same error, AdminCallIncomplete naming the
    workers that have not executed it (lost workers included), NoWorkerReady if no worker can load an adapter.
    """
    links = _links(workers, call)
    if changes_encoder(call):
        call = msgspec.structs.replace(call, salt=secrets.token_hex(16))
    results = await gather_or_cancel([_result(link, call, timeout_s) for link in links])
    failed = {link: error for link, error in zip(links, results, strict=True) if isinstance(error, MedialaneError)}
    if failed:
        for link, error in failed.items():
            logger.warning("%s at worker %s: %s", type(call).__name__, link.name, error.message)
        raise _error(failed, links)
    return [result for result in results if not isinstance(result, MedialaneError)]


def _links(workers: WorkerPool, call: AdminCall) -> Sequence[WorkerLink]:
    """Return all workers; for adapters, the connected ones: others have none, and load one with the first request that
    names it."""
    links = workers.of_role("worker")
    if isinstance(call, AddLora | UnloadLora):
        links = [link for link in links if link.client is not None]
    if not links:
        raise NoWorkerReady("no worker is ready", retry_after_s=5)
    if concerns_encoders(call):
        links += [link for link in workers.of_role("encoder") if link.client is not None]
    return links


async def _result(link: WorkerLink, call: AdminCall, timeout_s: float) -> AdminResult | MedialaneError:
    client = link.client
    if client is None:
        return NoWorkerReady("not connected")
    try:
        return await client.calls.administer(call, timeout_s)
    except MedialaneError as error:
        return error


def _error(failed: Mapping[WorkerLink, MedialaneError], called: Sequence[WorkerLink]) -> MedialaneError:
    first = next(iter(failed.values()))
    same = all(type(error) is type(first) and error.message == first.message for error in failed.values())
    if same and len(failed) == len(called) and isinstance(first, InvalidRequest):
        return first
    named = [f"{link.name} ({error.message})" for link, error in list(failed.items())[:MAX_NAMED]]
    more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
    done = len(called) - len(failed)
    return AdminCallIncomplete(f"{done} of {len(called)} workers executed the call; failed: {'; '.join(named)}{more}")
