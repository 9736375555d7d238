"""Whether a failure to read a media item is ours, or the item's.

Theory of operation. Decoders and processors raise anything for damaged files, so an exception by itself says that the
file is at fault. Some say that this process or its installation is: memory, file descriptors or threads have run out, a
module or library is missing, or an exception of the caller's own kinds (a dead engine). Libraries wrap exceptions, so
their causes are looked at, too. A client gets an error of the 5xx range for these.
"""

from __future__ import annotations

import errno
from concurrent.futures import BrokenExecutor
from types import TracebackType

from medialane.core.errors import Unavailable

#: `errno` of a process or host that has used up something.
_EXHAUSTED = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT))

#: A name or module that does not exist is not a matter of content. (UnboundLocalError is: a parser has skipped a part.)
_OURS = (MemoryError, ImportError, NameError, BrokenExecutor)

_NO_THREAD = "can't start new thread"


def own_fault(error: BaseException, *more: type[BaseException]) -> BaseException | None:
    """Return the exception, `error` or one of its causes, that is this process's fault; None if there is none.

    `more` are further classes of such exceptions.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if _is_own(current) or isinstance(current, more):
            return current
        seen.add(id(current))
        current = current.__cause__
    return None


def is_exhausted(error: BaseException) -> bool:
    """Return whether memory, file descriptors, disk space or threads have run out: later, there may be more."""
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return True
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)


def raise_exhausted(error: BaseException) -> None:
    """Raise Unavailable if `error` says that memory, file descriptors, disk space or threads have run out."""
    if is_exhausted(error):
        raise Unavailable("the server is out of memory, files or threads") from error


def raised_in(error: BaseException, package: str) -> bool:
    """Return whether a Python function of `package` has raised `error`, not one that it has called."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name == package or name.startswith(f"{package}.")


def _is_own(error: BaseException) -> bool:
    if isinstance(error, UnboundLocalError):
        return False
    return isinstance(error, _OURS) or is_exhausted(error) or _failed_to_load(error)


def _failed_to_load(error: BaseException) -> bool:
    """Return whether a shared library is missing: ctypes raises OSError, as may a module while it is imported."""
    trace = error.__traceback__ if isinstance(error, OSError) else None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__") == "ctypes" or frame.f_code.co_name == "<module>":
            return True
        trace = trace.tb_next
    return False
