"""Reads another process's memory (process_vm_readv(2)).

The store fetches tensors from preparers this way, so preparers need no write access to the arena. The kernel makes a
single copy. The other process must belong to the same user and permit it: Yama's `ptrace_scope` 1 requires a descendant
or `allow_reader`.
"""

from __future__ import annotations

import ctypes

from medialane.runtime.linux import last_error, libc

_PR_SET_PTRACER = 0x5961_6D61


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


libc.process_vm_readv.restype = ctypes.c_ssize_t
libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def read_into(pid: int, address: int, into: memoryview) -> None:
    """Fill the writable buffer `into` from `address` of process `pid`. Releases the GIL.

    Raises OSError if the process has exited, has nothing mapped there, or may not be read.
    """
    if not into.nbytes:
        return
    target = ctypes.addressof(ctypes.c_char.from_buffer(into))
    done = 0
    while done < into.nbytes:  # the kernel copies at most 2 GiB per call
        left = into.nbytes - done
        ours, theirs = _Iovec(target + done, left), _Iovec(address + done, left)
        num_read = libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if num_read <= 0:
            raise last_error("process_vm_readv")
        done += num_read


def address_of(data: memoryview) -> int:
    """Return the address of a buffer's bytes, for `read_into` in another process; 0 if it is empty."""
    import numpy as np  # imported lazily: processes that only read do not need it

    return int(np.frombuffer(data.cast("B"), np.uint8).ctypes.data) if data.nbytes else 0


def allow_reader(pid: int) -> None:
    """Let the process `pid` read this one under Yama; no effect without Yama."""
    libc.prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
