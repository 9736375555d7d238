"""The C library, for system calls that Python does not wrap."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.prctl.restype = ctypes.c_int
libc.syscall.restype = ctypes.c_long


def last_error(call: str) -> OSError:
    """Return the error of the last call, which has failed."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
