"""The filter of system calls for both architectures; what it does on this one is in `test_prepare_sandbox`."""

import errno
import re
import struct
from pathlib import Path

import pytest

from medialane.prepare import seccomp

#: The kernel's headers, and the number by which the kernel says for which architecture a call is: <linux/audit.h>.
MACHINES = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), 0xC000_003E),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), 0xC000_00B7),
}
#: aarch64 has others in their place, or they are its own.
X86_ONLY = {
    "access",
    "arch_prctl",
    "dup2",
    "epoll_wait",
    "getpgrp",
    "lstat",
    "poll",
    "readlink",
    "select",
    "stat",
    "time",
}
PID = 4711
REFUSED = 0x0005_0000
KILLED = 0x8000_0000


def numbers_of(machine):
    """The kernel's system calls by name."""
    path = MACHINES[machine][0]
    if not path.exists():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)\n", path.read_text())
    # The generic header has one name for both word sizes.
    return {{"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in found}


def decision(machine, number, argument, arch=None):
    """What the filter returns for a call all of whose arguments are `argument`: the kernel's interpreter."""
    data = struct.pack("<iIQ6Q", number, arch or MACHINES[machine][1], 0, *[argument] * 6)
    program = list(struct.iter_unpack("<HBBI", seccomp.assemble(machine, PID)))
    at = value = 0
    while True:
        code, if_true, if_false, operand = program[at]
        match code:
            case 0x20:  # load a word
                (value,) = struct.unpack_from("<I", data, operand)
                at += 1
                continue
            case 0x06:  # return
                return operand
            case 0x15:
                holds = value == operand
            case 0x35:
                holds = value >= operand
            case 0x45:
                holds = value & operand
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")
        at += 1 + (if_true if holds else if_false)


def decisions(machine):
    """Of each call that is not simply refused, for arguments that are allowed somewhere or nowhere."""
    arguments = (0, PID, 1 << 16, 15, 1)
    found = {name: [decision(machine, n, one) for one in arguments] for name, n in numbers_of(machine).items()}
    refused = ([REFUSED | errno.EPERM] * len(arguments), [REFUSED | errno.ENOSYS] * len(arguments))
    return {name: results for name, results in found.items() if results not in refused or name == "clone3"}


def test_both_architectures_allow_the_same_calls():
    """The numbers of calls differ: a wrong one would be that of another call."""
    one, other = decisions("x86_64"), decisions("aarch64")
    assert one.keys() - other.keys() == X86_ONLY
    assert other == {name: results for name, results in one.items() if name not in X86_ONLY}


@pytest.mark.parametrize("machine", MACHINES)
def test_call_by_another_architectures_numbers_ends_the_process(machine):
    assert decision(machine, 0, 0, arch=0x4000_0003) == KILLED


@pytest.mark.parametrize("machine", MACHINES)
def test_new_calls_are_unknown_rather_than_refused(machine):
    """The C library falls back to others then."""
    for number in (453, 1 << 30, -1):
        assert decision(machine, number, 0) == REFUSED | errno.ENOSYS
