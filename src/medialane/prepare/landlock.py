"""Limits a preparer's file access to reading some files (Landlock, Linux 5.13); no writing, creating or removing.

The rules apply to files opened afterwards by this process and the threads that it starts, and cannot be removed. They
also deny TCP (from ABI 4), and signals and abstract sockets to processes outside the domain (from ABI 6).
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from medialane.runtime.linux import last_error, libc

# The same numbers on all architectures.
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
