"""A channel between a process and its child: an unnamed Unix socket pair (SOCK_SEQPACKET), one packet is one msgpack
message, with which file descriptors may be passed. The child ends when the channel is closed."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from medialane.runtime.stop import PidfdProcess

_ENCODER = msgspec.msgpack.Encoder()

#: Size of a descriptor in a message (SCM_RIGHTS, unix(7)).
_INT_BYTES = struct.calcsize("i")

R = TypeVar("R")


def child_channel() -> tuple[socket.socket, socket.socket]:
    """Return our end, which is non-blocking, and the child's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def send(sock: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = (), *, max_bytes: int) -> None:
    """Raises OSError if the other end is closed, or a non-blocking socket is full; ValueError for a message of more
    than `max_bytes`, which must be below the kernel's send buffer (212 992): a packet is always sent whole."""
    packet = _ENCODER.encode(message)
    if len(packet) > max_bytes:
        raise ValueError(f"{type(message).__name__} of {len(packet)} bytes exceeds the limit of {max_bytes}")
    socket.send_fds(sock, [packet], descriptors)


def receive(
    sock: socket.socket, decode: Callable[[bytes], R], *, max_bytes: int, max_descriptors: int = 1
) -> tuple[R | None, list[int]]:
    """Return the next message and the descriptors passed with it (close-on-exec); None if the other end is closed.
    Raises ValueError for a malformed or truncated message, OSError."""
    try:
        # Not socket.recv_fds: Python 3.11's ignores the flags.
        room = socket.CMSG_LEN(max_descriptors * _INT_BYTES)
        packet, rights, flags, _ = sock.recvmsg(max_bytes, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None, []  # the other end was closed before it had read everything
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ValueError("a truncated packet")
    descriptors = [descriptor for _, _, data in rights for (descriptor,) in struct.iter_unpack("i", data)]
    return (decode(packet) if packet else None), descriptors


class ChannelToChild(Generic[R]):
    """Our end, in the event loop.

    `handle` is called with each message and its descriptors; it raises LookupError or InvalidStateError for one that is
    out of order. `lose` is called when the channel cannot be used any more, with the reason, which is empty if the
    child has closed it; it calls `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        decode: Callable[[bytes], R],
        handle: Callable[[R, list[int]], None],
        lose: Callable[[str], None],
        *,
        max_bytes: int,
    ) -> None:
        self._sock = sock
        self._decode, self._handle, self._lose = decode, handle, lose
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self.poll)

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> bool:
        """Return False if the channel is closed, or the child does not read: then it is lost. Raises ValueError."""
        if not self.is_open:
            return False
        try:
            send(self._sock, message, descriptors, max_bytes=self._max_bytes)
        except OSError as error:
            self._lose(f"it accepts no requests: {error.strerror}")
            return False
        return True

    def poll(self) -> None:
        """Handle all messages that have arrived (also called by the event loop)."""
        while self.is_open:
            try:
                message, descriptors = receive(self._sock, self._decode, max_bytes=self._max_bytes)
                if message is None:
                    self._lose("")
                else:
                    self._handle(message, descriptors)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"its channel failed: {error.strerror}")
            except (ValueError, LookupError, asyncio.InvalidStateError) as error:  # DecodeError is a ValueError
                self._lose(f"protocol violation: {error!r}")

    def close(self) -> None:
        """Idempotent."""
        if self.is_open:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()


def spawn(module: str, *arguments: str, environ: Mapping[str, str]) -> tuple[PidfdProcess, socket.socket]:
    """Execute a module of ours with these arguments, the descriptor of its end of a channel and our process id; return
    the process and our end. Raises OSError."""
    ours, theirs = child_channel()
    try:
        with theirs:
            child = subprocess.Popen(  # noqa: S603 - our own command line, no shell
                [sys.executable, "-P", "-m", module, *arguments, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environ),
                # Ctrl-C in the terminal must reach only this process, which then terminates the child.
                start_new_session=True,
            )
    except BaseException:  # failed: the socket has no other owner
        ours.close()
        raise
    return PidfdProcess(child.pid, os.pidfd_open(child.pid), on_exit=child.wait), ours
