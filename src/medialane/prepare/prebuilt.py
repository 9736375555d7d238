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
import time
from collections.abc import Mapping
from dataclasses import dataclass

from medialane.prepare.forkserver_environment import differences, required
from medialane.prepare.pidfd_process import PidfdProcess
from medialane.prepare.processor import Processor
from medialane.prepare.sandbox import Sandbox, available
from medialane.wire.child_channel import child_channel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """What `build` has built, from what, and for how long; `sandbox` is what this machine supports."""

    factory: str
    factory_config: bytes
    environment: Mapping[str, str]
    processor: Processor
    warm_s: float
    sandbox: Sandbox


_prebuilt: Prebuilt | None = None
#: Process id and pidfd of a child of this process, and our end of its control channel.
_waiting: tuple[int, int, socket.socket] | None = None


def build(factory: str, factory_config: bytes, environment: Mapping[str, str]) -> None:
    """Build the processor that fork servers of stores with this `environment` use. The process has one thread
    afterwards. Raises StartupFailed, or what the factory raises."""
    global _prebuilt
    from medialane.prepare.forkserver import build_processor  # imported lazily: only warm processes decode

    started = time.monotonic()
    with required():
        processor = build_processor(factory, factory_config)
    warm_s = time.monotonic() - started
    _prebuilt = Prebuilt(factory, factory_config, dict(environment), processor, warm_s, available())


def fork_forkserver() -> None:
    """Fork the fork server of this process, a store, if a processor has been built. Call it from the main thread, which
    must be the only one. Raises StartupFailed if it is not."""
    global _waiting
    if _prebuilt is None:
        return
    from medialane.prepare import confinement, forkserver

    confinement.require_one_thread()
    ours, theirs = child_channel()
    store_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        forkserver.run_forked(theirs, _prebuilt, store_pid)
    theirs.close()
    _waiting = pid, os.pidfd_open(pid), ours


def is_waiting(factory: str, factory_config: bytes, environment: Mapping[str, str]) -> bool:
    """Return whether there is a fork server to `take`, with the processor that the factory would build."""
    return _waiting is not None and not _changes(factory, factory_config, environment)


def take(
    factory: str, factory_config: bytes, environment: Mapping[str, str]
) -> tuple[PidfdProcess, socket.socket] | None:
    """Return the waiting fork server and our end of its control channel; the caller owns both. For a running loop.

    None if it was not forked, has been taken, or has another processor than the factory would build: then it is
    terminated.
    """
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is None:
        return None
    pid, pidfd, control = waiting
    process = PidfdProcess(pid, pidfd)
    process.on_exit = lambda: _reap(pid)
    changes = _changes(factory, factory_config, environment)
    if not changes:
        return process, control
    logger.warning("the prebuilt processor is not used: it was built with other values of %s", ", ".join(changes))
    control.close()
    process.kill()
    return None


def _reap(pid: int) -> None:
    os.waitpid(pid, 0)


def _changes(factory: str, factory_config: bytes, environment: Mapping[str, str]) -> list[str]:
    if _prebuilt is None:
        return ["everything"]
    changes = differences(_prebuilt.environment, environment)
    if (_prebuilt.factory, _prebuilt.factory_config) != (factory, factory_config):
        changes.append("the model's flags")
    return changes
