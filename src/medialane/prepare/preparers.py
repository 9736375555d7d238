"""The preparers of one pool.

One task per preparer (a *slot*) forks it, feeds it jobs from the shared queue, and replaces it when it has died, hung
or reached max_jobs_per_preparer or max_preparer_age_s, which ends a takeover by a hostile file. In the latter two cases
its successor is forked beforehand, so that no job waits for it. A preparer decodes one item at a time: it receives the
next job when it has processed the item, so that it runs while the store copies the tensors.

A job's caller gets its result first. If the preparer must not be used again, it is then killed, its exit is confirmed
by its pidfd, and only then are the job's range and its pin on the encoded bytes released, because until then the
process may still write. A preparer that dies need not have been killed by its job: it may have had two, and the kernel
kills preparers first when memory is short; one that exceeds a time limit may have been stopped. So each of its jobs is
run again, once and alone in its preparer; a second failure fails it, and an item that has ended three preparers is
refused for a while (`Quarantine`). Preparers that die before they have run a job are replaced with exponential backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from medialane.arena import Arena
from medialane.prepare.config import PrepareConfig
from medialane.prepare.forkserver_process import ForkserverLost, ForkserverProcess, PreparerLost, PreparerProcess
from medialane.prepare.job_queue import Job, JobQueue, JobResult
from medialane.prepare.job_run import JobRunner, Quarantine, to_the_end
from medialane.runtime.tasks import Backoff
from medialane.types.errors import MedialaneError, PreparerCrashed, PreparerTimeout, Unavailable

logger = logging.getLogger(__name__)

#: Bounds of the exponential backoff before a preparer that ran no job is replaced.
INITIAL_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0

#: How long an idle preparer may take to exit after its channel is closed; then it is killed.
GRACE_S = 1.0


#: Jobs before its maximum at which a preparer's successor is forked: a fork takes as long as some images.
AHEAD_JOBS = 8


#: When another successor is forked if that has failed: memory is short.
SUCCESSOR_RETRY_S = 10.0


@dataclass
class _Slot:
    """One preparer: how many jobs it was given, the next one if it was sent while the current one is copied, and its
    successor, once it is being forked. It `is_old` when it has reached its age: the successor then takes over."""

    preparer: PreparerProcess
    forkserver: ForkserverProcess
    num_jobs: int = 0
    next: Job | None = None
    is_old: bool = False
    aging: asyncio.TimerHandle | None = None
    successor: asyncio.Task[PreparerProcess] | None = None


class Preparers:
    """Keeps `num_wanted` preparers running. The counters include all fork servers so far."""

    def __init__(self, config: PrepareConfig, queue: JobQueue, arena: Arena) -> None:
        self.num_wanted = config.resolved_num_preparers()
        self.alive: set[PreparerProcess] = set()
        self.num_busy = 0
        self.num_restarts = 0
        self.num_done = 0
        self.num_failed = 0
        self._max_jobs = config.max_jobs_per_preparer
        self._max_age_s = config.max_preparer_age_s
        self._queue = queue
        self.quarantine = Quarantine()
        self._runner = JobRunner(arena, self.quarantine, num_preparers=self.num_wanted)

    async def run_slot(
        self, forkserver: ForkserverProcess, on_ready: Callable[[], None], on_failure: Callable[[], None]
    ) -> None:
        """Keep one preparer running until the fork server is lost.

        `on_ready` is called for each preparer that is ready, `on_failure` for each that failed to start.
        """
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S)
        slot: _Slot | None = None
        try:
            while not forkserver.lost.is_set():
                try:
                    preparer = await ((slot and slot.successor) or forkserver.fork(self._queue.wake))
                except ForkserverLost:
                    return
                except PreparerLost as error:
                    slot = None
                    logger.warning("cannot start a preparer: %s", error)
                    on_failure()
                else:
                    slot = _Slot(preparer, forkserver)
                    self.alive.add(preparer)
                    on_ready()
                    await self._serve(slot)
                if slot is not None and slot.num_jobs:
                    backoff.reset()
                else:
                    await _wait(forkserver.lost, backoff.next())
        finally:
            if slot is not None and slot.successor is not None:
                await to_the_end(_discard(slot.successor))

    def close(self) -> None:
        """Shut down the copy threads. Call it once no slot is running."""
        self._runner.close()

    async def _serve(self, slot: _Slot) -> None:
        """Run jobs on a preparer until it is lost or is to be replaced."""
        preparer = slot.preparer
        is_lost = False
        try:
            while (
                not is_lost and (job := slot.next or await self._queue.take(lambda: self._has_ended(slot))) is not None
            ):
                slot.next = None
                slot.num_jobs += 1
                self._plan_replacement(slot)
                is_lost = not await self._run(job, slot)
            self.num_restarts += is_lost or preparer.gone
        finally:
            if slot.aging is not None:
                slot.aging.cancel()
            self.alive.discard(preparer)
            await to_the_end(preparer.stop(GRACE_S))

    def _has_ended(self, slot: _Slot) -> bool:
        """Return whether a preparer is to get no other job."""
        is_used_up = 0 < self._max_jobs <= slot.num_jobs
        return (
            slot.preparer.gone or is_used_up or (slot.is_old and slot.successor is not None and slot.successor.done())
        )

    def _plan_replacement(self, slot: _Slot) -> None:
        """Called for each job. What has not opened a file cannot have been taken over, and does not grow old."""
        if slot.aging is None and self._max_age_s:
            slot.aging = asyncio.get_running_loop().call_later(self._max_age_s, self._grow_old, slot)
        if self._max_jobs and slot.num_jobs >= self._max_jobs - AHEAD_JOBS:
            self._fork_successor(slot)

    def _grow_old(self, slot: _Slot) -> None:
        if not slot.preparer.gone:
            slot.is_old = True
            self._fork_successor(slot)

    def _fork_successor(self, slot: _Slot) -> None:
        if slot.successor is None:
            slot.successor = asyncio.create_task(slot.forkserver.fork(self._queue.wake), name="preparer-successor")
            slot.successor.add_done_callback(partial(self._successor_forked, slot))

    def _successor_forked(self, slot: _Slot, successor: asyncio.Task[PreparerProcess]) -> None:
        if not successor.cancelled() and (error := successor.exception()) is not None:
            logger.warning("a preparer is replaced later: %s", error)
            slot.successor, slot.is_old = None, False
            slot.aging = asyncio.get_running_loop().call_later(SUCCESSOR_RETRY_S, self._grow_old, slot)
        self._queue.wake()

    async def _run(self, job: Job, slot: _Slot) -> bool:
        """Run one job to its end. Returns False if its preparer must not be used again; then it is stopped."""
        result = JobResult(error=Unavailable("media preparation has ended"), is_preparer_usable=False)  # if cancelled
        self.num_busy += 1
        try:
            send_next = partial(self._send_next, job, slot)
            result = await self._runner.run(job, slot.preparer, slot.forkserver.has_ended, send_next)
        finally:
            self._queue.learn(job)
            self._note_blame(job, slot, result)
            jobs = [job] if slot.next is None else [slot.next, job]
            if not result.is_run_again:
                job.settle(result)
                self.num_done += result.error is None
                self.num_failed += result.error is not None
            if result.is_preparer_usable:
                job.close()
            else:
                await to_the_end(self._kill(slot.preparer, jobs))
            self.num_busy -= 1
        return result.is_preparer_usable

    def _note_blame(self, job: Job, slot: _Slot, result: JobResult) -> None:
        """Count an end of the preparer against what it was decoding: the next job, if it had that one already."""
        if result.error is None:
            self.quarantine.clear(job.key)
        elif isinstance(result.error, PreparerCrashed | PreparerTimeout) and not result.is_preparer_usable:
            suspect = job if slot.next is None else slot.next
            if not suspect.is_abandoned:
                self.quarantine.add(suspect.key)

    async def _send_next(self, job: Job, slot: _Slot) -> None:
        """Send the next job, if one is queued, to the preparer that has processed `job`."""
        if job.is_retried or self._has_ended(slot):
            return
        slot.next = self._queue.take_second()
        if slot.next is not None:
            slot.next.begin()
            with contextlib.suppress(MedialaneError, PreparerLost):  # `run` sends it again, and reports its error
                await self._runner.send(slot.next, slot.preparer)

    async def _kill(self, preparer: PreparerProcess, jobs: Sequence[Job]) -> None:
        """Kill the preparer, then close its jobs, or queue them again if they have no result.

        If it does not exit, they fail, and their ranges and pins stay held forever.
        """
        is_gone = await preparer.stop(0)
        for job in jobs:
            if not is_gone:
                job.settle(JobResult(error=Unavailable("the decoder process cannot be stopped")))
            elif job.result.done():
                job.close()
            else:
                self._queue.put_back(job)


async def _discard(successor: asyncio.Task[PreparerProcess]) -> None:
    """Stop a preparer that was forked, or is being forked, and is not needed."""
    successor.cancel()
    await asyncio.wait([successor])
    if not successor.cancelled() and successor.exception() is None:
        await successor.result().stop(0)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
