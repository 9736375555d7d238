"""The warm process: imports vLLM, reads the model, and forks the processes of this host on request.

Started by `medialane serve`, never by hand. Two invariants: one thread, since a fork has only the thread that calls it
(checked before each fork), and nothing that a child must not have: no secret in the environment, no descriptor but its
log and its own socket, no device.

A child is forked by a fork that exits at once, so that the supervisor becomes its parent (`core.process.subreaper`). It
leaves this module's stack by returning from `Forks.run`, takes its own environment and descriptors, and runs the same
command as a process that was started with `python -m medialane`. What was built here is in module-level state of the
rooms that built it, and is used there if it is what the command would build.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import NamedTuple

import numpy as np

from medialane.cluster.process_spec import NOT_NEEDED
from medialane.cluster.warm import Fork, Forked, ForkFailed, answer_fork, read_start, receive_fork
from medialane.config import Config, SectionName, load_config, process_environ, replace_environ
from medialane.core.errors import StartupFailed
from medialane.core.process import heartbeat
from medialane.core.process.isolation import hide_memory
from medialane.core.process.parent_death import signal_on_parent_death
from medialane.core.process.phase import enter_phase
from medialane.core.process.title import WARM, set_title
from medialane.observability.logging import configure
from medialane.prepare import prebuilt
from medialane.prepare.confinement import require_one_thread

logger = logging.getLogger(__name__)

SECTIONS: tuple[SectionName, ...] = ("gateway", "media", "prepare", "environment", "logging")

#: Of requests that arrive together, those that do not need the model are served before it is read: engines start
#: meanwhile.
_SETTLE_S = 0.2
#: A fork becomes the supervisor's child within a millisecond, unless that has exited.
_REPARENT_S = 5.0
_MAX_PID_BYTES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--listen", metavar="PATH", type=Path, required=True)


def run(args: argparse.Namespace) -> int:
    """Fork until killed; in a child, run its command and return its status. Raises StartupFailed."""
    set_title(WARM, args.argv)
    config = load_config({}, sections=SECTIONS)
    log = configure(config.logging, component="warm")
    replace_environ({**process_environ(), **log.environ()})  # for fork servers, which have no command line
    supervisor, given = os.getppid(), process_environ()
    enter_phase("importing vLLM")
    import_everything()
    by_imports = {name: value for name, value in process_environ().items() if given.get(name) != value}
    try:
        _freeze()
    except StartupFailed as error:
        logger.warning("%s", error.message)
        return NOT_NEEDED
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(args.listen))
        listener.listen()
        child = Forks(listener, lambda: read_model(config, args.model, args.vllm_args, given | by_imports)).run()
    argv = become(child, supervisor, by_imports)
    from medialane.vllm_bridge.threads import set_num_threads

    set_num_threads(process_environ())
    from medialane.cli.main import main

    return main(argv)


def import_everything() -> None:
    """Import what gateways, workers, engines and stores import. Raises StartupFailed if this vLLM cannot be used."""
    from medialane.vllm_bridge.seams import probe

    probe.check("worker")
    probe.check("gateway")
    from medialane.cli import gateway, gateway_command, store, store_command, worker_command  # noqa: F401
    from medialane.vllm_bridge import threads  # noqa: F401
    from medialane.vllm_bridge.engine import engine  # noqa: F401
    from medialane.vllm_bridge.engine.warm_imports import warm_imports
    from medialane.vllm_bridge.log_level import show_vllm_lines
    from medialane.worker import serve  # noqa: F401

    show_vllm_lines()
    warm_imports()


def read_model(config: Config, model: str, vllm_args: list[str], environ: Mapping[str, str]) -> None:
    """Build what gateways and the store with `environ` build before they serve. Raises StartupFailed: they will report
    why."""
    from medialane.cli import gateway, store

    gateway.prebuild(model, vllm_args)
    store.prebuild(config, model, vllm_args, environ)


def _freeze() -> None:
    """Make all objects permanent: the garbage collector must not write to their pages, and so copy them, in children.
    Raises StartupFailed."""
    require_one_thread()
    gc.collect()
    gc.freeze()


class Child(NamedTuple):
    """In a child: what it was requested to be, and its descriptors."""

    request: Fork
    descriptors: list[int]


class Forks:
    """Serves requests for forks."""

    def __init__(self, listener: socket.socket, read_model: Callable[[], None]) -> None:
        self._listener = listener
        self._read_model: Callable[[], None] | None = read_model
        self._waiting: list[tuple[socket.socket, Child]] = []

    def run(self) -> Child:
        """Return in each child."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                heartbeat.beat()
                child = None
                if selector.select(_SETTLE_S if self._waiting else heartbeat.BEAT_S):
                    child = self._accept()
                elif self._waiting:
                    heartbeat.pause()
                    self._read()
                    while self._waiting and child is None:
                        child = self._fork(*self._waiting.pop(0))
                if child is not None:
                    break
        for connection, waiting in self._waiting:
            _close(connection, waiting)
        return child

    def _accept(self) -> Child | None:
        connection, _ = self._listener.accept()
        connection.settimeout(1.0)  # whoever connects has sent its request, or has exited
        try:
            request, descriptors = receive_fork(connection)
        except (OSError, ValueError) as error:
            logger.error("unreadable request: %s", error)
            connection.close()
            return None
        if request is None:
            connection.close()
            return None
        if request.needs_model and self._read_model is not None:
            self._waiting.append((connection, Child(request, descriptors)))
            return None
        return self._fork(connection, Child(request, descriptors))

    def _read(self) -> None:
        """Read the model, once."""
        read, self._read_model = self._read_model, None
        if read is None:
            return
        started = time.monotonic()
        try:
            read()
            _freeze()
        except Exception as error:  # also of a model's own code: the processes that need it will report it
            logger.warning("the model is not read here: %s", error, exc_info=not isinstance(error, StartupFailed))
        else:
            logger.info("the model is read after %.1f s", time.monotonic() - started)

    def _fork(self, connection: socket.socket, child: Child) -> Child | None:
        """Return the child in the child, None here."""
        if _is_wanted(connection):
            try:
                pid = _fork_orphan()
            except StartupFailed as error:
                _answer_failure(connection, error.message)
            except OSError as error:
                _answer_failure(connection, f"fork: {error.strerror}")
            else:
                if pid == 0:
                    connection.close()
                    return child
                _answer(connection, pid)
        _close(connection, child)
        return None


