"""The C library, for system calls that Python does not wrap."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.prctl.restype = ctypes.c_int
libc.syscall.restype = ctypes.c_long
libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]

#: Larger than struct statfs on any architecture.
_STATFS_BYTES = 256


def last_error(call: str) -> OSError:
    """Return the error of the last call, which has failed."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def file_system_type(path: str) -> int:
    """Return the magic number of the file system (statfs(2)) that has this file or folder. Raises OSError."""
    buffer = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if libc.statfs(os.fsencode(path), buffer):
        raise last_error("statfs")
    return buffer[0]  # f_type is the first member
