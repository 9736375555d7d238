"""A connection between a gateway and a worker, symmetric: frames, batching, back pressure, liveness.

**Writing.** Messages are encoded immediately into one buffer, which is written in the next iteration of the event loop,
so the deltas of many requests in one engine step cost one system call. A large buffer is written immediately.
`writable` waits while the peer reads too slowly; callers that do not wait are limited by `max_write_buffer_bytes`,
beyond which the connection is closed. Large content is sent in pieces (`send_in_pieces`), interleaved with messages.

**Liveness.** Missed heartbeats are counted in our own beats, not by the clock: if this process stalls (a loaded
machine, SIGSTOP), it counts no beats, and the peer's bytes buffered in the kernel are read before the next one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from typing import Protocol, cast

import msgspec

from medialane.types.errors import MedialaneError, ProtocolViolation, WorkerLost
from medialane.wire.config import RpcConfig
from medialane.wire.framing import FrameReader, append_frame

logger = logging.getLogger(__name__)

#: A write buffer larger than this is written without waiting for the next iteration of the event loop.
FLUSH_BYTES = 256 * 1024


class Peer(Protocol):
    """Callbacks of a connection's owner. All are called from the event loop and must not block."""

    def opened(self, connection: Connection) -> None: ...

    def received(self, frame: memoryview) -> None:
        """Handle one frame, valid only during the call. Raises ProtocolViolation, which closes the connection."""

    def beat(self) -> None:
        """Called at each heartbeat interval; must send a message to the peer."""

    def lost(self, error: MedialaneError) -> None:
        """The connection was closed, by either side. Called once, last."""


class PieceSource(Protocol):
    """Large content that is sent in pieces, one per iteration of the event loop."""

    def append_next(self, buffer: bytearray) -> bool:
        """Append whole frames, at most a few hundred KiB; return False after the last. Called from the event loop."""
        ...


class Connection(asyncio.Protocol):
    """Owns the transport. After the connection is closed, `send` has no effect."""

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
        self._interval_s, self._timeout_s = config.heartbeat_interval_s, config.heartbeat_timeout_s
        self._error: MedialaneError | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.closed = asyncio.Event()

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes that the kernel has not accepted yet."""
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return len(self._buffer) + waiting

    @property
    def is_closing(self) -> bool:
        """Whether it is closed, or will be as soon as buffered data are written."""
        return self._error is not None

    @property
    def paused(self) -> bool:
        """Whether the peer reads too slowly: wait for `writable` before sending what can wait."""
        return not self._can_write.is_set()

    async def writable(self) -> None:
        """Wait until the peer has read enough, or the connection is closed."""
        await self._can_write.wait()

    def send(self, message: msgspec.Struct, *, at_once: bool = False) -> None:
        """Queue one message. Raises ProtocolViolation, with nothing queued, if it exceeds the frame size limit.

        `at_once` writes it now, with the messages queued before it: for requests, which rarely come in batches.
        """
        if self._error is not None or self.closed.is_set():
            return
        append_frame(self._buffer, message, self._config.max_frame_bytes)
        if at_once or len(self._buffer) > FLUSH_BYTES:
            self._write()
        elif self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def send_in_pieces(self, source: PieceSource) -> None:
        """Send the pieces of `source`, after earlier sources, as fast as the peer reads, one piece per iteration of the
        event loop. It is dropped when the connection is closed."""
        if self._error is None and not self.closed.is_set():
            self._sources.append(source)
            self._pump_soon()

    def accept_large_frames(self) -> None:
        """Raise the frame size limit to the configured one, once the peer is registered."""
        self._frames.max_frame_bytes = self._config.max_frame_bytes

    def start_heartbeat(self) -> None:
        """Send heartbeats until the connection is closed, and close it if none arrive from the peer."""
        if not self.closed.is_set():
            self._num_silent_beats = 0
            self._beating = self._loop.call_later(self._interval_s, self._beat)

    def end(self, error: MedialaneError) -> None:
        """Close the connection now and drop buffered data. `lost` is called with the first error given."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Write buffered data, then close. A peer that does not read keeps it open: after a timeout, call `end`."""
        self._write()
        self._error = self._error or WorkerLost("the connection was closed")
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # asyncio's type also covers datagrams
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            config = self._config
            self._interval_s, self._timeout_s = config.tcp_heartbeat_interval_s, config.tcp_heartbeat_timeout_s
        if self._error is not None:  # closed while connecting
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
        # The transport may keep a reference, so give it this buffer and start a new one.
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
        if not self.paused:  # else `resume_writing` continues
            self._pump_soon()

    def _beat(self) -> None:
        self._num_silent_beats += 1
        if self._num_silent_beats * self._interval_s > self._timeout_s:
            self.end(WorkerLost("missed heartbeats of the peer"))
            return
        self._beating = self._loop.call_later(self._interval_s, self._beat)
        self._peer.beat()
