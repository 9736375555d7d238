"""Which walls this kernel lets us build around preparers; each is tried once, in a child that ends right away."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec

from medialane.prepare import confinement, landlock, seccomp
from medialane.prepare.process_memory import read_into

#: Libraries and facts of the machine that code loaded late asks for, beside Python's own folders.
_SYSTEM_FILES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
    "/usr/share/zoneinfo", "/dev/null", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/proc/self",
    "/sys/devices/system",
)  # fmt: skip


#: What it could do where its memory cannot be read (see `Preparer`).
WRITE_ARENA = "change other requests' media in shared memory (process_vm_readv is refused: kernel.yama.ptrace_scope?)"


class Sandbox(msgspec.Struct, frozen=True):
    """What holds on this machine: `system_calls` by seccomp, `files` by Landlock."""

    system_calls: bool = False
    files: bool = False

    def enter(self, files: Sequence[str]) -> None:
        """Confine this process, which may read `files` besides what Python needs, for ever. Raises OSError."""
        confinement.drop_capabilities()
        if self.files:
            landlock.restrict([*_python_files(), *_SYSTEM_FILES, *files])
        if self.system_calls:
            seccomp.install()

    def missing(self) -> Iterator[str]:
        """What a preparer that a hostile file has taken over could do here, and would not elsewhere."""
        if not self.system_calls:
            yield "use the network, start processes and signal others (seccomp is not available)"
        if not self.files:
            yield "read this user's files (Landlock is not available: Linux 5.13, and not refused by a container)"


def available() -> Sandbox:
    """What can be had here. Forks: the calling process must have one thread."""
    return Sandbox(
        system_calls=_holds(seccomp.install, lambda: os.kill(os.getppid(), 0)),
        files=_holds(lambda: landlock.restrict([]), lambda: os.listdir("/")),
    )


def missing_here() -> Iterator[str]:
    """All that is missing on this machine, `Sandbox.missing` and the arena. Forks, as above."""
    yield from available().missing()
    if not memory_is_readable():
        yield WRITE_ARENA


def memory_is_readable() -> bool:
    """Whether a process may read the memory of its child here. Forks, as above."""
    data = ctypes.create_string_buffer(b"read me")
    woken, waker = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(waker)
            os.read(woken, 1)
        finally:
            os._exit(0)
    found = bytearray(len(data))
    try:
        read_into(pid, ctypes.addressof(data), memoryview(found))
    except OSError:
        return False
    finally:
        os.close(waker)
        os.close(woken)
        os.waitpid(pid, 0)
    return bytes(found) == data.raw


def _holds(confine: Callable[[], None], forbidden: Callable[[], object]) -> bool:
    """Whether a child that has confined itself is refused what is forbidden then."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            confinement.drop_privileges()
            confine()
            status = 0 if _is_refused(forbidden) else 1
        except OSError:  # the kernel, or a container around us, refuses the confinement itself
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
    """Where modules and their libraries are found that are imported late."""
    found = [path for path in sys.path if os.path.isabs(path)]
    return [*found, os.path.join(sys.prefix, "lib"), os.path.join(sys.base_prefix, "lib")]
