"""The pool of preparers, seen from the gateway: items in, leases on features out.

Theory of operation. One supervisor task keeps a fork server alive; below it one task per preparer (a *slot*) forks the
preparer, gives it jobs from the common queue, and forks another when it has died, hung or served its time. A slot runs
one job at a time, so everything about a job happens in one task, in order:

    take from queue -> send -> NeedRange -> reserve in the arena -> copy -> publish -> result

What may go wrong, and who notices. Nothing that a job does ends the pool: an error fails the job, an exception that
nobody foresaw fails the job and costs its preparer; one outside of jobs is logged, and everything starts again. A
preparer that dies closes its channel: the job fails with PreparerCrashed. A preparer that takes too long: the slot's
deadline fires, the job fails with PreparerTimeout. Either way the caller is told first; then the process is killed, its
end is confirmed by its pidfd, and only then are the job's range and its pin on the encoded bytes given back, for until
then the process may still write. A fork server that dies takes its preparers with it: running jobs fail with
Unavailable, waiting ones wait on for the spare fork server, which takes over; without one they fail, too, and a
processor is built anew.

Preparers that die before they have done a job, and fork servers that do not come up, are replaced ever more slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from medialane.arena import Arena, Lease, Reservation, describe, layout
from medialane.core.errors import (
    MedialaneError,
    MediaTooLarge,
    PreparationFailed,
    PreparerCrashed,
    PreparerTimeout,
    StartupFailed,
    Unavailable,
    from_report,
)
from medialane.core.feature import Feature
from medialane.core.media import EncodedMedia
from medialane.core.tensor import TensorDescriptor
from medialane.media import MediaConfig
from medialane.observability.timeline import StageTimeline
from medialane.prepare.config import PrepareConfig
from medialane.prepare.forkserver_process import ForkserverLost, ForkserverProcess
from medialane.prepare.forkservers import Forkservers
from medialane.prepare.job_queue import Job, JobQueue
from medialane.prepare.messages import (
    Copied,
    Done,
    JobFailed,
    JobReport,
    NeedRange,
    NoRange,
    PreparerSetup,
    ProbeItem,
    ProcessItem,
    Range,
)
from medialane.prepare.preparer_process import PreparerLost, PreparerProcess
from medialane.prepare.sandbox import WRITE_ARENA

logger = logging.getLogger(__name__)

#: First and last pause before a preparer or fork server that failed at once is replaced; it doubles in between.
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 10.0

#: Up to here, divided by the number of preparers, tensors are copied by the event loop, at 0.15-0.25 ms a MiB: another
#: thread would be awake 0.4 ms later, for which the preparer waits. The division bounds the loop's time in copies,
#: however many preparers there are.
COPIED_AT_ONCE_BYTES = 12 * 1024 * 1024

#: How long an idle preparer may take to end by itself.
GRACE_S = 1.0

#: How long a running job goes on that nobody waits for any more. Most images are done by then, and whoever asks again
#: finds them; the others would keep a preparer from those who wait, so theirs is killed and another one forked.
DISOWNED_S = 0.25


class PoolStats(msgspec.Struct, frozen=True):
    """What the pool does now, and what it has done since its start. `num_restarts` counts replaced preparers that died
    or were killed, not those that had served their time."""

    num_preparers: int
    num_alive: int
    num_busy: int
    num_queued: int
    num_restarts: int
    num_forkserver_restarts: int
    num_done: int
    num_failed: int
    pids: tuple[int, ...]


class PreparerPool:
    """Prepares items in parallel processes. One event loop; `start` once, `close` once.

    `factory` names the function `module:function` that builds the warm processor inside the fork server from
    `factory_config`, its own encoding. `environment` is set there on top of this process's own.
    """

    def __init__(
        self,
        config: PrepareConfig,
        *,
        factory: str,
        factory_config: bytes,
        arena: Arena,
        media: MediaConfig,
        environment: Mapping[str, str] | None = None,
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        config.validate()
        self._config = config
        self._factory = factory
        self._factory_config = factory_config
        self._arena = arena
        self._setup = PreparerSetup(arena.id, str(arena.path.parent), media, config.memory_limit_bytes)
        self._environment = dict(environment or {})
        self._progress = progress
        self._num_preparers = config.resolved_num_preparers()
        self._forkservers = Forkservers(self._start_forkserver)
        self._forkserver: ForkserverProcess | None = None
        self._copiers = ThreadPoolExecutor(self._num_preparers, "medialane-copy")
        self._queue = JobQueue(limit=config.queue_limit, timeout_s=config.queue_timeout_s)
        self._alive: set[PreparerProcess] = set()
        self._unavailable: str | None = "media preparation has not started"
        self._supervisor: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_jobs = 0
        self._num_busy = 0
        self._num_restarts = 0
        self._num_forkserver_restarts = 0
        self._num_done = 0
        self._num_failed = 0

    async def start(self) -> None:
        """Start the fork server and all preparers; return when every one is ready for jobs.

        Raises StartupFailed, after start_timeout_s at the latest; then nothing is left running.
        """
        if self._supervisor is not None:
            raise RuntimeError("the pool has been started already")
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(started), name="preparer-pool")
        try:
            await asyncio.shield(started)
        except BaseException:
            await self.close()
            raise

    async def prepare_item(
        self,
        encoded: Lease[EncodedMedia],
        options: bytes | None,
        mm_hash: str,
        timeline: StageTimeline | None = None,
        *,
        io: bytes = b"{}",
    ) -> Lease[Feature]:
        """Decode and process one item and publish its feature in the arena under `mm_hash`; the lease is the caller's.

        `io` says how to decode (as in `MediaRef`), `options` are the processor's; without them the item is only
        decoded (stage `decoded`).

        `encoded` stays the caller's: the job takes a pin of its own. Raises PreparersBusy (queue full, or no preparer
        in time), ArenaFull, PreparerTimeout, PreparerCrashed, Unavailable, and what decoding and processing raise.
        Raises MediaTooLarge where the feature is larger than the arena. Cancelled while it waits, the job is dropped;
        cancelled while it runs, it is stopped unless it ends within DISOWNED_S: then its feature stays cached.
        """
        timeout_s = self._config.job_timeout_s(encoded.value.modality)
        job = Job(encoded.duplicate(), options, mm_hash, timeout_s=timeout_s, timeline=timeline, io=io)
        lease = await self._submit(job)
        if lease is None:
            raise RuntimeError("a job that prepares has no result")
        return lease

    async def probe_item(self, encoded: Lease[EncodedMedia]) -> None:
        """Raise what decoding this item would raise for what the file says of itself (`media.probe`).

        As `prepare_item` for all else.
        """
        timeout_s = self._config.job_timeout_s(encoded.value.modality)
        await self._submit(Job(encoded.duplicate(), None, "", timeout_s=timeout_s, is_probe=True))

    async def _submit(self, job: Job) -> Lease[Feature] | None:
        """Queue the job, which is closed whatever happens, and wait for its result."""
        try:
            if self._unavailable is not None:
                raise Unavailable(self._unavailable)
            self._queue.put(job)
        except MedialaneError:
            job.close()
            raise
        try:
            return await asyncio.shield(job.result)
        except asyncio.CancelledError:
            if not self._queue.withdraw(job):
                job.disown(DISOWNED_S)
            raise

    def stats(self) -> PoolStats:
        return PoolStats(
            num_preparers=self._num_preparers,
            num_alive=len(self._alive),
            num_busy=self._num_busy,
            num_queued=len(self._queue),
            num_restarts=self._num_restarts,
            num_forkserver_restarts=self._num_forkserver_restarts,
            num_done=self._num_done,
            num_failed=self._num_failed,
            pids=tuple(p.pid for p in self._alive if p.pid is not None),
        )

    @property
    def impairment(self) -> str | None:
        """What is wrong with media preparation now; None when nothing is, or it was never started, or is closed."""
        if self._supervisor is None or self._is_closed:
            return None
        if self._unavailable is not None:
            return self._unavailable
        if self._forkserver is not None and self._forkserver.lost.is_set():
            return "preparers are being started again"
        if len(self._alive) < self._num_preparers:
            return f"{len(self._alive)} of {self._num_preparers} preparers are running"
        return None

    async def close(self) -> None:
        """Fail all jobs with Unavailable and end all processes: busy preparers are killed. Idempotent."""
        self._unavailable = "the server is shutting down"
        self._is_closed = True
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Keep a fork server alive until cancelled, or until the first one does not come up."""
        pause_s = 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                num_done, began = self._num_done, loop.time()
                try:
                    await self._live(started)
                except StartupFailed as error:
                    logger.error("media preparation cannot start: %s", error.message)
                    _fail_start(started, error)
                except Exception:  # the supervisor: whatever ended it, media preparation starts again
                    logger.exception("media preparation has failed and starts again")
                _fail_start(started, StartupFailed("media preparation ended while it started; its log says why"))
                if started.exception() is not None:
                    return
                was_of_use = self._num_done > num_done or loop.time() - began > LAST_PAUSE_S
                pause_s = _longer(0.0 if was_of_use else pause_s)
                self._num_forkserver_restarts += 1
                await asyncio.sleep(pause_s)
        finally:
            self._refuse_jobs("media preparation has ended")
            _fail_start(started, StartupFailed("media preparation was closed while it started"))
            await _to_the_end(self._forkservers.close())
            self._copiers.shutdown(wait=False)

    async def _start_forkserver(self) -> ForkserverProcess:
        self._progress("loading the model's processor")
        forkserver = await ForkserverProcess.start(
            factory=self._factory,
            factory_config=self._factory_config,
            setup=self._setup,
            environment=self._environment,
            timeout_s=self._config.start_timeout_s,
        )
        for could in forkserver.sandbox.missing():
            logger.warning("a preparer that a hostile file takes over could %s", could)
        if not forkserver.reads_memory:
            logger.warning("a preparer that a hostile file takes over could %s", WRITE_ARENA)
        return forkserver

    async def _live(self, started: asyncio.Future[None]) -> None:
        """One fork server's life, with all its preparers. Raises StartupFailed when it does not come up."""
        forkserver = self._forkserver = await self._forkservers.take()
        try:
            self._progress(f"starting {self._num_preparers} preparers")
            async with asyncio.TaskGroup() as slots:
                for index in range(self._num_preparers):
                    slots.create_task(self._run_slot(forkserver, started), name=f"preparer-slot-{index}")
                slots.create_task(self._watch(forkserver), name="forkserver-watch")
                slots.create_task(self._forkservers.keep_spare(forkserver), name="forkserver-spare")
        finally:
            self._refuse_jobs_for_long()
            await _to_the_end(forkserver.close())

    async def _watch(self, forkserver: ForkserverProcess) -> None:
        await forkserver.lost.wait()
        self._refuse_jobs_for_long()

    def _refuse_jobs_for_long(self) -> None:
        """Refuse jobs where another processor has to be built; a spare takes them over in milliseconds."""
        if not self._forkservers.has_spare:
            self._refuse_jobs("media preparation is restarting")

    def _refuse_jobs(self, why: str) -> None:
        self._unavailable = why
        self._queue.fail_all(Unavailable(why))

    async def _run_slot(self, forkserver: ForkserverProcess, started: asyncio.Future[None]) -> None:
        """Keep one preparer at work until the fork server is lost."""
        pause_s = 0.0
        while not forkserver.lost.is_set():
            num_jobs = 0
            try:
                preparer = await forkserver.fork(self._queue.wake)
            except ForkserverLost:
                return
            except PreparerLost as error:
                logger.warning("no new preparer: %s", error)
                _fail_start(started, StartupFailed("a preparer ended while it started; its log says why"))
            else:
                self._join(preparer, forkserver, started)
                num_jobs = await self._serve(preparer, forkserver)
            pause_s = 0.0 if num_jobs else _longer(pause_s)
            if pause_s:
                await _wait(forkserver.lost, pause_s)

    def _join(self, preparer: PreparerProcess, forkserver: ForkserverProcess, started: asyncio.Future[None]) -> None:
        self._alive.add(preparer)
        if not forkserver.lost.is_set():
            self._unavailable = None
        if len(self._alive) == self._num_preparers and not started.done():
            started.set_result(None)
            self._progress(f"{self._num_preparers} preparers ready")

    async def _serve(self, preparer: PreparerProcess, forkserver: ForkserverProcess) -> int:
        """Give jobs to a preparer until it is gone or has served its time; return how many it was given."""
        most = self._config.max_jobs_per_preparer
        num_jobs = 0
        died = True
        try:
            while (job := await self._queue.take(lambda: preparer.gone)) is not None:
                num_jobs += 1
                self._num_busy += 1
                try:
                    healthy = await self._run(job, preparer, forkserver)
                finally:
                    self._num_busy -= 1
                if not healthy:
                    break
                if num_jobs == most:
                    died = False
                    break
        finally:
            self._alive.discard(preparer)
            await _to_the_end(preparer.stop(GRACE_S))
        self._num_restarts += died
        return num_jobs

    async def _run(self, job: Job, preparer: PreparerProcess, forkserver: ForkserverProcess) -> bool:
        """Run one job to its result. False when its preparer is not to be used again; then it has been stopped."""
        try:
            async with asyncio.timeout(job.timeout_s) as job.deadline:
                lease = await self._converse(job, preparer)
        except MedialaneError as error:  # told by the preparer, which is fine, or the arena is full
            self._fail(job, error)
            job.close()
            return True
        except TimeoutError:
            why = "nobody waits for its job" if job.is_disowned else f"its job took over {job.timeout_s:g} s"
            logger.warning("preparer %d (pid %s) is killed: %s", preparer.preparer_id, preparer.pid, why)
            self._fail(job, PreparerTimeout(f"preparing this item took longer than {job.timeout_s:g} s"))
        except PreparerLost as error:
            logger.warning("a job has lost its preparer: %s", error)
            self._fail(job, _crash(forkserver))
        except Exception:  # this slot supervises jobs: one job's surprise must not end those of the others
            logger.exception("a job failed unexpectedly; preparer %d is replaced", preparer.preparer_id)
            self._fail(job, PreparationFailed("this item could not be prepared"))
        except BaseException:
            self._fail(job, Unavailable("media preparation has ended"))
            await _to_the_end(self._bury(job, preparer))
            raise
        else:
            job.finish(lease)
            job.close()
            self._num_done += 1
            return True
        await _to_the_end(self._bury(job, preparer))
        return False

    async def _converse(self, job: Job, preparer: PreparerProcess) -> Lease[Feature] | None:
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
            raise MediaTooLarge(f"the item takes {nbytes} bytes once it is prepared, more than this server has for it")
        job.reservation = self._arena.reserve(nbytes, "decoded" if job.options is None else "processed")
        return job.reservation

    async def _copy(self, preparer: PreparerProcess, need: NeedRange, tensors: Sequence[TensorDescriptor]) -> None:
        """Copy tensors from the preparer into the arena, in a thread unless they are few. Raises PreparerLost.

        Cancelled, it waits for the thread: until then the range is written to.
        """
        with contextlib.ExitStack() as views:
            into = [views.enter_context(self._arena.view.tensor(tensor, writable=True)) for tensor in tensors]
            if sum(data.nbytes for data in into) <= COPIED_AT_ONCE_BYTES // self._num_preparers:
                preparer.read(need.addresses, into)
            else:
                loop = asyncio.get_running_loop()
                await _to_the_end(loop.run_in_executor(self._copiers, preparer.read, need.addresses, into))

    async def _bury(self, job: Job, preparer: PreparerProcess) -> None:
        """End the preparer, then give back what its job held; if it does not die, that stays held for ever."""
        if await preparer.stop(0):
            job.close()

    def _fail(self, job: Job, error: MedialaneError) -> None:
        job.fail(error)
        self._num_failed += 1


_Report = TypeVar("_Report", NeedRange, Done)


def _expect(kind: type[_Report], report: JobReport, job_id: int) -> _Report:
    """The report, if it is of this kind and of this job. Raises the error of a JobFailed, or PreparerLost."""
    if isinstance(report, JobFailed) and report.job_id == job_id:
        raise from_report(report.report)
    if isinstance(report, kind) and report.job_id == job_id:
        return report
    raise PreparerLost(f"unexpected {type(report).__name__}")


def _crash(forkserver: ForkserverProcess) -> MedialaneError:
    # The kernel closes the fork server's channel before it kills the preparers, so reading it now tells who died first.
    forkserver.poll()
    if forkserver.lost.is_set():
        return Unavailable("media preparation is restarting")
    return PreparerCrashed("the process that decoded this item has crashed")


def _fail_start(started: asyncio.Future[None], error: StartupFailed) -> None:
    if not started.done():
        started.set_exception(error)


def _longer(pause_s: float) -> float:
    return min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)


async def _to_the_end(work: Awaitable[object]) -> None:
    """Wait for clean-up that must not stop half-way: cancelled meanwhile, this waits on, then is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
