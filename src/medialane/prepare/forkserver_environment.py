"""Environment and settings of a fork server, which must not start threads.

One that is exec'ed gets them as variables (`exec_environ`); libraries read most of these while they are loaded. One
that is forked from a process that has loaded them sets the same by call (`enter`), and the variables for libraries that
are loaded later."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from medialane.observability.logging import VARIABLE as LOG_PROCESS
from medialane.runtime.phase import VARIABLE as PHASE_FILE

_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
_TRIM_THRESHOLD_BYTES = 64 * 1024 * 1024

#: The malloc settings let a preparer reuse up to 64 MiB of a job's memory for the next one (glibc, mallopt(3)): page
#: faults on memory returned to the kernel took a seventh of the CPU time of a 1024x768 image.
_REQUIRED: Mapping[str, str] = {
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "OPENCV_FOR_THREADS_NUM": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD_BYTES),
}

#: Preparers allocate with transparent huge pages (glibc 2.35, madvise(2); no effect elsewhere): the store, which
#: copies tensors out of them page by page, spends 1.35 ms of CPU time per 1024x768 image instead of 1.6. It cannot be
#: set by call. Preparers of a forked fork server do without: their jobs reuse small pages that the build has left in
#: the heap, and the medians of the store were 1.10 to 1.28 ms with either kind of fork server.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_TUNABLES = "GLIBC_TUNABLES"

#: mallopt(3), with the parameters' numbers in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def exec_environ(given: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a fork server that is exec'ed, which is to have `given`."""
    tunables = [_HUGE_PAGES, *filter(None, [given.get(_TUNABLES)])]  # the last of two equal names wins
    return {**given, **_REQUIRED, _TUNABLES: ":".join(tunables)}


@contextmanager
def required() -> Iterator[None]:
    """Add the variables for libraries that are loaded meanwhile, in a process that fork servers are forked from."""
    before = dict(os.environ)
    os.environ.update(_REQUIRED)
    try:
        yield
    finally:
        _replace_environ(before)


def enter(given: Mapping[str, str]) -> None:
    """Make `given` and what is required the environment of this process, which was forked. Its libraries have read
    the number of OpenBLAS's threads: it must have been 1 when they were loaded, or there would be threads by now."""
    _replace_environ(exec_environ(given))
    for path in _openmp_libraries():
        ctypes.CDLL(path).omp_set_num_threads(1)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of variables that distinguish two environments of fork servers, except those that `enter` sets,
    and those that nothing is built from."""
    ignored = {*_REQUIRED, _TUNABLES, PHASE_FILE, LOG_PROCESS, "VLLM_CONFIGURE_LOGGING"}
    return sorted(name for name in {*one, *other} - ignored if one.get(name) != other.get(name))


def _replace_environ(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _openmp_libraries() -> set[str]:
    """Return the loaded ones: packages bring their own copies, each with its own number of threads."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")}
    return {path for path in paths if os.path.basename(path).startswith(("libgomp", "libomp", "libiomp"))}
