"""What a process must be that preparers fork from: one thread, a new process's signals and descriptors, an end with its
parent; and the environment that libraries start no threads in.

A fork server that is exec'ed gets the environment as variables (`exec_environ`); libraries read most of these while
they are loaded. One that is forked from a process that has loaded them sets the same by call (`enter`), and the
variables for libraries that are loaded later. What exec gives to the former, `detach` gives to the latter.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from medialane.observability.logging import VARIABLE as LOG_PROCESS
from medialane.runtime.linux import signal_on_parent_death
from medialane.runtime.phase import VARIABLE as PHASE_FILE
from medialane.types.errors import StartupFailed

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
    """Return the names of variables that distinguish two environments of fork servers, except variables that `enter`
    sets, and variables that nothing is built from."""
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


_STDERR = 2
#: By a new Python process.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)

#: Threads of libraries that hold no lock which a child takes. NVML's, `cuda` and a number, which the first nvmlInit
#: starts with driver 580: vLLM finds its platform by NVML, and forks its engines after that. jemalloc's, of pyarrow,
#: which pandas imports: jemalloc has handlers for forks.
_HARMLESS = re.compile(r"cuda\d+|jemalloc_bg_thd")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent thread exits; exit now if the parent has already exited."""
    if not signal_on_parent_death(signal.SIGKILL, parent_pid=parent_pid):
        raise SystemExit(0)


def require_one_thread() -> None:
    """Raise StartupFailed unless this process has exactly one thread, besides threads that do not matter to a fork.

    A forked child has only the calling thread: locks held by other threads stay locked in it forever.
    """
    if names := [name for name in _other_threads() if not _HARMLESS.fullmatch(name)]:
        raise StartupFailed(
            f"the process that others fork from has {1 + len(names)} threads ({', '.join(names)}) and must have one: a "
            "library started a thread pool when it was imported, or the model's processor was built"
        )


def _other_threads() -> list[str]:
    """Return the names of this process's threads, without the calling one."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            with suppress(FileNotFoundError):  # it has ended meanwhile
                found.append((task / "comm").read_text().strip())
    return found


def detach(keep: int) -> None:
    """Give this process, a fork of another kind of process, what a new one would have: a session of its own, no stdin,
    Python's signal handlers, and no descriptors but stdout, stderr and `keep`."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > _STDERR and fd != keep:
            with suppress(OSError):  # the listing's own, closed by now
                os.close(fd)
    signal.set_wakeup_fd(-1)
    default_signals()


def default_signals() -> None:
    """Handle signals as a new Python does, whatever this process has inherited: in a shell's background job SIGINT and
    SIGQUIT are ignored, which exec keeps."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in _IGNORED else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
