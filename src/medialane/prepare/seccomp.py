"""The system-call allowlist of a preparer (seccomp(2)); all other calls fail with EPERM.

Theory of operation. A preparer computes: it needs memory, threads, time, readable files and its open descriptors.
An allowlist excludes the network, new processes, signals to other processes, their memory, io_uring, mounts, and calls
of future kernels, without naming them. The filter inspects arguments that are passed in registers; paths are behind
pointers, which it cannot dereference (`sandbox` restricts those, by Landlock).

The kernel runs the filter, a classic BPF program, at each call; it cannot be removed and needs no privilege.
libseccomp, which could assemble it, is a system library that minimal images lack; the program is a hundred comparisons.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from typing import NamedTuple

from medialane.runtime.linux import last_error, libc

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RET_ALLOW = 0x7FFF_0000
_RET_ERRNO = 0x0005_0000
_RET_KILL_PROCESS = 0x8000_0000

# Offsets in struct seccomp_data. Both architectures are little-endian: the low word of an argument comes first.
_NR, _ARCH, _ARGS = 0, 4, 16

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

#: Calls from here on were not reviewed and fail with ENOSYS: the C library tries such calls and falls back.
_FIRST_UNKNOWN = 453

#: Allowed with any arguments. Numbers on x86_64 and aarch64, -1 if there is none: <asm/unistd.h>.
_ALLOWED: dict[str, tuple[int, int]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "preadv": (295, 69), "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23),
    "dup2": (33, -1), "dup3": (292, 24), "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, -1),
    "lstat": (6, -1), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, -1),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, -1), "readlinkat": (267, 78),
    "getdents64": (217, 61), "getcwd": (79, 17),
    "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "pipe2": (293, 59),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1),
    "epoll_pwait": (281, 22),
    # For the job channel, which is connected: these reach no other peer.
    "recvfrom": (45, 207), "sendto": (44, 206),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "msync": (26, 227), "mincore": (27, 232), "membarrier": (324, 283),
    "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99),
    "rseq": (334, 293), "set_tid_address": (218, 96), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "getcpu": (309, 168),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, -1), "times": (100, 153), "getrusage": (98, 165),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, -1), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179),
    "getrlimit": (97, 163), "getrandom": (318, 278),
    # oneDNN requests AMX with it.
    "arch_prctl": (158, -1),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip

#: Allowed depending on their arguments: see `_rules`.
_CONDITIONAL: dict[str, tuple[int, int]] = {
    "openat": (257, 56), "fcntl": (72, 25), "kill": (62, 129), "tgkill": (234, 131), "clone": (56, 220),
    "clone3": (435, 435), "sched_setaffinity": (203, 122), "prctl": (157, 167), "prlimit64": (302, 261),
    "ioctl": (16, 29),
}  # fmt: skip

_COLUMNS = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}

_WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x0001_0000
#: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; not F_SETOWN, by which the kernel signals others.
_FCNTL = (0, 1, 2, 3, 4, 1030)
#: PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: names of threads and mappings.
_PRCTL = (15, 16, 0x5356_4D41)


class _Insn(NamedTuple):
    """struct sock_filter."""

    code: int
    if_true: int
    if_false: int
    value: int


def is_known() -> bool:
    """Return whether this machine's architecture is in the table."""
    return platform.machine() in _COLUMNS


def install() -> None:
    """Permanently confine this process and the threads that it starts.

    It must have one thread and `no_new_privs` set. Raises OSError if the kernel has no seccomp, or the architecture is
    not in the table.
    """
    if not is_known():
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    program = assemble(platform.machine(), os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0):
        raise last_error("seccomp")


def assemble(machine: str, pid: int) -> bytes:
    """Return the filter of the process `pid` for an architecture of the table, an array of struct sock_filter."""
    column, arch = _COLUMNS[machine]
    program = [
        _Insn(_LOAD, 0, 0, _ARCH),
        _Insn(_JUMP_EQUAL, 1, 0, arch),
        _Insn(_RETURN, 0, 0, _RET_KILL_PROCESS),
        _Insn(_LOAD, 0, 0, _NR),
        # Calls of the x32 ABI have numbers from 2 ** 30.
        _Insn(_JUMP_AT_LEAST, 0, 1, _FIRST_UNKNOWN),
        _fail(errno.ENOSYS),
    ]
    for numbers in _ALLOWED.values():
        program += _if_call(numbers[column], [_Insn(_RETURN, 0, 0, _RET_ALLOW)])
    for name, rule in _rules(pid).items():
        program += _if_call(_CONDITIONAL[name][column], rule)
    return b"".join(struct.pack("<HBBI", *insn) for insn in [*program, _fail(errno.EPERM)])


def _rules(pid: int) -> dict[str, list[_Insn]]:
    """Return the checks of calls by argument. Each ends with a return instruction."""
    return {
        "openat": [_argument(2), _Insn(_JUMP_ANY_BIT, 0, 1, _WRITING), _fail(errno.EACCES), _allow()],
        "fcntl": _one_of(1, _FCNTL),
        "kill": _one_of(0, [pid]),
        "tgkill": _one_of(0, [pid]),
        "clone": [_argument(0), _Insn(_JUMP_ANY_BIT, 0, 1, _CLONE_THREAD), _allow(), _fail(errno.EPERM)],
        "clone3": [_fail(errno.ENOSYS)],  # its flags are behind a pointer; the C library falls back to clone
        "sched_setaffinity": _one_of(0, [0, pid]),
        "prctl": _one_of(0, _PRCTL),
        "prlimit64": [  # without new limits
            _argument(2),
            _Insn(_JUMP_EQUAL, 0, 3, 0),
            _Insn(_LOAD, 0, 0, _ARGS + 8 * 2 + 4),
            _Insn(_JUMP_EQUAL, 0, 1, 0),
            _allow(),
            _fail(errno.EPERM),
        ],
        "ioctl": [_fail(errno.ENOTTY)],
    }


def _one_of(index: int, values: Iterable[int]) -> list[_Insn]:
    """Allow the call if the low word of an int argument is one of these."""
    tests = [insn for value in values for insn in (_Insn(_JUMP_EQUAL, 0, 1, value), _allow())]
    return [_argument(index), *tests, _fail(errno.EPERM)]


def _if_call(number: int, then: list[_Insn]) -> list[_Insn]:
    return [] if number < 0 else [_Insn(_JUMP_EQUAL, 0, len(then), number), *then]


def _argument(index: int) -> _Insn:
    return _Insn(_LOAD, 0, 0, _ARGS + 8 * index)


def _allow() -> _Insn:
    return _Insn(_RETURN, 0, 0, _RET_ALLOW)


def _fail(number: int) -> _Insn:
    return _Insn(_RETURN, 0, 0, _RET_ERRNO | number)
