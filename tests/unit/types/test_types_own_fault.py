"""Whose fault a failed decode is: damaged files raise anything, but some exceptions say that it is the process's."""

import ctypes
import errno
import importlib
import sys
from concurrent.futures import BrokenExecutor

import pytest

from medialane.types.errors import Unavailable, own_fault, raise_exhausted, raised_in


class EngineHasDied(Exception):
    pass


def caught(raising):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any
        raising()
    return raised.value


def wrapped(error):
    def fail():
        try:
            raise error
        except Exception as cause:
            raise ValueError("Failed to apply the processor") from cause

    return caught(fail)


OURS = [
    MemoryError(),
    ImportError("libfoo.so"),
    ModuleNotFoundError("no module named av"),
    NameError("name 'x' is not defined"),
    BrokenExecutor(),
    EngineHasDied(),
    OSError(errno.EMFILE, "too many open files"),
    OSError(errno.ENOSPC, "no space left"),
    RuntimeError("can't start new thread"),
]

THEIRS = [
    OSError("image file is truncated"),
    OSError(errno.EIO, "read error"),
    ValueError("bad header"),
    RuntimeError("Error opening <BytesIO>: Format not recognised."),
    AttributeError("'NoneType' object has no attribute 'size'"),
    UnboundLocalError("a parser skipped a part"),
    SyntaxError("broken PNG file"),
    EOFError(),
]


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_exhausted_or_incomplete_process_is_at_fault(error):
    assert own_fault(error, EngineHasDied) is error


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_cause_of_a_wrapped_exception_counts(error):
    assert own_fault(wrapped(error), EngineHasDied) is error


@pytest.mark.parametrize("error", THEIRS, ids=repr)
def test_damaged_file_is_at_fault(error):
    assert own_fault(error, EngineHasDied) is None
    assert own_fault(wrapped(error), EngineHasDied) is None


def test_missing_shared_library_is_our_fault():
    assert own_fault(caught(lambda: ctypes.CDLL("libnot-there.so"))) is not None


def test_library_that_fails_to_import_is_our_fault(tmp_path, monkeypatch):
    """soundfile raises OSError if there is no libsndfile."""
    (tmp_path / "needs_a_library.py").write_text("raise OSError('sndfile library not found')")
    monkeypatch.syspath_prepend(tmp_path)
    error = caught(lambda: importlib.import_module("needs_a_library"))
    sys.modules.pop("needs_a_library", None)
    assert own_fault(error) is error


def test_chain_of_causes_that_is_a_circle_ends():
    one, two = ValueError(), ValueError()
    one.__cause__, two.__cause__ = two, one
    assert own_fault(one) is None


def test_only_exhaustion_may_pass():
    with pytest.raises(Unavailable):
        raise_exhausted(OSError(errno.ENFILE, "file table overflow"))
    raise_exhausted(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))


def test_function_that_raised_is_found():
    space = {"__name__": "medialane.somewhere"}
    exec("def ours(): raise TypeError('bug')\ndef calls(other): other()", space)

    def theirs():
        raise TypeError("bad bytes")

    assert raised_in(caught(space["ours"]), "medialane")
    assert not raised_in(caught(lambda: space["calls"](theirs)), "medialane")
    assert not raised_in(caught(space["ours"]), "medial")
