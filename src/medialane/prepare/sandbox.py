"""The sandbox of a preparer: privileges, limits, sockets, files (Landlock), system calls (`seccomp`), and its memory.

A decoder compromised by a hostile file has no socket but its job channel, limited memory, no core dump, no access to
files except for reading some, only the system calls that computing needs, and is the preferred victim of the kernel's
OOM killer. What the kernel supports is probed, each mechanism in a short-lived child. The store fetches tensors from a
preparer's memory (process_vm_readv(2), one copy by the kernel), so no preparer needs write access to the arena.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from medialane.prepare import seccomp
from medialane.runtime.linux import last_error, libc
from medialane.types.errors import StartupFailed

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x2008_0522
_OOM_SCORE_ADJ = 800

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

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

    def enter(self, files: Sequence[str], *, jobs: int, memory_limit_bytes: int) -> None:
        """Permanently confine this process, which may still use the socket `jobs`, read `files`, list their folders,
        read what Python needs, and grow by `memory_limit_bytes`. Raises OSError."""
        drop_sockets(keep=jobs)
        drop_privileges()
        restore_fault_handlers()
        limit_memory(memory_limit_bytes)
        drop_capabilities()
        if self.files:
            folders = {os.path.dirname(path) for path in files if os.path.isfile(path)}
            restrict([*_python_files(), *_SYSTEM_FILES, *files], listed=folders)
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
        files=_holds(lambda: restrict([]), lambda: os.listdir("/")),
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
            drop_privileges()
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


# Privileges, limits and sockets


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


def drop_sockets(keep: int) -> None:
    """Redirect every socket of this process to /dev/null, except `keep`.

    They are not closed: their Python objects would later close whatever reuses the descriptor.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in (keep, null) and _is_socket(fd):
            os.dup2(null, fd, inheritable=False)
    os.close(null)


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


# Landlock (Linux 5.13). The rules apply to files opened afterwards by this process and the threads that it starts, and
# cannot be removed. They also deny TCP (from ABI 4), and signals and abstract sockets to processes outside the domain
# (from ABI 6). The numbers of the calls are the same on all architectures.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: Number of file rights by ABI version: all are denied, and only reading is allowed again.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_RIGHTS = 16  # from ABI 5
_BIND_TCP, _CONNECT_TCP = 1, 2
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2


def restrict(readable: Iterable[str], listed: Iterable[str] = ()) -> None:
    """Restrict this process to opening these files, and files beneath these folders, for reading; those beneath the
    folders `listed` it sees, but cannot open.

    Missing paths are ignored. `no_new_privs` must be set. Raises OSError if the kernel has no Landlock.
    """
    ruleset = _create_ruleset()
    try:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        for path in listed:
            _allow(ruleset, path, _READ_DIR)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _create_ruleset() -> int:
    abi = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_GET_VERSION))
    words = [(1 << _RIGHTS.get(abi, _ALL_RIGHTS)) - 1]
    if abi >= 4:
        words.append(_BIND_TCP | _CONNECT_TCP)
    if abi >= 6:
        words.append(_ABSTRACT_SOCKETS | _SIGNALS)
    attributes = struct.pack(f"={len(words)}Q", *words)
    return _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # missing or inaccessible
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _READ_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise last_error("Landlock")
    return int(result)


# Another process's memory. That process must belong to the same user and permit it: Yama's `ptrace_scope` 1 requires a
# descendant or `allow_reader`.

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
