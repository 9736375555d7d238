"""Probes which sandbox mechanisms the kernel supports, each in a short-lived child, and applies them to preparers."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec

from medialane.prepare import confinement, landlock, seccomp
from medialane.prepare.process_memory import read_into

#: System libraries and machine information read by lazily loaded code, besides Python's own folders.
_SYSTEM_FILES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
    "/usr/share/zoneinfo", "/dev/null", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/proc/self",
    "/sys/devices/system",
)  # fmt: skip


#: What a compromised preparer could do if its memory cannot be read (see `Preparer`).
WRITE_ARENA = "change other requests' media in shared memory (process_vm_readv is refused: kernel.yama.ptrace_scope?)"


class Sandbox(msgspec.Struct, frozen=True):
    """Which restrictions this machine supports: `system_calls` by seccomp, `files` by Landlock."""

    system_calls: bool = False
    files: bool = False

    def enter(self, files: Sequence[str]) -> None:
        """Permanently confine this process, which may still read `files`, list their folders, and read what Python
        needs. Raises OSError."""
        confinement.drop_capabilities()
        if self.files:
            folders = {os.path.dirname(path) for path in files if os.path.isfile(path)}
            landlock.restrict([*_python_files(), *_SYSTEM_FILES, *files], listed=folders)
        if self.system_calls:
            seccomp.install()

    def missing(self) -> Iterator[str]:
        """Yield what a preparer compromised by a hostile file could do because of a missing mechanism."""
        if not self.system_calls:
            yield "use the network, start processes and signal others (seccomp is not available)"
        if not self.files:
            yield "read this user's files (Landlock is not available: Linux 5.13, and not refused by a container)"


def available() -> Sandbox:
    """Return the supported mechanisms. Forks: the calling process must have one thread."""
    return Sandbox(
        system_calls=_holds(seccomp.install, lambda: os.kill(os.getppid(), 0)),
        files=_holds(lambda: landlock.restrict([]), lambda: os.listdir("/")),
    )


def missing_here() -> Iterator[str]:
    """Yield all that is missing on this machine, including protection of the arena. Forks, as above."""
    yield from available().missing()
    if not memory_is_readable():
        yield WRITE_ARENA


def memory_is_readable() -> bool:
    """Return whether a process may read the memory of its child on this machine. Forks, as above."""
    data = ctypes.create_string_buffer(b"read me")
    woken, waker = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(waker)
            os.read(woken, 1)
        finally:
            os._exit(0)
    copy = bytearray(len(data))
    try:
        read_into(pid, ctypes.addressof(data), memoryview(copy))
    except OSError:
        return False
    finally:
        os.close(waker)
        os.close(woken)
        os.waitpid(pid, 0)
    return bytes(copy) == data.raw


def _holds(confine: Callable[[], None], forbidden: Callable[[], object]) -> bool:
    """Return whether the kernel denies `forbidden` to a child that has called `confine`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            confinement.drop_privileges()
            confine()
            status = 0 if _is_refused(forbidden) else 1
        except OSError:  # the kernel or the container runtime refuses the confinement itself
            status = 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except PermissionError:
        return True
    return False


def _python_files() -> list[str]:
    """Return the folders of lazily imported modules and their libraries."""
    paths = [path for path in sys.path if os.path.isabs(path)]
    return [*paths, os.path.join(sys.prefix, "lib"), os.path.join(sys.base_prefix, "lib")]
