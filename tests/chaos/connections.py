"""Connections of other processes, which are cut in the kernel: no process has to cooperate, and no proxy is between."""

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
#: pidfd_getfd(2), Linux 5.6; the same number on all architectures.
_PIDFD_GETFD = 438
_UCRED = struct.Struct("3i")


def cut(server: int, clients: Collection[int]) -> int:
    """Shut down the connections that the process `server` has accepted from the processes `clients` on unix sockets.
    Returns their number; 0 if it has exited."""
    number = 0
    for sock in _unix_sockets(server):
        with closing(sock), suppress(OSError):  # not connected, or closed meanwhile
            client = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
            if client in clients and sock.getsockname():  # an accepted socket has the listener's address
                sock.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


def _unix_sockets(pid: int) -> Iterator[socket.socket]:
    """Duplicates of the process's sockets. It may exit meanwhile."""
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed since the listing
                    if os.readlink(path).startswith("socket:") and (found := _duplicate(pidfd, int(path.name))) >= 0:
                        sock = socket.socket(fileno=found)
                        if sock.family == socket.AF_UNIX:
                            yield sock
                        else:
                            sock.close()
        finally:
            os.close(pidfd)


def _duplicate(pidfd: int, descriptor: int) -> int:
    return int(_LIBC.syscall(_PIDFD_GETFD, pidfd, descriptor, 0))
