"""One job in one preparer, from its first message to its result:

    send -> NeedRange -> send the next job -> reserve in the arena -> copy -> publish -> JobResult

No job can stop the pool: every exception becomes a result. A MedialaneError fails only the job; any other exception
also marks the preparer as unusable. A job that loses its preparer, or exceeds its time limit, is run again once. An
item that has ended several preparers is refused for a while (`Quarantine`). A preparer may have been taken over by a
hostile file, and the error that it reports becomes the answer to a client: it may choose among the errors that decoding
and processing raise, and its text is short and plain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cachetools import TTLCache

from medialane.arena import Arena, Pin, Reservation, describe, header_bytes, layout
from medialane.prepare.forkserver_process import PreparerLost, PreparerProcess
from medialane.prepare.job_queue import Job, JobResult, JobValue
from medialane.prepare.messages import (
    BlankDescribed,
    DescribeBlank,
    Done,
    FreeTensors,
    ItemOpened,
    JobFailed,
    JobReport,
    NeedRange,
    OpenItem,
    ProcessItem,
    Range,
)
from medialane.runtime.resources import activity, cpu_seconds
from medialane.types import errors
from medialane.types.errors import (
    ErrorReport,
    MedialaneError,
    MediaTooLarge,
    PreparationFailed,
    PreparerCrashed,
    PreparerTimeout,
    Unavailable,
)
from medialane.types.feature import EntryKind, Feature
from medialane.types.tensor import TensorDescriptor

logger = logging.getLogger(__name__)

#: Up to this size, divided by the number of preparers, tensors are copied by the event loop, at 0.15-0.25 ms per MiB:
#: waking another thread would take 0.4 ms, during which the preparer waits. The division bounds the time that the loop
#: spends copying, for any number of preparers.
COPIED_AT_ONCE_BYTES = 12 * 1024 * 1024

#: One system call for each: 5 us.
COPIED_AT_ONCE_TENSORS = 64

#: Up to this size, tensors are copied while the preparer runs the next job: it needs that much more memory then.
OVERLAPPED_BYTES = 32 * 1024 * 1024

#: A preparer that has had less of a core when its job exceeds the time limit is not blamed on the item.
MIN_CPU_SHARE = 0.5


#: Preparers that an item may end. Two are one request's: an item is run again once.
MAX_ENDED = 3

#: Seconds after the last of them for which the item is refused, and most items that are remembered.
QUARANTINE_S = 300.0
MAX_ITEMS = 4096


class Quarantine:
    """Items that have ended several preparers. An item is known by its key in the arena, which covers content, options
    and salt: one tenant's options refuse nobody else's use of the same file, and a video that takes too much memory is
    accepted with fewer frames. A probe is known by its content alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ended: TTLCache[str, int] = TTLCache(MAX_ITEMS, QUARANTINE_S, clock)

    def check(self, key: str) -> None:
        """Raise PreparerCrashed if the item is refused."""
        if self._num_ended.get(key, 0) >= MAX_ENDED:
            message = f"this item is refused for up to {QUARANTINE_S:g} s: it has crashed or hung {MAX_ENDED} decoders"
            raise PreparerCrashed(message)

    def add(self, key: str) -> None:
        """Count that a preparer died or was killed while it worked on the item."""
        self._num_ended[key] = self._num_ended.get(key, 0) + 1
        if self._num_ended[key] == MAX_ENDED:
            logger.error("item %s is refused for %g s: it has ended %d preparers", key, QUARANTINE_S, MAX_ENDED)

    def clear(self, key: str) -> None:
        """Forget the item, which has been prepared: something else has ended its preparers."""
        self._num_ended.pop(key, None)


