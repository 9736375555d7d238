"""The process that preparers fork from: `python -m medialane.prepare.forkserver FACTORY CONTROL_FD PARENT_PID`, or a
fork of its store with a processor that was built before.

Theory of operation. The engine's processor takes about 20 s and 600 MB to import, build and warm. This
process does it once; every preparer is a fork of it, ready in milliseconds and sharing those pages. Two invariants:

* One thread. A fork copies only the calling thread; a lock held by another thread would stay locked in the child.
  Hence a separate process (the store has threads), the settings of `forkserver_environment`, and a thread count
  before each fork.
* No orphans. The kernel kills this process with the store's thread that started it, and each preparer with this
  process (PR_SET_PDEATHSIG); closing the control channel has the same effect on a process that still reads it.

A *spare* is a fork of this process that waits on its own control channel (`forkserver_process` says why).

The loop waits for requests on the control channel and for exits of children (one pidfd each, which a reused pid cannot
confuse). It is the only place where preparers are reaped. The protocol is in `messages`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from medialane.media.document import load_pdfium
from medialane.observability.logging import configure_child
from medialane.prepare.forkserver_environment import (
    default_signals,
    detach,
    die_with_parent,
    enter,
    require_one_thread,
)
from medialane.prepare.messages import (
    MAX_CONTROL_BYTES,
    SPARE,
    Alive,
    ControlReport,
    ControlRequest,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    PreparerSetup,
    Ready,
    Setup,
    SetupFailed,
    decode_control_request,
)
from medialane.prepare.preparer import Preparer
from medialane.prepare.processor import Processor
from medialane.prepare.sandbox import Sandbox, allow_reader, available
from medialane.runtime.heartbeat import BEAT_S
from medialane.runtime.linux import exit_at_once, set_title
from medialane.types.errors import MedialaneError, StartupFailed, UnsupportedMediaType
from medialane.wire.child_channel import receive, send

logger = logging.getLogger(__name__)

#: How long to wait for all preparers to exit after they were killed because the control channel was closed.
_REAP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """A preparer or the spare that is not reaped yet, so that its pid cannot have been reused."""

    preparer_id: int
    pid: int
    pidfd: int


class Forkserver:
    """Forks preparers on request and reports their exits, until the control channel is closed."""

    def __init__(
        self, control: socket.socket, processor: Processor, setup: PreparerSetup, *, sandbox: Sandbox, store_pid: int
    ) -> None:
        self._control = control
        self._processor = processor
        self._setup = setup
        self._sandbox = sandbox
        self._store_pid = store_pid
        self._probe = ctypes.create_string_buffer(setup.arena.encode())
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self, warm_s: float = 0.0) -> None:
        """Serve until the store closes its end, then kill and reap every preparer. The processor took `warm_s` to be
        built."""
        allow_reader(self._store_pid)
        settings = dict(self._processor.settings)
        send_report(self._control, Ready(warm_s, self._sandbox, ctypes.addressof(self._probe), settings))
        try:
            while self._serve_once(BEAT_S):
                send_report(self._control, Alive())
        finally:
            self._end_children()

    def _serve_once(self, timeout_s: float) -> bool:
        """Wait for events and handle them. Returns False if the control channel is closed."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Child):
                self._reap(key.data)
                continue
            request, fds = receive_request(self._control)
            if request is None:
                return False
            if not isinstance(request, Fork) or len(fds) != 1:
                raise ValueError(f"unexpected {type(request).__name__} with {len(fds)} descriptors")
            with socket.socket(fileno=fds[0]) as channel:
                self._fork(request, channel)
        return True

    def _fork(self, request: Fork, channel: socket.socket) -> None:
        require_one_thread()
        parent_pid = os.getpid()
        child_id = request.preparer_id
        try:
            pid = os.fork()
        except OSError as error:
            send_report(self._control, ForkFailed(child_id, f"fork: {error.strerror}"))
            return
        if pid == 0 and child_id == SPARE:
            spare = Forkserver(channel, self._processor, self._setup, sandbox=self._sandbox, store_pid=self._store_pid)
            self._become(spare.run)
        elif pid == 0:
            die_with_parent(parent_pid)
            self._become(lambda: self._preparer(channel, child_id, writes_arena=request.writes_arena).run())
        child = Child(child_id, pid, os.pidfd_open(pid))
        self._children[pid] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        send_report(self._control, Forked(child_id, pid), child.pidfd)

    def _preparer(self, jobs: socket.socket, number: int, *, writes_arena: bool) -> Preparer:
        set_title(f"preparer {number}")
        return Preparer(
            jobs,
            self._processor,
            self._setup,
            self._sandbox,
            writes_arena=writes_arena,
            reader_pid=self._store_pid,
        )

    def _become(self, run: Callable[[], None]) -> NoReturn:
        """Run as the child, which must never return into the fork server's stack."""
        status = 1
        try:
            self._control.close()
            self._selector.close()
            for sibling in self._children.values():
                os.close(sibling.pidfd)
            run()
            status = 0
        except BaseException:  # noqa: BLE001 - logged and stopped here; the pool detects the exit
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pid]
        send_report(self._control, Exited(child.preparer_id, os.waitstatus_to_exitcode(status)))

    def _end_children(self) -> None:
        self._selector.unregister(self._control)
        for child in self._children.values():
            if child.preparer_id != SPARE:  # it has its own channel, and may be about to take over
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        while self._preparers_left() and (left := deadline - time.monotonic()) > 0:
            self._serve_once(left)

    def _preparers_left(self) -> bool:
        return any(child.preparer_id != SPARE for child in self._children.values())


