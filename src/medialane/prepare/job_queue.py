"""Jobs, and the bounded FIFO queue in which they wait for a preparer. One event loop, no locks."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from medialane.arena import Pin, Reservation
from medialane.observability.timeline import RequestTimeline
from medialane.prepare.messages import ItemOpened, ItemRequest, OpenItem
from medialane.prepare.processor import Described
from medialane.types.errors import MedialaneError, MediaOverloaded, retry_after
from medialane.types.feature import Feature
from medialane.types.media import EncodedMedia, Modality

_JOB_IDS = itertools.count(1)

#: Of an item before any was prepared: a photo takes 0.02 to 0.2 s.
INITIAL_S = 0.1
#: Weight of the newest item in the moving average: about the last twenty count.
_NEWEST = 0.1


#: A pin on the feature of an item that was processed, what is known of one that was opened, what a blank has in common
#: with other items of its size; None if there is nothing in common.
JobValue = Pin[Feature] | ItemOpened | Described | None


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job: an error, or else what its caller gets; and whether its preparer may run another, or the job
    is to be run again in another one, without a result for its caller."""

    value: JobValue = None
    error: MedialaneError | None = None
    is_preparer_usable: bool = True
    is_run_again: bool = False


class Job:
    """What one preparer does for one item: `ask` makes the request of the job's id, `key` is equal for all jobs that do
    the same, and is the feature's if it makes one.

    Owns a pin on the encoded bytes (`source`), if it needs some, and, once the preparer has reported the sizes, a range
    of the arena (`reservation`). Both end with the job: the pin by `close`, the range by `close` or by being published.
    `timeout_s` limits its time in a preparer, from `begin` to `ends_at`; `deadline` enforces that. A caller that stops
    waiting for `result` calls `abandon_result`.
    """

    def __init__(
        self,
        ask: Callable[[int], ItemRequest],
        source: Pin[EncodedMedia] | None,
        *,
        key: str,
        modality: Modality,
        timeout_s: float,
        timeline: RequestTimeline | None = None,
    ) -> None:
        self.source = source
        self.key = key
        self.modality = modality
        self.timeout_s = timeout_s
        self.timeline = timeline
        self.reservation: Reservation | None = None
        self.job_id = next(_JOB_IDS)
        self.request = ask(self.job_id)
        #: How long a preparer was busy with it, once it reports that.
        self.busy_s: float | None = None
        #: The CPU time that its preparer had used when it got the job.
        self.cpu_before_s = 0.0
        self.is_sent = False
        self.is_retried = False
        self.ends_at = math.inf
        self.deadline: asyncio.Timeout | None = None
        self.result: asyncio.Future[JobValue] = asyncio.get_running_loop().create_future()
        self.is_abandoned = False
        self._closed = False

    @property
    def is_brief(self) -> bool:
        """Whether it only opens an item."""
        return isinstance(self.request, OpenItem)

    def settle(self, result: JobResult) -> None:
        """Pass the result to the caller; if there already is one, release the pin.

        The job keeps its pin and range, which the preparer may still use, except for a published reservation.
        """
        if result.error is None:
            self.reservation = None
        if self.result.done():
            _release(result.value)
        elif result.error is not None:
            self.result.set_exception(result.error)
        else:
            self.result.set_result(result.value)

    def begin(self) -> None:
        """Start its time limit."""
        self.ends_at = min(self.ends_at, asyncio.get_running_loop().time() + self.timeout_s)

    def reset(self) -> None:
        """Prepare it for another preparer, once the previous one has exited."""
        self.is_sent, self.is_retried = False, True
        self.ends_at, self.deadline = math.inf, None
        if self.reservation is not None:
            self.reservation.abandon()
            self.reservation = None

    def close(self) -> None:
        """Release pin and range, once no process reads or writes for this job any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.source is not None:
            self.source.release()
        if self.reservation is not None:
            self.reservation.abandon()

    def abandon_result(self, grace_s: float) -> None:
        """Give up the result: release it when available, and limit the job to another `grace_s` seconds."""
        self.is_abandoned = True
        self.ends_at = min(self.ends_at, asyncio.get_running_loop().time() + grace_s)
        if self.deadline is not None and not self.result.done() and not self.deadline.expired():
            self.deadline.reschedule(self.ends_at)
        self.result.add_done_callback(_release_result)


def _release_result(result: asyncio.Future[JobValue]) -> None:
    if not result.cancelled() and result.exception() is None:
        _release(result.result())


def _release(value: JobValue) -> None:
    if isinstance(value, Pin):
        value.release()


class JobQueue:
    """FIFO queue. At most `limit` jobs wait in addition to jobs that idle preparers are about to take. `drain_s`
    returns in how many seconds the waiting jobs are expected to be done."""

    def __init__(self, *, limit: int, timeout_s: float, drain_s: Callable[[], float] = float) -> None:
        self._drain_s = drain_s
        self._limit = limit
        self._timeout_s = timeout_s
        self._jobs: deque[Job] = deque()
        self._timers: dict[Job, asyncio.TimerHandle] = {}
        self._num_takers = 0
        #: Moving averages of the time in a preparer, by modality; one that has not occurred counts like all together.
        self._seconds: dict[str, float] = {}
        self._overall_s = INITIAL_S
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def work_s(self) -> float:
        """The expected time in preparers of the waiting jobs, in seconds, all together."""
        return sum(self._seconds.get(job.modality, self._overall_s) for job in self._jobs if not job.is_brief)

    def learn(self, job: Job) -> None:
        """Learn from a job that has ended how long others will take."""
        if job.busy_s is not None:
            known = self._seconds.get(job.modality, job.busy_s)
            self._overall_s += _NEWEST * (job.busy_s - self._overall_s)
            self._seconds[job.modality] = known + _NEWEST * (job.busy_s - known)

    def put(self, job: Job) -> None:
        """Queue a job; it fails with MediaOverloaded after the timeout. Raises MediaOverloaded if the queue is full."""
        if len(self._jobs) >= self._limit + self._num_takers:
            raise MediaOverloaded("the queue of media items is full", retry_after_s=retry_after(self._drain_s()))
        self._jobs.append(job)
        self._note_queued(job)

    def put_back(self, job: Job) -> None:
        """Queue a job again, ahead of the others, whose preparer was lost.

        It is closed instead if its caller has given up.
        """
        if job.is_abandoned:
            job.close()
            return
        job.reset()
        self._jobs.appendleft(job)
        self._note_queued(job)

    async def take(self, until: Callable[[], bool]) -> Job | None:
        """Return the next job, or None as soon as `until()` is true (`wake` makes takers check again)."""
        self._num_takers += 1
        try:
            while not until():
                if self._jobs:
                    return self._pop()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._num_takers -= 1
        return None

    def take_second(self) -> Job | None:
        """Return the next job for a preparer that holds another job's tensors; None if there is none.

        A retried job never shares a preparer: if that is lost, too, this job is the cause.
        """
        return self._pop() if self._jobs and not self._jobs[0].is_retried else None

    def wake(self) -> None:
        self._changed.set()

    def withdraw(self, job: Job) -> bool:
        """Remove and close a job; False if it is no longer queued."""
        timer = self._timers.pop(job, None)
        if timer is None:
            return False
        timer.cancel()
        self._jobs.remove(job)
        job.close()
        return True

    def fail_all(self, error: MedialaneError) -> None:
        """Fail and close every waiting job."""
        for job in list(self._jobs):
            self.withdraw(job)
            job.settle(JobResult(error=error))

    def _note_queued(self, job: Job) -> None:
        self._timers[job] = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, job)
        self._changed.set()

    def _pop(self) -> Job:
        job = self._jobs.popleft()
        self._timers.pop(job).cancel()
        return job

    def _expire(self, job: Job) -> None:
        if self.withdraw(job):
            message = f"no preparer became available within {self._timeout_s:g} s"
            job.settle(JobResult(error=MediaOverloaded(message, retry_after_s=retry_after(self._drain_s()))))