class JobRunner:
    """Runs jobs on up to `num_preparers` preparers concurrently. Owns the copy threads until `close`."""

    def __init__(self, arena: Arena, quarantine: Quarantine, *, num_preparers: int) -> None:
        self._arena = arena
        self._quarantine = quarantine
        self._copied_at_once_bytes = COPIED_AT_ONCE_BYTES // num_preparers
        self._copiers = ThreadPoolExecutor(num_preparers, "medialane-copy")

    async def run(
        self,
        job: Job,
        preparer: PreparerProcess,
        forkserver_is_lost: Callable[[], bool],
        send_next: Callable[[], Awaitable[None]],
    ) -> JobResult:
        """Run one job within its deadline. Raises nothing; if cancelled, the preparer's state is unknown.

        `send_next` is called once the preparer has processed the item, to start another job during the copy.
        """
        if not job.is_sent:
            job.begin()
        try:
            async with asyncio.timeout_at(job.ends_at) as job.deadline:
                return JobResult(await self._exchange_messages(job, preparer, send_next))
        except MedialaneError as error:  # the arena is full, or reported by the preparer, which stays usable
            return JobResult(error=error)
        except Exception as error:  # noqa: BLE001 - a bug in one job must not affect others; it is logged
            has_timed_out = isinstance(error, TimeoutError) and not job.is_abandoned
            is_run_again = (has_timed_out or isinstance(error, PreparerLost)) and not job.is_retried
            reported = _explain(error, job, preparer, forkserver_is_lost)
            return JobResult(error=reported, is_preparer_usable=False, is_run_again=is_run_again)

    async def send(self, job: Job, preparer: PreparerProcess) -> None:
        """Send a job to its preparer. Raises PreparerLost, or MedialaneError if only the job failed."""
        self._quarantine.check(job.key)
        job.cpu_before_s = cpu_seconds([preparer.pid])
        await preparer.send(job.request)
        job.is_sent = True

    def close(self) -> None:
        """Shut down the copy threads; a copy in progress runs to completion."""
        self._copiers.shutdown(wait=False)

    async def _exchange_messages(
        self, job: Job, preparer: PreparerProcess, send_next: Callable[[], Awaitable[None]]
    ) -> JobValue:
        """Exchange one job's messages. Raises PreparerLost, or MedialaneError if only the job failed."""
        if not job.is_sent:
            await self.send(job, preparer)
        report = await preparer.receive()
        match job.request:
            case OpenItem(_, _, io, pages):
                opened = _expect(ItemOpened, report, job.job_id)
                if (opened.size is None) != (io is None) or (opened.document is None) != (pages is None):
                    raise PreparerLost("unexpected values in ItemOpened")
                return opened
            case DescribeBlank():
                return _expect(BlankDescribed, report, job.job_id).described
            case ProcessItem():
                need = _expect(NeedRange, report, job.job_id)
                return await self._publish(job, preparer, need, send_next)

    async def _publish(
        self, job: Job, preparer: PreparerProcess, need: NeedRange, send_next: Callable[[], Awaitable[None]]
    ) -> Pin[Feature]:
        """Copy what the preparer has made into the arena, and publish it. Raises as `_exchange_messages`."""
        job_id = job.job_id
        decode_s, process_s = (_plausible(reported, job) for reported in (need.decode_s, need.process_s))
        job.busy_s = decode_s + process_s
        if job.timeline is not None:
            processing_at = time.perf_counter() - process_s
            job.timeline.add("decode", decode_s, processing_at - decode_s)
            job.timeline.add("process", process_s, processing_at)
        _, nbytes = layout(need.specs)
        if nbytes <= OVERLAPPED_BYTES and not preparer.writes_arena:
            await send_next()
        try:
            reservation = self._reserve(job, nbytes, need)
        except MedialaneError:
            await preparer.send(FreeTensors(job_id))
            raise
        tensors = describe(reservation.range, need.specs)
        if preparer.writes_arena:
            await preparer.send(Range(job_id, reservation.range))
            _expect(Done, await preparer.receive(), job_id)
        else:
            await self._copy(preparer, need, tensors)
            await preparer.send(FreeTensors(job_id))
        feature = Feature(job.modality, job.key, need.header, tensors, need.size)
        return self._arena.publish(reservation, job.key, feature)

    def _reserve(self, job: Job, nbytes: int, need: NeedRange) -> Reservation:
        """Reserve the item's range.

        Raises ArenaFull, or MediaTooLarge if it can never fit in the arena together with its encoded bytes.
        """
        source_bytes = 0 if job.source is None else job.source.range.nbytes
        if nbytes > self._arena.max_payload_bytes - source_bytes:
            raise MediaTooLarge(f"the item takes {nbytes} bytes once it is prepared, more than this server can store")
        is_decoded = isinstance(job.request, ProcessItem) and job.request.options is None
        kind: EntryKind = "decoded" if is_decoded else "processed"
        job.reservation = self._arena.reserve(nbytes, kind, header_bytes=header_bytes(need.header, need.specs))
        return job.reservation

    async def _copy(self, preparer: PreparerProcess, need: NeedRange, tensors: Sequence[TensorDescriptor]) -> None:
        """Copy tensors from the preparer into the arena, in a thread unless they are small. Raises PreparerLost.

        If cancelled, it waits for the thread, which writes to the range until it is done.
        """
        with contextlib.ExitStack() as views:
            into = [views.enter_context(self._arena.view.tensor(tensor, writable=True)) for tensor in tensors]
            num_bytes = sum(data.nbytes for data in into)
            if num_bytes <= self._copied_at_once_bytes and len(into) <= COPIED_AT_ONCE_TENSORS:
                preparer.read(need.addresses, into)
            else:
                loop = asyncio.get_running_loop()
                await to_the_end(loop.run_in_executor(self._copiers, preparer.read, need.addresses, into))


