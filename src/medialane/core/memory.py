"""Private memory with huge pages, for payloads of megabytes, and copies that release the GIL.

First use of a page takes 1 to 10 us in a virtual machine: 2500 of them for 10 MB in pages of 4 KiB, 5 in pages of
2 MiB. Unmapping 10 MB takes 1 ms, with huge pages 0.04 ms; Python does that with the GIL, and often on the event loop.
`mmap.mmap`'s default, a shared mapping, gets no huge pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np

HUGE_PAGE_BYTES = 2 << 20


def huge_page_memory(size: int, *, small_bytes: int = 0) -> mmap.mmap:
    """Return `size` bytes of zeroed private memory, in huge pages after the first `small_bytes`, a multiple of a huge
    page. Raises OSError if out of memory."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size - small_bytes >= HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE, small_bytes, size - small_bytes)
    return memory


def copy_into(buffer: bytearray | mmap.mmap, parts: Iterable[bytes | memoryview], *, at: int = 0) -> None:
    """Copy the parts to `buffer` from offset `at` on, one after the other. NumPy releases the GIL meanwhile."""
    into = np.frombuffer(buffer, np.uint8)
    for part in parts:
        into[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
