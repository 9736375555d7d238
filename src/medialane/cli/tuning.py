"""Settings of CPython and glibc for a process whose event loop handles payloads of megabytes."""

from __future__ import annotations

import ctypes
import platform
import sys

#: Longest time that a thread running Python code may keep the event loop waiting for the GIL; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0005

#: mallopt(3), with the parameters' numbers in malloc.h. Freed media of up to 32 MiB stay in one heap, and memory
#: returns to the kernel when 512 MiB at its end are free. By default an item of 7.5 MB takes new pages, and freeing it
#: takes 3 ms of the event loop.
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
_MALLOC = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 512 << 20))


def tune_process() -> None:
    """Shorten how long the event loop waits for other threads and for memory."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if platform.libc_ver()[0] == "glibc":
        for parameter, value in _MALLOC:
            ctypes.CDLL(None).mallopt(parameter, value)