_Report = TypeVar("_Report", NeedRange, Done, ItemOpened, BlankDescribed)


def _expect(kind: type[_Report], report: JobReport, job_id: int) -> _Report:
    """Return the report if it has this type and job id. Raises the error of a JobFailed, otherwise PreparerLost."""
    if isinstance(report, JobFailed) and report.job_id == job_id:
        raise reported_error(report.report)
    if isinstance(report, kind) and report.job_id == job_id:
        return report
    raise PreparerLost(f"unexpected {type(report).__name__}")


def _plausible(reported_s: float, job: Job) -> float:
    """Return a duration that a preparer has reported, 0 if it cannot be: future waits are estimated from it."""
    return reported_s if 0 <= reported_s <= job.timeout_s else 0.0


def _explain(
    error: Exception, job: Job, preparer: PreparerProcess, forkserver_is_lost: Callable[[], bool]
) -> MedialaneError:
    """Log why a job lost its preparer; return the error for its caller."""
    match error:
        case TimeoutError():
            reason = "its job was cancelled" if job.is_abandoned else f"its job exceeded {job.timeout_s:g} s"
            was_held_up = not job.is_abandoned and _was_held_up(preparer.pid, job)
            reason += " while it was stopped, or had no CPU" if was_held_up else ""
            logger.warning("killing preparer %d (pid %s): %s", preparer.preparer_id, preparer.pid, reason)
            if was_held_up:
                return Unavailable("the process that was to decode this item was stopped, or had no CPU")
            return PreparerTimeout(f"preparing this item took longer than {job.timeout_s:g} s")
        case PreparerLost():
            logger.warning("a job lost its preparer: %s", error)
            if forkserver_is_lost():
                return Unavailable("media preparation is restarting")
            return PreparerCrashed("the decoder process crashed on this item twice")
        case _:
            logger.error("a job failed unexpectedly; preparer %d is replaced", preparer.preparer_id, exc_info=error)
            return PreparationFailed("preparing this item failed")


def _was_held_up(pid: int, job: Job) -> bool:
    """Return whether a preparer made no progress for a reason outside of it. One that sleeps hangs on its item."""
    if (now := activity(pid)) is None:
        return False
    has_had_cpu = now.cpu_s - job.cpu_before_s >= job.timeout_s * MIN_CPU_SHARE
    return now.state in "Tt" or (now.state in "RD" and not has_had_cpu)


async def to_the_end(work: Awaitable[object]) -> None:
    """Wait for clean-up that must complete: a cancellation takes effect only after it is done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


#: What decoding (`media`) and processing (`Processor`) raise.
_REPORTABLE = {
    cls.code: cls
    for cls in (
        errors.AudioTooLong,
        errors.EmptyMedia,
        errors.FeatureUnsupported,
        errors.ImageTooComplex,
        errors.ImageTooLarge,
        errors.InvalidAudio,
        errors.InvalidDocument,
        errors.InvalidBase64,  # in a list of JPEG frames
        errors.InvalidEmbeds,
        errors.InvalidFeature,
        errors.InvalidImage,
        errors.InvalidRequest,
        errors.InvalidVideo,
        errors.MediaTooLarge,
        errors.PreparationFailed,
        errors.PromptRejected,
        errors.TooManyFrames,
        errors.TooManyPages,
        errors.Unavailable,
        errors.UnsupportedMediaType,
        errors.VideoTooLarge,
        errors.VideoTooLong,
    )
}

#: The longest of our own messages has 200 characters, vLLM's are cut at 1000.
MAX_TEXT = 500

#: An absolute path, or a file URL; not the second part of `image/png` or of another URL.
_PATH = re.compile(r"(?:file:/*|(?<![\w/:]))/[\w.~][^\s'\",;)]*")


def reported_error(report: ErrorReport) -> MedialaneError:
    """Return the error that a preparer has reported, without its field, which the store knows."""
    cls = _REPORTABLE.get(report.code)
    if cls is None:
        logger.warning("a preparer has reported an error that preparers do not raise: %s", _plain(report.code))
        return PreparationFailed("preparing this item failed")
    return cls(_plain(report.message) or "preparing this item failed")


def _plain(text: str) -> str:
    """Return one line of printable characters without local paths, at most MAX_TEXT of them."""
    start = text[: 2 * MAX_TEXT]
    line = "".join(character if character.isprintable() else " " for character in start).strip()
    line = _PATH.sub("...", line)
    is_whole = len(line) <= MAX_TEXT and len(text) <= 2 * MAX_TEXT
    return line if is_whole else f"{line[: MAX_TEXT - 4]} ..."
