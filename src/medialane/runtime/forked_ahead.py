"""Processes that are forked before they are needed, and get what to do later, in place of spawned ones.

Theory of operation. A fork has all imports, but only the thread that forks: locks of other threads stay locked in it.
When vLLM starts EngineCore, its front end has threads of ZeroMQ and may have some of tokenizers and OpenMP. So the
processes are forked before, while there is one thread, and wait at a pipe for what `spawn` would send: environment,
function and arguments, pickled. vLLM gets them from a multiprocessing context whose `Process` takes one of them;
exit status, sentinel and signals are as of any child of this process. A child whose parent dies is killed.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context, popen_fork, process, resource_tracker, util
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from medialane.runtime.linux import signal_on_parent_death

logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """A forked process that waits for its work. `sentinel` ends when it exits, it exits when `writer` is closed."""

    pid: int
    sentinel: int
    writer: int


@contextmanager
def forked_ahead(number: int) -> Iterator[ForkedContext]:
    """Fork `number` processes, and yield a context that starts them, with none and a `reason` if this process has other
    threads. Unused ones are killed. Raises OSError."""
    resource_tracker.ensure_running()  # as `spawn` does: one for this process and its children
    gc.freeze()  # collections, here and there, would write to shared pages
    waiting: list[_Waiting] = []
    try:
        reason = f"this process has {threading.active_count()} threads" if threading.active_count() > 1 else ""
        for _ in range(0 if reason else number):
            waiting.append(_fork([each.writer for each in waiting]))
        # Libraries that end their threads at a fork, as OpenBLAS does, have done so.
        if waiting and (num_threads := len(os.listdir("/proc/self/task"))) > 1:
            reason = f"this process has {num_threads} threads"
            _discard(waiting)
        yield ForkedContext(waiting, reason)
    finally:
        _discard(waiting)


def _discard(waiting: list[_Waiting]) -> None:
    while waiting:
        pid, *descriptors = waiting.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _close(*descriptors)


def _fork(inherited: list[int]) -> _Waiting:
    sentinel, alive = os.pipe()
    reader, writer = os.pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        _close(alive, reader)
        return _Waiting(pid, sentinel, writer)
    status = 1
    try:
        _close(sentinel, writer, *inherited)
        waiting: Any = context.SpawnProcess(target=_work, args=(reader, parent_pid))
        status = waiting._bootstrap(parent_sentinel=reader)  # noqa: SLF001 - as multiprocessing does
    finally:
        os._exit(status)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _work(reader: int, parent_pid: int) -> None:
    """Wait for the work and do it, with the signal handlers of a new process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not signal_on_parent_death(signal.SIGKILL, parent_pid=parent_pid):
        raise SystemExit(0)
    with open(reader, "rb", closefd=False) as pipe:
        try:
            environ, name, target, args, kwargs = pickle.load(pipe)  # noqa: S301 - from this process's parent alone
        except EOFError:
            raise SystemExit(0) from None
    os.environ.clear()
    os.environ.update(environ)
    process.current_process().name = name
    target(*args, **kwargs)


class ForkedContext(context.SpawnContext):
    """Starts processes that were forked before; when there are none left, by `spawn`."""

    def __init__(self, waiting: list[_Waiting], reason: str) -> None:
        self._waiting = waiting
        self.reason = reason

    def lacks(self) -> str:
        """Return the libraries that processes started now would preload, and forked ones have not loaded."""
        preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        with open("/proc/self/maps") as maps:
            loaded = {line.split()[-1] for line in maps if preloaded}
        return ", ".join(path for path in preloaded if os.path.realpath(path) not in loaded)

    def Process(self, **options: Any) -> process.BaseProcess:  # type: ignore[override]  # noqa: N802 - its name there
        return _ForkedProcess(self._waiting, **options)


class _ForkedProcess(context.SpawnProcess):
    def __init__(
        self, waiting: list[_Waiting], *, target: Callable[..., Any], name: str, kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(target=target, name=name, kwargs=kwargs)
        self._waiting = waiting
        self._work = target, (), kwargs

    def start(self) -> None:
        super().start()
        del self._work

    def _Popen(self, _process: Any) -> Any:  # type: ignore[override]  # noqa: N802 - multiprocessing's name
        try:
            work = bytes(ForkingPickler.dumps((dict(os.environ), self.name, *self._work)))
        except RuntimeError as error:  # of queues and locks, which only `spawn` can pass on
            logger.warning("%s is spawned, not forked: %s", self.name, error)
            work = b""
        if work and self._waiting:
            return _Popen(self._waiting.pop(0), work)
        spawned = context.SpawnProcess(target=self._work[0], name=self.name, kwargs=self._work[2])
        return context.SpawnProcess._Popen(spawned)  # noqa: SLF001 - as multiprocessing does


class _Popen(popen_fork.Popen):
    """A process that was waiting, and has got its work. Raises OSError if it has died."""

    def __init__(self, waiting: _Waiting, work: bytes) -> None:
        self.returncode = None
        self.pid, self.sentinel, writer = waiting
        self.finalizer = util.Finalize(self, _close, (self.sentinel, writer))
        with open(writer, "wb", closefd=False) as pipe:
            pipe.write(work)