def _fork_orphan() -> int:
    """Fork a process whose parent exits, and return its id; return 0 in the process. Raises OSError, StartupFailed."""
    require_one_thread()
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reader)
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(writer)
        return 0
    os.close(writer)
    pid = int(os.read(reader, _MAX_PID_BYTES) or 0)  # not until the end: the fork has the other end, and may be stopped
    os.close(reader)
    os.waitpid(middle, 0)
    if not pid:
        raise StartupFailed("there are not enough processes or memory for a fork")
    return pid


def become(child: Child, supervisor: int, by_imports: Mapping[str, str]) -> list[str]:
    """Make this fork what a process is that `supervisor` has started: its child, in a session of its own, with the
    descriptors, environment and command line of the request, and the variables `by_imports` that libraries set when
    they are imported. Return the command line."""
    os.setsid()
    heartbeat.forget()
    set_title(child.request.command)  # the command adds the rest
    deadline = time.monotonic() + _REPARENT_S
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)  # until the process that has forked this one is gone
    if not signal_on_parent_death(SIGTERM, parent_pid=supervisor):
        os._exit(1)
    start, output, *passed = child.descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _renumber(passed, child.request.pass_fds)
    if child.request.command == "store":
        prebuilt.fork_forkserver()  # before secrets are in this memory
    hide_memory()
    own = read_start(start)
    replace_environ({**own.environ, **by_imports})
    sys.argv[1:] = own.argv
    random.seed()
    np.random.seed()  # libraries use the global generator: forks would draw equal numbers
    return own.argv


def _renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors these numbers, inheritable as those that a process was started with."""
    for position, number in enumerate(numbers):
        for later in range(position + 1, len(descriptors)):
            if descriptors[later] == number:
                descriptors[later] = os.dup(number)
        os.dup2(descriptors[position], number)
        if descriptors[position] != number:
            os.close(descriptors[position])


def _is_wanted(connection: socket.socket) -> bool:
    """Return whether whoever has sent the request still waits for its answer."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _answer(connection: socket.socket, pid: int) -> None:
    """Tell the supervisor of its new child, which is killed if it does not want it any more."""
    try:
        answer_fork(connection, Forked(pid))
    except OSError:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)


def _answer_failure(connection: socket.socket, message: str) -> None:
    logger.warning("no fork: %s", message)
    with suppress(OSError):
        answer_fork(connection, ForkFailed(message))


def _close(connection: socket.socket, child: Child) -> None:
    connection.close()
    for descriptor in child.descriptors:
        os.close(descriptor)
