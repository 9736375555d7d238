"""The store's pool of preparers: encoded items in, pins on features out.

Theory of operation. One supervisor task keeps a fork server alive. Below it, one task per preparer feeds it jobs from
the shared queue (`preparers`); everything about a job happens in that task, in order (`job_run`).

Failures. No job can stop the pool: a MedialaneError fails the job; an unexpected exception fails the job and replaces
its preparer; an exception outside of jobs is logged, and the fork server is restarted. A job whose preparer dies, or
that exceeds its timeout, is run again once, alone; then it fails with PreparerCrashed or PreparerTimeout, or with
Unavailable if its preparer was stopped, or had no CPU. An item
that has ended several preparers is refused before it is queued (`job_run.Quarantine`). The preparers
die with their fork server: running jobs fail with Unavailable, queued jobs wait for the spare fork server to take over;
without a spare they fail as well, and a new processor is built, with exponential backoff if building fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import msgspec

from medialane.arena import Arena, Pin
from medialane.media import MediaConfig
from medialane.observability.timeline import RequestTimeline
from medialane.prepare.config import PrepareConfig
from medialane.prepare.forkserver_process import ForkserverProcess, ProcessorSource, SpareForkserver, is_prebuilt
from medialane.prepare.job_queue import Job, JobQueue, JobValue
from medialane.prepare.job_run import to_the_end
from medialane.prepare.messages import DescribeBlank, ItemOpened, OpenItem, PreparerSetup, ProcessItem
from medialane.prepare.preparers import INITIAL_BACKOFF_S, MAX_BACKOFF_S, Preparers
from medialane.prepare.processor import Described
from medialane.prepare.sandbox import WRITE_ARENA
from medialane.runtime.tasks import Backoff
from medialane.types.errors import MedialaneError, Outage, StartupFailed, Unavailable
from medialane.types.feature import Feature
from medialane.types.media import DocumentOptions, EncodedMedia, MediaSize, MediaSource, Modality, OpenedDocument
from medialane.types.stats import PoolStats

logger = logging.getLogger(__name__)

#: How long a running job may continue after its caller was cancelled. Most images finish within this time and stay
#: cached for a retry; a longer job would block queued ones, so its preparer is killed and replaced.
ABANDONED_S = 0.15


class PreparerPool:
    """Prepares items in parallel processes. One event loop; `start` once, `close` once.

    `factory` is the `module:function` that builds the warm processor inside the fork server from `factory_config`
    (opaque to the pool). `environment` is all that it inherits: preparers count as compromised, and can read it.
    `on_loaded` is called when `processor_settings` are known, before any job has run.
    """

    def __init__(
        self,
        config: PrepareConfig,
        *,
        factory: str,
        factory_config: bytes,
        arena: Arena,
        media: MediaConfig,
        environment: Mapping[str, str],
        progress: Callable[[str], None] = logger.info,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        config.validate()
        self._config = config
        self._source = ProcessorSource(factory, factory_config, environment)
        self._setup = PreparerSetup(arena.id, str(arena.path.parent), arena.slot, media, config.memory_limit_bytes)
        self._progress = progress
        self._on_loaded = on_loaded
        self._is_ready = False
        self._spare = SpareForkserver()
        self._forkserver: ForkserverProcess | None = None
        self._queue = JobQueue(limit=config.queue_limit, timeout_s=config.queue_timeout_s, drain_s=self._drain_s)
        self._outage = Outage()
        self._preparers = Preparers(config, self._queue, arena)
        self._unavailable: str | None = "media preparation has not started"
        self._supervisor: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_forkserver_restarts = 0

    @property
    def is_prebuilt(self) -> bool:
        """Whether the processor has been built already; before `start`."""
        return is_prebuilt(self._source)

    async def start(self) -> None:
        """Start the fork server and all preparers; return when all are ready. Jobs are queued meanwhile.

        Raises StartupFailed, after start_timeout_s at the latest; then no process is left running.
        """
        if self._supervisor is not None:
            raise RuntimeError("the pool has already been started")
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unavailable = None
        self._supervisor = asyncio.create_task(self._supervise(started), name="preparer-pool")
        try:
            await asyncio.shield(started)
        except BaseException:  # cancellation included: the preparers have no other owner
            started.cancel()  # if this was cancelled, there is nobody who would retrieve its exception
            await self.close()
            raise

    async def prepare_item(
        self,
        encoded: Pin[EncodedMedia],
        options: bytes | None,
        mm_hash: str,
        timeline: RequestTimeline | None = None,
        *,
        io: bytes = b"{}",
        as_file: bool = False,
    ) -> Pin[Feature]:
        """Decode and process one item, publish its feature in the arena under `mm_hash`; the caller owns the pin.

        `io` holds the decoding options (as in `MediaRef`), `options` the processor's; without `options` the item
        is only decoded (stage `decoded`), with `as_file` to an image file.

        The caller keeps `encoded`: the job pins it separately. Raises MediaOverloaded (queue full, or no preparer in
        time), ArenaFull, MediaTooLarge (the feature exceeds the arena), PreparerTimeout, PreparerCrashed
        (also if the item is in quarantine), Unavailable, and what decoding and processing raise. A job cancelled in the
        queue is dropped; one cancelled while running is stopped unless it finishes within ABANDONED_S: then its feature
        stays cached.
        """
        media = encoded.value
        prepared = await self._submit(
            Job(
                lambda job_id: ProcessItem(job_id, media, io, options, as_file),
                encoded.duplicate(),
                key=mm_hash,
                modality=media.modality,
                timeout_s=self._config.job_timeout_s(media.modality),
                timeline=timeline,
            )
        )
        return cast("Pin[Feature]", prepared)

    async def probe_item(self, encoded: Pin[EncodedMedia]) -> None:
        """Raise what decoding this item would raise for the file's header (`media.probe`), and what `prepare_item`
        does: this and the following methods also have its ownership and cancellation."""
        await self._open(encoded, OpenItem(0, encoded.value))

    async def measure(self, encoded: Pin[EncodedMedia], io: bytes = b"{}") -> MediaSize:
        """Return the size that this item will have once it is decoded with `io` (`media.measure`)."""
        return cast("MediaSize", (await self._open(encoded, OpenItem(0, encoded.value, io=io))).size)

    async def open_document(self, encoded: Pin[EncodedMedia], options: DocumentOptions) -> OpenedDocument:
        """Return a document with the pages that are wanted (`media.open_document`)."""
        opened = await self._open(encoded, OpenItem(0, encoded.value, pages=options))
        return cast("OpenedDocument", opened.document)

    async def describe_blank(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        """Return what items of this size (as decoded) have in common that are processed with these options; None if
        their headers also depend on their content."""
        described = await self._submit(
            Job(
                lambda job_id: DescribeBlank(job_id, modality, size, options),
                None,
                key=f"blank {modality} {size} {options!r}",
                modality=modality,
                timeout_s=self._config.job_timeout_s(modality),
            )
        )
        return cast("Described | None", described)

    async def _open(self, encoded: Pin[EncodedMedia], wanted: OpenItem) -> ItemOpened:
        modality = encoded.value.modality
        source: MediaSource = modality if wanted.pages is None else "document"
        opened = await self._submit(
            Job(
                lambda job_id: msgspec.structs.replace(wanted, job_id=job_id),
                encoded.duplicate(),
                key=f"opening of {source} {encoded.value.content_hash}",
                modality=modality,
                timeout_s=self._config.job_timeout_s(source),
            )
        )
        return cast("ItemOpened", opened)

    async def _submit(self, job: Job) -> JobValue:
        """Queue the job and wait for its result; the job is closed in any case."""
        try:
            if self._unavailable is not None:
                raise Unavailable(self._unavailable, retry_after_s=self._outage.retry_after_s)
            self._preparers.quarantine.check(job.key)
            self._queue.put(job)
        except MedialaneError:
            job.close()
            raise
        try:
            return await asyncio.shield(job.result)
        except asyncio.CancelledError:
            if not self._queue.withdraw(job):
                job.abandon_result(ABANDONED_S)
            raise

    def stats(self) -> PoolStats:
        preparers = self._preparers
        return PoolStats(
            num_preparers=preparers.num_wanted,
            num_alive=len(preparers.alive),
            num_busy=preparers.num_busy,
            num_queued=len(self._queue),
            num_restarts=preparers.num_restarts,
            num_forkserver_restarts=self._num_forkserver_restarts,
            num_done=preparers.num_done,
            num_failed=preparers.num_failed,
            queue_s=self._queue_s(),
        )

    @property
    def preparer_pids(self) -> tuple[int, ...]:
        """May be read in any thread."""
        return tuple(preparer.pid for preparer in tuple(self._preparers.alive))

    @property
    def forkserver_pids(self) -> tuple[int, ...]:
        """The fork server and the spare, as far as there are. May be read in any thread."""
        pids = (None if self._forkserver is None else self._forkserver.pid, self.spare_pid)
        return tuple(pid for pid in pids if pid is not None)

    @property
    def spare_pid(self) -> int | None:
        """The process that takes over from the fork server; None while there is none."""
        return self._spare.pid

    def _queue_s(self) -> float:
        return self._queue.work_s / (len(self._preparers.alive) or self._preparers.num_wanted)

    def _drain_s(self) -> float:
        return self._queue_s() + self._outage.left_s

    @property
    def processor_settings(self) -> Mapping[str, str]:
        """Settings of the processor; empty before `start`, and for a pool without a model."""
        return {} if self._forkserver is None else self._forkserver.settings

    @property
    def degradation(self) -> str | None:
        """Describe what is wrong with media preparation; None if healthy, never started, or closed."""
        if self._supervisor is None or self._is_closed:
            return None
        if self._unavailable is not None:
            return self._unavailable
        if not self._is_ready:
            return "the model's processor is being loaded"
        if self._forkserver is not None and self._forkserver.lost.is_set():
            return "preparers are restarting"
        if (num_alive := len(self._preparers.alive)) < self._preparers.num_wanted:
            return f"{num_alive} of {self._preparers.num_wanted} preparers are running"
        return None

    async def close(self) -> None:
        """Fail all jobs with Unavailable and terminate all processes: busy preparers are killed. Idempotent."""
        self._unavailable = "the server is shutting down"
        self._is_closed = True
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Keep a fork server alive until cancelled, or until the first one fails to start."""
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S)
        loop = asyncio.get_running_loop()
        try:
            while True:
                num_done, began = self._preparers.num_done, loop.time()
                try:
                    await self._run_forkserver(started)
                except StartupFailed as error:
                    logger.error("media preparation cannot start: %s", error.message)
                    _fail_start(started, error)
                except Exception:  # the supervisor: restart media preparation after any failure
                    logger.exception("media preparation failed and is restarting")
                _fail_start(started, StartupFailed("media preparation failed to start; see its log"))
                if started.exception() is not None:
                    return
                if self._preparers.num_done > num_done or loop.time() - began > MAX_BACKOFF_S:
                    backoff.reset()  # it completed jobs, or ran for long enough
                self._num_forkserver_restarts += 1
                await asyncio.sleep(backoff.next())
        finally:
            self._refuse_jobs("media preparation has ended")
            _fail_start(started, StartupFailed("media preparation was closed while it started"))
            await to_the_end(self._spare.close())
            self._preparers.close()

    async def _start_forkserver(self) -> ForkserverProcess:
        self._progress("importing the model's processor")
        timeout_s = self._config.start_timeout_s
        forkserver = await ForkserverProcess.start(self._source, self._setup, timeout_s=timeout_s)
        for capability in forkserver.sandbox.missing():
            logger.warning("a preparer compromised by a hostile file could %s", capability)
        if not forkserver.reads_memory:
            logger.warning("a preparer compromised by a hostile file could %s", WRITE_ARENA)
        return forkserver

    async def _run_forkserver(self, started: asyncio.Future[None]) -> None:
        """Run one fork server and its preparers until it dies. Raises StartupFailed if it fails to start."""
        forkserver = self._forkserver = await self._spare.take() or await self._start_forkserver()
        try:
            self._on_loaded()
            self._progress("starting the preparers")
            ready = partial(self._note_ready, forkserver, started)
            failed = partial(_fail_start, started, StartupFailed("a preparer failed to start; see its log"))
            async with asyncio.TaskGroup() as slots:
                for index in range(self._preparers.num_wanted):
                    slot = self._preparers.run_slot(forkserver, ready, failed)
                    slots.create_task(slot, name=f"preparer-slot-{index}")
                slots.create_task(self._watch(forkserver), name="forkserver-watch")
                slots.create_task(self._spare.keep(forkserver), name="forkserver-spare")
        finally:
            self._refuse_jobs_without_spare()
            await to_the_end(forkserver.close())

    async def _watch(self, forkserver: ForkserverProcess) -> None:
        await forkserver.lost.wait()
        self._refuse_jobs_without_spare()

    def _refuse_jobs_without_spare(self) -> None:
        """Refuse jobs if a new processor has to be built; a spare takes them over in milliseconds."""
        if self.spare_pid is None:
            self._refuse_jobs("media preparation is restarting")

    def _refuse_jobs(self, reason: str) -> None:
        self._unavailable = reason
        self._outage.begin()
        self._queue.fail_all(Unavailable(reason, retry_after_s=self._outage.retry_after_s))

    def _note_ready(self, forkserver: ForkserverProcess, started: asyncio.Future[None]) -> None:
        """Called when a preparer is ready; the last one completes `started`."""
        self._outage.end()
        if not forkserver.lost.is_set():
            self._unavailable = None
        if len(self._preparers.alive) == self._preparers.num_wanted and not started.done():
            started.set_result(None)
            self._is_ready = True
            self._progress(f"{self._preparers.num_wanted} preparers ready")


def _fail_start(started: asyncio.Future[None], error: StartupFailed) -> None:
    if not started.done():
        started.set_exception(error)
