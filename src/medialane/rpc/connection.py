"""One connection between a gateway and a worker, the same at both ends: frames, batching, back pressure, liveness.

**Writing.** Messages are encoded at once into one buffer that goes to the transport when the event loop next comes
round, so the deltas of many requests in one engine step cost one system call. A buffer that has grown large goes at
once. `writable` waits while the peer reads too slowly; whoever does not wait is bounded by `max_write_buffer_bytes`,
beyond which the connection ends. What is long goes in pieces (`send_in_pieces`), behind which nothing else waits.

**Liveness.** A silent peer is counted in our own heartbeats, not by the clock: if this process itself stalls (a loaded
machine, SIGSTOP), it makes no beats, and the peer's bytes that wait in the kernel are read before the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol, cast

import msgspec

from medialane.core.errors import MedialaneError, ProtocolViolation, WorkerLost
from medialane.rpc.config import RpcConfig
from medialane.rpc.framing import FrameReader, append_frame

logger = logging.getLogger(__name__)

#: A write buffer larger than this does not wait for the loop's next round.
FLUSH_BYTES = 256 * 1024


class Peer(Protocol):
    """What one end does with its connection. All are called from the event loop and return at once."""

    def opened(self, connection: Connection) -> None: ...

    def received(self, frame: memoryview) -> None:
        """Act on one frame, which is valid during the call. Raises ProtocolViolation, which ends the connection."""

    def beat(self) -> None:
        """A heartbeat interval has passed; say something to the peer."""

    def lost(self, error: MedialaneError) -> None:
        """The connection is gone, whoever ended it. Called once, last."""


class PieceSource(Protocol):
    """Something long that is sent in pieces, between which the loop does other things."""

    def append_next(self, buffer: bytearray) -> bool:
        """Append whole frames, some hundred KiB at the most; False when there are no more. Called from the loop."""
        ...


class Connection(asyncio.Protocol):
    """Owns the transport. `send` is lawful until the peer has been told `lost`; afterwards it does nothing."""

    def __init__(self, peer: Peer, config: RpcConfig, *, max_frame_bytes: int) -> None:
        self._peer = peer
        self._config = config
        self._frames = FrameReader(max_frame_bytes)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._flushing: asyncio.Handle | None = None
        self._sources: deque[PieceSource] = deque()
        self._pumping: asyncio.Handle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._num_silent_beats = 0
        self._error: MedialaneError | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.closed = asyncio.Event()

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return len(self._buffer) + waiting

    @property
    def paused(self) -> bool:
        """The peer reads too slowly: wait for `writable` before sending what can wait."""
        return not self._can_write.is_set()

    async def writable(self) -> None:
        """Wait until the peer has read enough, or the connection is gone."""
        await self._can_write.wait()

    def send(self, message: msgspec.Struct, *, at_once: bool = False) -> None:
        """Queue one message. Raises ProtocolViolation, with nothing queued, if it is larger than a frame may be.

        `at_once` gives it to the transport now, with what is queued before it: a request that a worker waits for is
        rarely one of many.
        """
        if self._error is not None or self.closed.is_set():
            return
        append_frame(self._buffer, message, self._config.max_frame_bytes)
        if at_once or len(self._buffer) > FLUSH_BYTES:
            self._write()
        elif self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def send_in_pieces(self, source: PieceSource) -> None:
        """Send what `source` gives, after the sources before it, as fast as the peer reads and a piece in each round of
        the loop. It is forgotten when the connection is gone."""
        if self._error is None and not self.closed.is_set():
            self._sources.append(source)
            self._pump_soon()

    def accept_large_frames(self) -> None:
        """The peer is known now: frames may be as large as configured."""
        self._frames.max_frame_bytes = self._config.max_frame_bytes

    def start_heartbeat(self) -> None:
        """Beat until the connection is gone, and end it when the peer stays silent."""
        if not self.closed.is_set():
            self._num_silent_beats = 0
            self._beating = self._loop.call_later(self._config.heartbeat_interval_s, self._beat)

    def end(self, error: MedialaneError) -> None:
        """End the connection now; what is buffered is dropped. `lost` is told the first reason given."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Write what is buffered, then end. A peer that does not read keeps it open: after a deadline, call `end`."""
        self._write()
        self._error = self._error or WorkerLost("the connection was closed")
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # asyncio types it by what a datagram has, too
        if self._error is not None:  # given up while it was being made
            self._transport.abort()
        self._peer.opened(self)

    def data_received(self, data: bytes) -> None:
        self._num_silent_beats = 0
        try:
            self._frames.receive(data)
            while self._error is None and (frame := self._frames.next_frame()) is not None:
                self._peer.received(frame)
        except ProtocolViolation as error:
            logger.warning("ending the connection: %s", error.message)
            self.end(error)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._pump_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._flushing, self._pumping, self._beating):
            if handle is not None:
                handle.cancel()
        self._buffer.clear()
        self._sources.clear()
        self._can_write.set()
        self._error = self._error or WorkerLost("the connection was lost")
        self.closed.set()
        self._peer.lost(self._error)

    def _flush(self) -> None:
        self._flushing = None
        self._write()

    def _write(self) -> None:
        if not self._buffer or self._transport is None or self._error is not None:
            return
        # The transport may keep a reference, so it gets the buffer itself and the next messages a new one.
        data, self._buffer = self._buffer, bytearray()
        self._transport.write(data)
        if self.num_buffered_bytes > self._config.max_write_buffer_bytes + self._config.max_frame_bytes:
            self.end(WorkerLost("the peer does not read"))

    def _pump_soon(self) -> None:
        if self._sources and self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = None
        if not self._sources or self.paused or self._error is not None:
            return
        if not self._sources[0].append_next(self._buffer):
            self._sources.popleft()
        self._write()
        if not self.paused:  # else `resume_writing` goes on
            self._pump_soon()

    def _beat(self) -> None:
        self._num_silent_beats += 1
        if self._num_silent_beats * self._config.heartbeat_interval_s > self._config.heartbeat_timeout_s:
            self.end(WorkerLost("the peer is silent"))
            return
        self._beating = self._loop.call_later(self._config.heartbeat_interval_s, self._beat)
        self._peer.beat()
