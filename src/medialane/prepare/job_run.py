"""One job in one preparer, from its first message to its outcome:

    send -> NeedRange -> reserve in the arena -> copy -> publish -> Outcome

No job can stop the pool: every exception becomes an outcome. A MedialaneError fails only the job; any other exception
also marks the preparer as unusable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from medialane.arena import Arena, Lease, Reservation, describe, layout
from medialane.core.errors import (
    MedialaneError,
    MediaTooLarge,
    PreparationFailed,
    PreparerCrashed,
    PreparerTimeout,
    Unavailable,
    from_report,
)
from medialane.core.feature import Feature
from medialane.core.tensor import TensorDescriptor
from medialane.prepare.job_queue import Job, Outcome
from medialane.prepare.messages import (
    Copied,
    Done,
    JobFailed,
    JobReport,
    NeedRange,
    NoRange,
    ProbeItem,
    ProcessItem,
    Range,
)
from medialane.prepare.preparer_process import PreparerLost, PreparerProcess

logger = logging.getLogger(__name__)

#: Up to this size, divided by the number of preparers, tensors are copied by the event loop, at 0.15-0.25 ms per MiB:
#: waking another thread would take 0.4 ms, during which the preparer waits. The division bounds the time that the loop
#: spends copying, for any number of preparers.
COPIED_AT_ONCE_BYTES = 12 * 1024 * 1024


class JobRunner:
    """Runs jobs on up to `num_preparers` preparers concurrently. Owns the copy threads until `close`."""

    def __init__(self, arena: Arena, *, num_preparers: int) -> None:
        self._arena = arena
        self._copied_at_once_bytes = COPIED_AT_ONCE_BYTES // num_preparers
        self._copiers = ThreadPoolExecutor(num_preparers, "medialane-copy")
        self._num_jobs = 0

    async def run(self, job: Job, preparer: PreparerProcess, forkserver_is_lost: Callable[[], bool]) -> Outcome:
        """Run one job within its deadline. Raises nothing; if cancelled, the preparer's state is unknown."""
        try:
            async with asyncio.timeout(job.timeout_s) as job.deadline:
                return Outcome(lease=await self._exchange_messages(job, preparer))
        except MedialaneError as error:  # the arena is full, or reported by the preparer, which stays usable
            return Outcome(error=error)
        except Exception as error:  # noqa: BLE001 - a bug in one job must not affect others; it is logged
            return Outcome(error=_explain(error, job, preparer, forkserver_is_lost), is_preparer_usable=False)

    def close(self) -> None:
        """Shut down the copy threads; a copy in progress runs to completion."""
        self._copiers.shutdown(wait=False)

    async def _exchange_messages(self, job: Job, preparer: PreparerProcess) -> Lease[Feature] | None:
        """Exchange one job's messages. Raises PreparerLost, or MedialaneError if only the job failed."""
        self._num_jobs += 1
        job_id = self._num_jobs
        encoded = job.source.value
        if job.is_probe:
            await preparer.send(ProbeItem(job_id, encoded))
            _expect(Done, await preparer.receive(), job_id)
            return None
        await preparer.send(ProcessItem(job_id, encoded, job.io, job.options))
        need = _expect(NeedRange, await preparer.receive(), job_id)
        if job.timeline is not None:
            job.timeline.add("decode", need.decode_s)
            job.timeline.add("process", need.process_s)
        try:
            reservation = self._reserve(job, need)
        except MedialaneError:
            await preparer.send(NoRange(job_id))
            raise
        tensors = describe(reservation.range, need.specs)
        if preparer.writes_arena:
            await preparer.send(Range(job_id, reservation.range))
            _expect(Done, await preparer.receive(), job_id)
        else:
            await self._copy(preparer, need, tensors)
            await preparer.send(Copied(job_id))
        feature = Feature(encoded.modality, job.mm_hash, need.header, tensors, need.size)
        return self._arena.publish(reservation, job.mm_hash, feature)

    def _reserve(self, job: Job, need: NeedRange) -> Reservation:
        """Reserve the item's range.

        Raises ArenaFull, or MediaTooLarge if it can never fit in the arena together with its encoded bytes.
        """
        _, nbytes = layout(need.specs)
        if nbytes > self._arena.max_payload_bytes - job.source.range.nbytes:
            raise MediaTooLarge(f"the item takes {nbytes} bytes once it is prepared, more than this server can store")
        job.reservation = self._arena.reserve(nbytes, "decoded" if job.options is None else "processed")
        return job.reservation

    async def _copy(self, preparer: PreparerProcess, need: NeedRange, tensors: Sequence[TensorDescriptor]) -> None:
        """Copy tensors from the preparer into the arena, in a thread unless they are small. Raises PreparerLost.

        If cancelled, it waits for the thread, which writes to the range until it is done.
        """
        with contextlib.ExitStack() as views:
            into = [views.enter_context(self._arena.view.tensor(tensor, writable=True)) for tensor in tensors]
            if sum(data.nbytes for data in into) <= self._copied_at_once_bytes:
                preparer.read(need.addresses, into)
            else:
                loop = asyncio.get_running_loop()
                await to_the_end(loop.run_in_executor(self._copiers, preparer.read, need.addresses, into))


_Report = TypeVar("_Report", NeedRange, Done)


def _expect(kind: type[_Report], report: JobReport, job_id: int) -> _Report:
    """Return the report if it has this type and job id. Raises the error of a JobFailed, else PreparerLost."""
    if isinstance(report, JobFailed) and report.job_id == job_id:
        raise from_report(report.report)
    if isinstance(report, kind) and report.job_id == job_id:
        return report
    raise PreparerLost(f"unexpected {type(report).__name__}")


def _explain(
    error: Exception, job: Job, preparer: PreparerProcess, forkserver_is_lost: Callable[[], bool]
) -> MedialaneError:
    """Log why a job lost its preparer; return the error for its caller."""
    match error:
        case TimeoutError():
            reason = "its job was cancelled" if job.is_disowned else f"its job exceeded {job.timeout_s:g} s"
            logger.warning("killing preparer %d (pid %s): %s", preparer.preparer_id, preparer.pid, reason)
            return PreparerTimeout(f"preparing this item took longer than {job.timeout_s:g} s")
        case PreparerLost():
            logger.warning("a job lost its preparer: %s", error)
            if forkserver_is_lost():
                return Unavailable("media preparation is restarting")
            return PreparerCrashed("the decoder process crashed on this item")
        case _:
            logger.error("a job failed unexpectedly; preparer %d is replaced", preparer.preparer_id, exc_info=error)
            return PreparationFailed("preparing this item failed")


async def to_the_end(work: Awaitable[object]) -> None:
    """Wait for clean-up that must complete: a cancellation takes effect only after it is done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
