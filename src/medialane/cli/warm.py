"""The warm process: imports vLLM, reads the model, and forks the processes of this host on request.

Started by `medialane serve`, never by hand. Two invariants: one thread, since a fork has only the thread that calls it
(checked before each fork), and nothing that a child must not have: no secret in the environment, no descriptor but its
log and its own socket, no device.

A fork leaves this module's stack by returning from `serve_forks`, takes its own environment and descriptors, and runs
the same command as a process that was started with `python -m medialane`. What was built here is in module-level state
of the rooms that built it, and is used there if it is what the command would build.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import SIGTERM
from typing import NamedTuple

import numpy as np

from medialane.cluster.child_process import NOT_NEEDED, receive_fork, receive_start
from medialane.config import Config, SectionName, load_config, process_environ, replace_environ
from medialane.observability.logging import configure
from medialane.prepare import fork_forkserver
from medialane.prepare.forkserver_environment import require_one_thread
from medialane.runtime import heartbeat
from medialane.runtime.linux import WARM, fork_child_of, hide_memory, set_title, signal_on_parent_death
from medialane.runtime.phase import enter_phase
from medialane.types.errors import StartupFailed

logger = logging.getLogger(__name__)

SECTIONS: tuple[SectionName, ...] = ("gateway", "media", "prepare", "environment", "logging")

#: Commands that use what `read_model` builds: their forks are made after it.
_NEED_MODEL = ("store", "gateway")
#: Requests that arrive together and do not need the model are served before it is read: engines start
#: meanwhile.
_SETTLE_S = 0.2
#: Whoever connects has sent its request, or has exited.
_RECEIVE_S = 1.0


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
        environ = given | by_imports
        request = serve_forks(listener, lambda: read_model(config, args.model, args.vllm_args, environ), supervisor)
    argv = become(request, supervisor, by_imports)
    from medialane.vllm_bridge.engine.plugin import set_num_threads

    set_num_threads(process_environ())
    from medialane.cli.main import main

    return main(argv)


def import_everything() -> None:
    """Import what gateways, workers, engines and stores import. Raises StartupFailed if this vLLM cannot be used."""
    from medialane.vllm_bridge.seams import probe

    probe.check("worker")
    probe.check("gateway")
    from medialane.cli import gateway, gateway_command, store, worker_command  # noqa: F401
    from medialane.vllm_bridge.engine import engine  # noqa: F401
    from medialane.vllm_bridge.engine.plugin import show_vllm_lines, warm_imports
    from medialane.worker import serve  # noqa: F401

    show_vllm_lines()
    warm_imports()


def read_model(config: Config, model: str, vllm_args: list[str], environ: Mapping[str, str]) -> None:
    """Build what gateways and the store with `environ` build before they serve. Raises StartupFailed."""
    from medialane.cli import gateway, store

    gateway.prebuild(model, vllm_args)
    store.prebuild(config, model, vllm_args, environ)


def _freeze() -> None:
    """Make all objects permanent: the garbage collector must not write to their pages, and so copy them, in children.
    Raises StartupFailed."""
    require_one_thread()
    gc.collect()
    gc.freeze()


class WaitingFork(NamedTuple):
    """What the supervisor has asked for, at the other end of `connection`: a process for `medialane COMMAND`."""

    connection: socket.socket
    command: str
    descriptors: list[int]

    def close(self) -> None:
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def serve_forks(listener: socket.socket, read_model: Callable[[], None], supervisor: int) -> WaitingFork:
    """Fork children of the process `supervisor`. Return in each of them, with what it was requested to be.

    The model is read once, as soon as there is no request that does not need it."""
    waiting: list[WaitingFork] = []
    is_read = False
    while True:
        heartbeat.beat()
        arrived, _, _ = select.select([listener], [], [], _SETTLE_S if waiting else heartbeat.BEAT_S)
        if arrived:
            waiting += _received(listener)
        elif not is_read:
            heartbeat.pause()
            _read(read_model)
            is_read = True
        for request in [each for each in waiting if is_read or each.command not in _NEED_MODEL]:
            waiting.remove(request)
            if _fork(supervisor):
                for other in waiting:
                    other.close()
                return request
            request.close()


def _received(listener: socket.socket) -> list[WaitingFork]:
    """Return the next request, if it is one that has not been given up."""
    connection, _ = listener.accept()
    connection.settimeout(_RECEIVE_S)
    try:
        fork, descriptors = receive_fork(connection)
    except (OSError, ValueError) as error:
        logger.error("unreadable request: %s", error)
    else:
        if fork is not None:
            return [WaitingFork(connection, fork.command, descriptors)]
    connection.close()
    return []


def _read(read_model: Callable[[], None]) -> None:
    started = time.monotonic()
    try:
        read_model()
        _freeze()
    except Exception as error:  # also of a model's own code: the processes that need it will report it
        logger.warning("the model is not read here: %s", error, exc_info=not isinstance(error, StartupFailed))
    else:
        logger.info("the model is read after %.1f s", time.monotonic() - started)


def _fork(supervisor: int) -> bool:
    """Return whether this is the fork. Without one, the supervisor reads the end of its connection."""
    try:
        require_one_thread()
        return fork_child_of(supervisor)
    except (StartupFailed, OSError) as error:
        logger.warning("no fork: %s", error)
        return False


def become(request: WaitingFork, supervisor: int, by_imports: Mapping[str, str]) -> list[str]:
    """Make this fork what a process is that `supervisor` has started: in a session of its own, with the descriptors,
    environment and command line of the request, and the variables `by_imports` that libraries set when they are
    imported. Return the command line. Exits if the request was given up."""
    os.setsid()
    heartbeat.forget()
    set_title(request.command)  # the command adds the rest
    if not signal_on_parent_death(SIGTERM, parent_pid=supervisor):
        os._exit(1)
    output, *passed = request.descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if request.command == "store":
        fork_forkserver()  # before secrets are in this memory
    hide_memory()
    with request.connection as connection:
        connection.settimeout(None)  # it is closed at the other end if the request is given up
        start = receive_start(connection)
    if start is None:
        os._exit(1)
    _renumber(passed, start.pass_fds)
    replace_environ({**start.environ, **by_imports})
    sys.argv[1:] = start.argv
    random.seed()
    np.random.seed()  # libraries use the global generator: forks would draw equal numbers
    return start.argv


def _renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors these numbers, inheritable as the ones that a process was started with."""
    for position, number in enumerate(numbers):
        for later in range(position + 1, len(descriptors)):
            if descriptors[later] == number:
                descriptors[later] = os.dup(number)
        os.dup2(descriptors[position], number)
        if descriptors[position] != number:
            os.close(descriptors[position])