def receive_request(control: socket.socket) -> tuple[ControlRequest | None, list[int]]:
    """Return the next request and its attached descriptors (close-on-exec); None if the channel is closed."""
    return receive(control, decode_control_request, max_bytes=MAX_CONTROL_BYTES)


def send_report(control: socket.socket, report: ControlReport, fd: int | None = None) -> None:
    """Send a report to the store. A closed channel is no error here: the next read detects it and ends the loop."""
    try:
        send(control, report, [] if fd is None else [fd], max_bytes=MAX_CONTROL_BYTES)
    except (BrokenPipeError, ConnectionResetError):
        logger.debug("the store has exited; %s is not reported", type(report).__name__)


def load_factory(name: str) -> Callable[[bytes], Processor]:
    """Import and return `module:function`. Raises StartupFailed if it does not exist or is not callable."""
    module, _, function = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise StartupFailed(f"cannot load the processor's factory {name}: {error}") from error
    if not callable(factory):
        raise StartupFailed(f"the processor's factory {name} is not callable")
    return factory  # type: ignore[no-any-return]  # the caller vouches for the type of what it names


def build_processor(factory_name: str, factory_config: bytes) -> Processor:
    """Build the warm processor and prepare this process for forks. Raises StartupFailed, or what the factory raises."""
    processor = load_factory(factory_name)(factory_config)
    require_one_thread()
    # Existing objects are permanent: the garbage collector must not write to (and so copy) their pages in children.
    gc.collect()
    gc.freeze()
    return processor


def run_forked(control: socket.socket, store_pid: int, processor: Processor, sandbox: Sandbox) -> NoReturn:
    """Become a fork server that has a processor, in a process just forked by its store. It never returns into the stack
    of its parent."""

    def take(setup: Setup) -> tuple[Processor, Sandbox]:
        enter(setup.environment)
        configure_child("forkserver")  # as its store
        return processor, sandbox

    status = 1
    try:
        die_with_parent(store_pid)
        faulthandler.disable()  # whose handlers are replaced
        detach(keep=control.fileno())
        control.setblocking(True)
        status = _run(control, store_pid, take)
    except BaseException:  # noqa: BLE001 - logged and stopped here; the pool detects the exit
        traceback.print_exc()
    finally:
        exit_at_once(status)


def main(argv: list[str]) -> int:
    factory_name, control_fd, parent_pid = argv[0], int(argv[1]), int(argv[2])
    die_with_parent(parent_pid)
    default_signals()
    control = socket.socket(fileno=control_fd)
    return _run(control, parent_pid, lambda setup: (build_processor(factory_name, setup.factory_config), available()))


def _run(control: socket.socket, store_pid: int, get: Callable[[Setup], tuple[Processor, Sandbox]]) -> int:
    """Serve the store at the other end of `control`, with the processor that `get` returns; return the exit status."""
    set_title(f"forkserver of store {store_pid}")
    faulthandler.enable()
    logging.root.handlers.clear()  # not closed: their descriptors already are
    configure_child("forkserver")
    with control:
        setup, _ = receive_request(control)
        if not isinstance(setup, Setup):
            return 1
        started = time.monotonic()
        with suppress(UnsupportedMediaType):
            load_pdfium()  # for all preparers
        try:
            processor, sandbox = get(setup)
            processor.enter_forkserver()
            forkserver = Forkserver(control, processor, setup.preparer, sandbox=sandbox, store_pid=store_pid)
            forkserver.run(time.monotonic() - started)
        except MedialaneError as error:
            send_report(control, SetupFailed(error.message))
            return 1
    return 0


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
