"""One job in one preparer, from its first message to its outcome:

    send -> NeedRange -> reserve in the arena -> copy -> publish -> Outcome

Nothing that a job does ends the pool: every exception becomes an outcome. An error of the house's tree fails the job
alone; anything else also says that the preparer must not be used again.
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

#: Up to here, divided by the number of preparers, tensors are copied by the event loop, at 0.15-0.25 ms a MiB: another
#: thread would be awake 0.4 ms later, for which the preparer waits. The division bounds the loop's time in copies,
#: however many preparers there are.
COPIED_AT_ONCE_BYTES = 12 * 1024 * 1024


class JobRunner:
    """Runs the jobs of up to `num_preparers` preparers at a time. Owns the threads that copy, until `close`."""

    def __init__(self, arena: Arena, *, num_preparers: int) -> None:
        self._arena = arena
        self._copied_at_once_bytes = COPIED_AT_ONCE_BYTES // num_preparers
        self._copiers = ThreadPoolExecutor(num_preparers, "medialane-copy")
        self._num_jobs = 0

    async def run(self, job: Job, preparer: PreparerProcess, forkserver_is_lost: Callable[[], bool]) -> Outcome:
        """Run one job within its deadline. Raises nothing; cancelled, its preparer is in an unknown state."""
        try:
            async with asyncio.timeout(job.timeout_s) as job.deadline:
                return Outcome(lease=await self._exchange_messages(job, preparer))
        except MedialaneError as error:  # reported by the preparer, which is fine, or the arena is full
            return Outcome(error=error)
        except Exception as error:  # noqa: BLE001 - one job's surprise must not end those of the others; it is logged
            return Outcome(error=_explain(error, job, preparer, forkserver_is_lost), is_preparer_usable=False)

    def close(self) -> None:
        """End the copy threads; a copy that is under way goes on to its end."""
        self._copiers.shutdown(wait=False)

    async def _exchange_messages(self, job: Job, preparer: PreparerProcess) -> Lease[Feature] | None:
        """One job's messages. Raises PreparerLost, and MedialaneError when the job failed and the preparer did not."""
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
        """Raises ArenaFull, and MediaTooLarge for what never fits beside the encoded bytes that it is made of."""
        _, nbytes = layout(need.specs)
        if nbytes > self._arena.max_payload_bytes - job.source.range.nbytes:
            raise MediaTooLarge(f"the item takes {nbytes} bytes once it is prepared, more than this server can store")
        job.reservation = self._arena.reserve(nbytes, "decoded" if job.options is None else "processed")
        return job.reservation

    async def _copy(self, preparer: PreparerProcess, need: NeedRange, tensors: Sequence[TensorDescriptor]) -> None:
        """Copy tensors from the preparer into the arena, in a thread unless they are few. Raises PreparerLost.

        Cancelled, it waits for the thread: until then the range is written to.
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
    """The report, if it is of this kind and of this job. Raises the error of a JobFailed, or PreparerLost."""
    if isinstance(report, JobFailed) and report.job_id == job_id:
        raise from_report(report.report)
    if isinstance(report, kind) and report.job_id == job_id:
        return report
    raise PreparerLost(f"unexpected {type(report).__name__}")


def _explain(
    error: Exception, job: Job, preparer: PreparerProcess, forkserver_is_lost: Callable[[], bool]
) -> MedialaneError:
    """Log what cost a job its preparer; return what its caller is told."""
    match error:
        case TimeoutError():
            why = "its job was cancelled" if job.is_disowned else f"its job took over {job.timeout_s:g} s"
            logger.warning("preparer %d (pid %s) is killed: %s", preparer.preparer_id, preparer.pid, why)
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
    """Wait for clean-up that must not stop half-way: cancelled meanwhile, this waits on, then is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
