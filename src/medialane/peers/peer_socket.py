"""A blocking TCP connection between two stores: frames, and payloads that are not copied in user space (but for TLS).

One thread reads and writes; the event loop ends what takes too long by `abort`, which wakes the thread. So no operation
here has a timeout of its own, and a thread that has returned from `receive_into` writes nothing later: what arrives
afterwards stays in the kernel, and is dropped when the socket is closed.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
from contextlib import suppress

import msgspec

from medialane.core.errors import ProtocolViolation, TransferFailed
from medialane.peers.peer_messages import MAX_MESSAGE_BYTES
from medialane.wire.blocking import authenticate_socket, encrypted
from medialane.wire.framing import HEADER, append_frame
from medialane.wire.security import Authentication

#: Closes without waiting, and drops what was not sent (socket(7), SO_LINGER).
_NO_LINGER = struct.pack("ii", 1, 0)

_TLS_PIECE_BYTES = 1 << 20
#: Requests are smaller, replies may be larger.
_SMALL_BYTES = 4096
_AT_ONCE_BYTES = 256 << 10


class PeerSocket:
    """Owns the socket. All methods but `abort` are called by one thread; they raise TransferFailed when the connection
    is lost or aborted."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._is_tls = False

    def authenticate(self, authentication: Authentication, *, dialled_host: str | None = None) -> None:
        """Authenticate the peer, over TLS if configured. Raises AuthenticationFailed. Ends with a deadline of its
        own."""
        try:
            self._sock = encrypted(self._sock, authentication, dialled_host=dialled_host)
        except OSError as error:
            raise _lost(error) from error
        self._is_tls = isinstance(self._sock, ssl.SSLSocket)
        authenticate_socket(self._sock, authentication, dialled_host=dialled_host)

    def send(self, *messages: msgspec.Struct) -> None:
        buffer = bytearray()
        for message in messages:
            append_frame(buffer, message, MAX_MESSAGE_BYTES)
        try:
            self._sock.sendall(buffer)
        except OSError as error:
            raise _lost(error) from error

    def receive(self, max_bytes: int) -> bytes:
        """Return the next frame. Raises ProtocolViolation if it is larger than `max_bytes`."""
        header = bytearray(HEADER.size)
        self.receive_into(memoryview(header))
        frame = bytearray(_length(header, max_bytes))
        self.receive_into(memoryview(frame))
        return bytes(frame)

    def receive_at_once(self, max_bytes: int) -> bytes | None:
        """Return the next frame if it has arrived and is small. Does not block; None also if it is encrypted. Raises as
        `receive`."""
        if self._is_tls:
            return None
        try:
            found = self._sock.recv(_SMALL_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if not found:
                raise TransferFailed("the connection to the other store was closed")
            if len(found) < HEADER.size:
                return None
            end = HEADER.size + _length(found[: HEADER.size], max_bytes)
            return self._sock.recv(end)[HEADER.size :] if end <= len(found) else None
        except BlockingIOError:
            return None
        except OSError as error:
            raise _lost(error) from error

    @property
    def has_decrypted(self) -> bool:
        """Whether a part of the next frame has been read from the connection: selectors do not see it."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def set_blocking(self) -> None:
        self._sock.settimeout(None)

    def receive_into(self, target: memoryview) -> None:
        """Fill `target`."""
        if len(target) <= 2 * _AT_ONCE_BYTES or self._is_tls:
            self._fill(target)
            return
        # Wake this thread for many packets at once: each wake-up costs both sides as much as copying one. The last
        # bytes suffice to wake it for those before them. Views are released: a traceback would keep the arena mapped.
        with target[:-_AT_ONCE_BYTES] as first, target[-_AT_ONCE_BYTES:] as last:
            self._set_low_watermark(_AT_ONCE_BYTES)
            self._fill(first)
            self._set_low_watermark(1)
            self._fill(last)

    def _set_low_watermark(self, num_bytes: int) -> None:
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        except OSError as error:
            raise _lost(error) from error

    def _fill(self, target: memoryview) -> None:
        done, flags = 0, 0 if self._is_tls else socket.MSG_WAITALL
        while done < len(target):
            try:
                received = self._sock.recv_into(target[done:], 0, flags)
            except OSError as error:
                raise _lost(error) from error
            if not received:
                raise TransferFailed("the connection to the other store was closed")
            done += received

    def send_file(self, file: int, offset: int, nbytes: int) -> None:
        """Send a part of an open file. The kernel may refer to its pages until the peer has received them."""
        end = offset + nbytes
        while offset < end:
            try:
                sent = self._send_piece(file, offset, end - offset)
            except OSError as error:
                raise _lost(error) from error
            if not sent:
                raise TransferFailed("the arena's file is too short")
            offset += sent

    @property
    def is_usable(self) -> bool:
        """Whether an idle connection is still open: nothing can be read from it."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except (OSError, ValueError):  # closed
            return False
        return not poll.poll(0)

    def abort(self) -> None:
        """End the connection and drop what was not sent; its thread is woken. May be called from any thread, any number
        of times."""
        with suppress(OSError):  # it is closed already
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # that of ssl is not for another thread

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def _send_piece(self, file: int, offset: int, nbytes: int) -> int:
        if not self._is_tls:
            return os.sendfile(self._sock.fileno(), file, offset, nbytes)
        piece = os.pread(file, min(nbytes, _TLS_PIECE_BYTES), offset)
        self._sock.sendall(piece)
        return len(piece)


def _length(header: bytes | bytearray, max_bytes: int) -> int:
    (length,) = HEADER.unpack(header)
    if length > max_bytes:
        raise ProtocolViolation(f"a frame of {length} bytes was announced, {max_bytes} are allowed")
    return int(length)


def _lost(error: OSError) -> TransferFailed:
    return TransferFailed(f"the connection to the other store was lost: {error.strerror}")
