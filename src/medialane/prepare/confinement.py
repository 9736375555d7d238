"""What a preparer may not do, and how it dies: limits and facts of the calling process (Linux; more in `sandbox`).

A decoder that a hostile file takes over finds no socket but its job channel, little memory to take, no core dump to
write, and is the first that the kernel's memory killer picks.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import struct
from collections.abc import Collection
from pathlib import Path

from medialane.core.errors import StartupFailed
from medialane.core.parent_death import signal_on_parent_death

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x2008_0522
_OOM_SCORE_ADJ = 800

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.prctl.restype = ctypes.c_int


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that made it ends; end now if the parent is gone already."""
    if not signal_on_parent_death(signal.SIGKILL, parent_pid=parent_pid):
        raise SystemExit(0)


def require_one_thread() -> None:
    """Raise StartupFailed unless this process has exactly one thread.

    A child of fork has the calling thread alone: locks that others held stay locked in it for ever.
    """
    num_threads = _status("Threads")
    if num_threads != 1:
        raise StartupFailed(
            f"the process that preparers fork from has {num_threads} threads and must have one: "
            "a library started a thread pool while the model's processor was built or warmed"
        )


def limit_memory(more_bytes: int) -> None:
    """Let the address space of this process grow by `more_bytes` at most; 0 leaves it unlimited."""
    if more_bytes:
        limit = _status("VmSize") * 1024 + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def drop_privileges() -> None:
    """No new privileges, no core dump; be the first to die when the machine is out of memory."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ))
    except PermissionError:
        # Some sandboxes forbid even making it worse; it is a hint for the kernel, nothing relies on it.
        return


def drop_capabilities() -> None:
    """Give up what root may do beyond other users (capset(2)); nothing for those who are not root."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, bytes(24)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")


def restore_fault_handlers() -> None:
    """Let a fault end this process at once.

    Libraries that come with vLLM (LLVM) have the fault signals print a stack first; in a forked child that waits for
    locks that nobody holds any more, and the crash would look like a decoder that takes too long.
    """
    for number in _FAULTS:
        signal.signal(number, signal.SIG_DFL)


def drop_sockets(keep: Collection[int]) -> None:
    """Point every socket of this process at /dev/null, but those in `keep`.

    Not closed: their Python objects still own the numbers, and would close what comes to bear them next.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _descriptors():
        if fd not in keep and fd != null and _is_socket(fd):
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False  # the descriptor that listed the folder is gone by now


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0])
    raise StartupFailed(f"/proc/self/status has no {field}: is /proc mounted?")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")
