"""Process limits of a preparer: privileges, rlimits, signals, sockets (Linux; see also `sandbox`).

A decoder compromised by a hostile file has no socket but its job channel, limited memory, no core dump, and is the
preferred victim of the kernel's OOM killer.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import stat
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from medialane.runtime.linux import last_error, libc, signal_on_parent_death
from medialane.types.errors import StartupFailed

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x2008_0522
_OOM_SCORE_ADJ = 800

_STDERR = 2
#: By a new Python process.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)

#: Threads of libraries that hold no lock which a child takes. NVML's, `cuda` and a number, which the first nvmlInit
#: starts with driver 580: vLLM finds its platform by NVML, and forks its engines after that. jemalloc's, of pyarrow,
#: which pandas imports: jemalloc has handlers for forks.
_HARMLESS = re.compile(r"cuda\d+|jemalloc_bg_thd")

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent thread exits; exit now if the parent has already exited."""
    if not signal_on_parent_death(signal.SIGKILL, parent_pid=parent_pid):
        raise SystemExit(0)


def require_one_thread() -> None:
    """Raise StartupFailed unless this process has exactly one thread, besides those that do not matter to a fork.

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


def limit_memory(more_bytes: int) -> None:
    """Limit the growth of this process's address space to `more_bytes`; 0 means unlimited."""
    if more_bytes:
        limit = _status("VmSize") * 1024 + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def drop_privileges() -> None:
    """Set no_new_privs, disable core dumps, and become the first victim of the OOM killer."""
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise last_error("prctl(PR_SET_NO_NEW_PRIVS)")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ))
    except PermissionError:
        # Some sandboxes forbid even raising it; it is a hint for the kernel that nothing relies on.
        return


def drop_capabilities() -> None:
    """Drop all capabilities (capset(2)); no effect for users other than root."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise last_error("capset")


def restore_fault_handlers() -> None:
    """Let a fault terminate this process at once.

    Libraries loaded by vLLM (LLVM) handle fault signals by printing a stack trace first; in a forked child this
    deadlocks on locks of threads that were not forked, and the crash would be reported as a timeout.
    """
    for number in _FAULTS:
        signal.signal(number, signal.SIG_DFL)


def drop_sockets(keep: Collection[int]) -> None:
    """Redirect every socket of this process to /dev/null, except those in `keep`.

    They are not closed: their Python objects would later close whatever reuses the descriptor.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _descriptors():
        if fd not in keep and fd != null and _is_socket(fd):
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def detach(keep: int) -> None:
    """Give this process, a fork of another kind of process, what a new one would have: a session of its own, no stdin,
    Python's signal handlers, and no descriptors but stdout, stderr and `keep`."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    for fd in _descriptors():
        if fd > _STDERR and fd != keep:
            with suppress(OSError):  # that of the listing itself, closed by now
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


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False  # the descriptor of the listing itself, closed by now


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0])
    raise StartupFailed(f"/proc/self/status has no {field}: is /proc mounted?")
