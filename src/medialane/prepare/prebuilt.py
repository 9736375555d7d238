"""A processor that was built before this process was forked, and the fork server that has it.

Theory of operation. A warm process calls `build` once. Each store is a fork of it, and calls `fork_forkserver` while it
has one thread, and before it has read a secret: the fork server, which waits with the built processor, then has none in
its memory. When the store knows its settings, `take` hands that fork server over, if its processor was built for these;
otherwise, and after its death and that of its spare, the store execs one (`forkserver_process`).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from medialane.prepare.forkserver_environment import differences, required
from medialane.prepare.pidfd_process import PidfdProcess
from medialane.prepare.processor import Processor
from medialane.prepare.sandbox import Sandbox, available
from medialane.wire.child_channel import child_channel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessorSource:
    """What a processor is built from: the factory `module:function`, what it gets, and the environment."""

    factory: str
    factory_config: bytes
    environment: Mapping[str, str]

    def changes(self, other: ProcessorSource) -> list[str]:
        """Return the names of what differs and may make another processor."""
        changes = differences(self.environment, other.environment)
        if (self.factory, self.factory_config) != (other.factory, other.factory_config):
            changes.append("the model's flags")
        return changes


#: What `build` has built, from what; and the sandbox that this machine supports.
_built: tuple[ProcessorSource, Processor, Sandbox] | None = None
#: What the fork server has been built from, its process id and pidfd (a child of this process), and our end of its
#: control channel.
_waiting: tuple[ProcessorSource, int, int, socket.socket] | None = None


def build(source: ProcessorSource) -> None:
    """Build the processor that fork servers of stores with this source use. The process has one thread afterwards.
    Raises StartupFailed, or what the factory raises."""
    global _built
    from medialane.prepare.forkserver import build_processor  # imported lazily: only warm processes decode

    with required():
        _built = source, build_processor(source.factory, source.factory_config), available()


def fork_forkserver() -> None:
    """Fork the fork server of this process, a store, if a processor has been built. Call it from the main thread, which
    must be the only one. Raises StartupFailed if it is not."""
    global _waiting
    if _built is None:
        return
    from medialane.prepare import confinement, forkserver

    source, processor, sandbox = _built
    confinement.require_one_thread()
    ours, theirs = child_channel()
    store_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        forkserver.run_forked(theirs, store_pid, processor, sandbox)
    theirs.close()
    _waiting = source, pid, os.pidfd_open(pid), ours


def is_waiting(source: ProcessorSource) -> bool:
    """Return whether there is a fork server to `take`, with the processor that this source would give."""
    return _waiting is not None and not source.changes(_waiting[0])


def take(source: ProcessorSource) -> tuple[PidfdProcess, socket.socket] | None:
    """Return the waiting fork server and our end of its control channel; the caller owns both. For a running loop.

    None if it was not forked, has been taken, or has another processor than this source would give: then it is
    terminated.
    """
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is None:
        return None
    built_from, pid, pidfd, control = waiting
    process = PidfdProcess(pid, pidfd, on_exit=partial(os.waitpid, pid, 0))
    if not (changes := source.changes(built_from)):
        return process, control
    logger.warning("the prebuilt processor is not used: it was built with other values of %s", ", ".join(changes))
    control.close()
    process.kill()
    return None
