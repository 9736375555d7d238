"""Reading another process's memory into our own (process_vm_readv(2)).

It is how tensors leave a preparer, which therefore needs no place in the arena that it may write to. One copy, made by
the kernel, of pages that stay where they are. The other process must be ours (same user) and let itself be read: Yama's
`ptrace_scope` 1 asks for a descendant, or for `allow_reader`.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_PTRACER = 0x5961_6D61

_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def read_into(pid: int, address: int, into: memoryview) -> None:
    """Fill `into`, which is writable, from `address` on. Does not hold the interpreter's lock.

    Raises OSError if the process is gone, has nothing there, or may not be read.
    """
    if not into.nbytes:
        return
    target = ctypes.addressof(ctypes.c_char.from_buffer(into))
    done = 0
    while done < into.nbytes:  # the kernel reads 2 GiB at most at a time
        left = into.nbytes - done
        ours, theirs = _Iovec(target + done, left), _Iovec(address + done, left)
        found = _libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if found <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
        done += found


def address_of(data: memoryview) -> int:
    """Where the bytes of a buffer lie, for `read_into` of another process. 0 for an empty one."""
    import numpy as np  # not in processes that only read

    return int(np.frombuffer(data.cast("B"), np.uint8).ctypes.data) if data.nbytes else 0


def allow_reader(pid: int) -> None:
    """Let the process `pid` read this one where Yama is on. Without Yama there is nothing to allow."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
