"""Appends the requests of a gateway to a file. See the package's docstring."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from medialane.gateway.recording.config import RecordingConfig
from medialane.gateway.recording.recorded_body import Recordable, RecordedBody, Unrecordable
from medialane.gateway.recording.redaction import Redaction
from medialane.types.errors import StartupFailed

logger = logging.getLogger(__name__)

#: Endpoints that `medialane compare` can ask again.
RECORDED_PATHS: Final = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed",
        "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        "/v1/audio/transcriptions", "/v1/audio/translations",
    )
)  # fmt: skip
#: Of bodies and media that wait to be written; more are left out.
MAX_PENDING_BYTES: Final = 64 << 20
_MAX_PENDING: Final = 1000
_KEY_BYTES: Final = 32
_CLOSE_S: Final = 3.0
#: Of one call of writev (IOV_MAX).
_MAX_PIECES: Final = 1024


class Recorder:
    """One per gateway. `offer` is for the event loop; `close` once no more requests end."""

    def __init__(self, file: int, key: bytes, config: RecordingConfig, *, max_pending_bytes: int) -> None:
        self._file = file
        self._max_pending_bytes = max_pending_bytes
        self._config = config
        self._redaction = Redaction(key)
        self._pending: queue.SimpleQueue[Recordable | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._has_ended = False
        self._num_written = self._num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, config: RecordingConfig, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> Recorder | None:
        """Return the recorder of this configuration; None if there is nothing to record. Raises StartupFailed."""
        if not config.file:
            return None
        try:
            key = _shared_key(Path(f"{config.file}.key"))
            file = os.open(config.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(f"--record {config.file}: {error.strerror}") from error
        return cls(file, key, config, max_pending_bytes=max_pending_bytes)

    def offer(self, request: Recordable) -> None:
        """Have a request written, unless too much waits for that, or the recording has ended. Does not block."""
        if self._has_ended or request.record.path not in RECORDED_PATHS:
            return
        num_bytes = request.num_bytes
        with self._lock:
            is_full = self._pending_bytes + num_bytes > self._max_pending_bytes or self._pending.qsize() >= _MAX_PENDING
            if not is_full:
                self._pending_bytes += num_bytes
        if is_full:
            self._leave_out("more end than can be written")
        else:
            self._pending.put(request)

    async def close(self) -> None:
        """Write what waits, for a few seconds at most, and close the file. Idempotent."""
        self._pending.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _run(self) -> None:
        try:
            while (request := self._pending.get()) is not None:
                self._write(request)
                with self._lock:
                    self._pending_bytes -= request.num_bytes
                del request  # its media must not stay until the next one comes
        except OSError as error:
            logger.error("--record %s: recording has ended: %s", self._config.file, error.strerror)
        except Exception:
            logger.exception("--record %s: recording has ended", self._config.file)
        finally:
            self._end()

    def _end(self) -> None:
        """Drop what waits, and whatever is still offered."""
        self._has_ended = True
        with suppress(queue.Empty):
            while True:
                self._pending.get_nowait()
        os.close(self._file)
        logger.info("%d requests were recorded, %d left out", self._num_written, self._num_left_out)

    def _write(self, request: Recordable) -> None:
        """Append a request. Raises OSError."""
        if self._has_ended:
            return
        try:
            body = RecordedBody(request, self._redaction, self._config)
            line = body.line() if body.is_sampled() else []
        except (Unrecordable, ValueError, RecursionError) as error:
            self._leave_out(f"of one that cannot be recorded: {error}")
            return
        if not line:
            return
        if os.fstat(self._file).st_size + sum(map(len, line)) > self._config.max_bytes:
            self._has_ended = True
            logger.warning(
                "--record %s: recording has ended: the file has reached --record-max-bytes", self._config.file
            )
            return
        with self._whole_lines():
            _write_all(self._file, line)
        self._num_written += 1

    @contextmanager
    def _whole_lines(self) -> Iterator[None]:
        """If the block fails, end what it has written of a line: other gateways go on after it."""
        before = os.fstat(self._file).st_size
        try:
            yield
        except OSError:
            with suppress(OSError):  # the disk is full
                if os.fstat(self._file).st_size != before:
                    os.write(self._file, b"\n")
            raise

    def _leave_out(self, reason: str) -> None:
        if not self._num_left_out:
            logger.warning("--record %s: requests are left out, the first because %s", self._config.file, reason)
        self._num_left_out += 1


def _write_all(file: int, pieces: Sequence[bytes]) -> None:
    """Write in one call, so that lines of several gateways do not mix; in more if the kernel takes only a part."""
    rest = [memoryview(piece) for piece in pieces]
    while rest:
        num_bytes = os.writev(file, rest[:_MAX_PIECES])
        while rest and num_bytes >= len(rest[0]):
            num_bytes -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][num_bytes:]


def _shared_key(path: Path) -> bytes:
    """Return the key in this file, made by whichever gateway comes first. Raises OSError, StartupFailed."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(own, path)  # with its content, or not at all
    finally:
        os.close(file)
        own.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise StartupFailed(f"{path} is not the key of a recording: it has {len(key)} bytes instead of {_KEY_BYTES}")
    return key
