"""One preparer: a forked process that runs jobs from its channel, one at a time, until the channel is closed.

A job reads encoded bytes from the arena, decodes them, runs the engine's processor and reports the addresses of the
tensors in this process's memory, from which the store copies them into the arena. A decoder compromised by a hostile
file cannot use the network, write files, start or signal processes, or change the arena (`sandbox`); it can read the
arena and falsify its own results. If the kernel does not let the store read this process's memory, the arena is
mapped writable, and tensors are copied into a range assigned by the store. Tensors are kept until the store reports
that it has copied them; the next job may run before.
A MedialaneError fails only the job; so does an unexpected exception, which is logged here. If the process dies, the
pool fails the job and forks another one. The protocol is in `messages`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence

from medialane.arena import ArenaView, ClientSlot, describe
from medialane.media import decode, measure, open_document, probe
from medialane.prepare.messages import (
    MAX_FRAME_BYTES,
    READ_BYTES,
    BlankDescribed,
    DescribeBlank,
    Done,
    ItemOpened,
    ItemRequest,
    JobFailed,
    JobReport,
    JobRequest,
    NeedRange,
    OpenItem,
    PreparerReady,
    PreparerSetup,
    ProcessItem,
    Range,
    decode_job_request,
    encode_frame,
)
from medialane.prepare.processor import ProcessedItem, Processor, decoded_item, image_file
from medialane.prepare.sandbox import Sandbox, address_of, allow_reader
from medialane.types.errors import MedialaneError, MediaTooLarge, PreparationFailed, to_report
from medialane.types.feature import MAX_HEADER_BYTES
from medialane.types.media import MAX_METADATA_BYTES, EncodedMedia, MediaSize
from medialane.types.tensor import MAX_TENSORS, ArenaRange, TensorSpec
from medialane.wire.connection import FrameReader

logger = logging.getLogger(__name__)


class Preparer:
    """The preparer's side of the job channel. Owns the channel and its mapping of the arena."""

    def __init__(
        self,
        jobs: socket.socket,
        processor: Processor,
        setup: PreparerSetup,
        sandbox: Sandbox,
        *,
        writes_arena: bool,
        reader_pid: int,
    ) -> None:
        self._jobs = jobs
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._processor = processor
        self._media = setup.media
        self._items: dict[int, ProcessedItem] = {}
        if writes_arena:  # the lock shows the next store that this process may still write
            self._slot = ClientSlot.take(setup.arena, setup.arena_directory, setup.slot)
        self._arena = ArenaView.open(setup.arena, setup.arena_directory, writable=writes_arena)
        allow_reader(reader_pid)
        sandbox.enter(processor.files, jobs=jobs.fileno(), memory_limit_bytes=setup.memory_limit_bytes)

    def run(self) -> None:
        """Run jobs until the store closes the channel. Raises ValueError for a protocol violation."""
        try:
            self._send(PreparerReady(os.getpid()))
            while (request := self._receive()) is not None:
                self._answer(request)
        except (BrokenPipeError, ConnectionResetError):
            return  # the store closed the channel during a job and does not expect a result

    def _answer(self, request: JobRequest) -> None:
        if isinstance(request, ItemRequest):
            error = self._run_job(request)
            if error is not None:
                self._send(JobFailed(request.job_id, to_report(error)))
            return
        item = self._items.pop(request.job_id, None)
        if item is None:
            raise ValueError(f"unexpected {type(request).__name__}")
        if isinstance(request, Range):
            self._write(item, request.range)
            self._send(Done(request.job_id))

    def _run_job(self, job: ItemRequest) -> MedialaneError | None:
        """Run one job and report its result, or return its error."""
        try:
            self._send(self._report(job))
        except MedialaneError as error:
            return error
        except (BrokenPipeError, ConnectionResetError):
            raise
        except MemoryError:
            logger.warning("a job ran out of memory (memory_limit_bytes)")
            return PreparationFailed("preparing this item exceeds the memory limit")
        except Exception:  # supervises the jobs: a bug in one must not affect the next
            logger.exception("a job failed unexpectedly")
            return PreparationFailed("preparing this item failed")
        return None

    def _report(self, job: ItemRequest) -> JobReport:
        match job:
            case ProcessItem():
                return self._process(job)
            case OpenItem():
                return self._open(job)
            case DescribeBlank():
                return self._describe(job)

    def _open(self, job: OpenItem) -> ItemOpened:
        encoded, data = job.encoded, self._encoded(job.encoded)
        modality, media_type = encoded.modality, encoded.media_type
        if job.pages is not None:
            return ItemOpened(job.job_id, document=open_document(data, encoded.content_hash, job.pages, self._media))
        if job.io is None:
            probe(data, modality, media_type, self._media)
            return ItemOpened(job.job_id)
        sampler = self._processor
        size = measure(data, modality, media_type=media_type, io=job.io, config=self._media, sampler=sampler)
        return ItemOpened(job.job_id, size)

    def _describe(self, job: DescribeBlank) -> BlankDescribed:
        described = self._processor.describe(job.modality, job.size, job.options)
        if described is not None:
            _check_size(described.header, described.size)
        return BlankDescribed(job.job_id, described)

    def _process(self, job: ProcessItem) -> NeedRange:
        started = time.perf_counter()
        encoded = job.encoded
        media = decode(
            self._encoded(encoded),
            encoded.modality,
            media_type=encoded.media_type,
            io=job.io,
            config=self._media,
            sampler=self._processor,
        )
        decoded = time.perf_counter()
        if job.options is not None:
            item = self._processor.process(media, job.options)
        else:
            item = image_file(media) if job.as_file else decoded_item(media)
        del media  # free the pixels while the store makes space
        processed = time.perf_counter()
        _check_size(item.header, item.size, item.specs)
        addresses = tuple(map(address_of, item.buffers))
        self._items[job.job_id] = item
        return NeedRange(
            job.job_id, item.specs, addresses, item.header, item.size, decoded - started, processed - decoded
        )

    def _encoded(self, encoded: EncodedMedia) -> memoryview:
        entry = self._arena.entry(encoded.range, writable=False)
        return entry[encoded.data_offset : encoded.data_offset + encoded.num_bytes]

    def _write(self, item: ProcessedItem, target: ArenaRange) -> None:
        for tensor, buffer in zip(describe(target, item.specs), item.buffers, strict=True):
            if buffer.nbytes:  # an empty view cannot be cast
                self._arena.tensor(tensor, writable=True)[:] = buffer.cast("B")

    def _send(self, report: JobReport) -> None:
        self._jobs.sendall(encode_frame(report))

    def _receive(self) -> JobRequest | None:
        """Return the next request; None if the channel is closed."""
        while (frame := self._frames.next_frame()) is None:
            if not (data := self._jobs.recv(READ_BYTES)):
                return None
            self._frames.receive(data)
        return decode_job_request(frame)


def _check_size(header: bytes, media: MediaSize, specs: Sequence[TensorSpec] = ()) -> None:
    """Raise MediaTooLarge for what the store would not decode."""
    for what, size, limit in (
        ("bytes of metadata", len(header), MAX_HEADER_BYTES),
        ("bytes of a video's metadata", len(media.metadata), MAX_METADATA_BYTES),
        ("tensors", len(specs), MAX_TENSORS),
    ):
        if size > limit:
            raise MediaTooLarge(f"this item has {size} {what} after processing, more than {limit}")
