"""The NIXL mover process: `python -m medialane.transfer.nixl.process FACTORY CONTROL_FD PARENT_PID`.

Theory of operation. The main thread receives requests; each read occupies a thread until nothing can be written to its
destination any more, because NIXL blocks: over CMA (process_vm_readv) a transfer copies inside the call that starts it.
A read from a peer that has stopped occupies its thread until the peer continues or is disconnected; the store bounds
their number, and kills this process if there are too many.

With the payload, the header of the source's entry is read into memory of ours: after the transfer, its generation must
be the one that the peer has handed out. So a wrong address or a freed entry is detected.

`FACTORY` names an `agent.Agent` as `module:class`. The process is killed with the store's thread that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from medialane.arena import ENTRY_HEADER_BYTES, ArenaView, ClientSlot
from medialane.arena.layout import is_header
from medialane.observability.logging import configure_child
from medialane.runtime.linux import set_title, signal_on_parent_death
from medialane.transfer.nixl.agent import (
    MAX_PACKET_BYTES,
    MAX_READS,
    AddPeer,
    Agent,
    AgentError,
    Descriptor,
    Expect,
    Forget,
    FromMover,
    Notified,
    Read,
    ReadDone,
    ReadFailed,
    ReadRefused,
    RemovePeer,
    Start,
    Started,
    ToMover,
    Transfer,
    decode_to_mover,
)
from medialane.types.errors import HandoverFailed
from medialane.wire.child_channel import receive, send

logger = logging.getLogger(__name__)

#: A transfer is polled at intervals of a twentieth of its age, within these limits: little is added to its duration,
#: and a transfer that waits for a stopped peer costs little.
_MIN_POLL_S, _MAX_POLL_S = 1e-4, 0.1
_NOTIFICATION_POLL_S = 0.01


class MoverProcess:
    """Executes requests until the channel is closed."""

    def __init__(self, control: socket.socket, agent: Agent, arena: ArenaView) -> None:
        self._control = control
        self._agent = agent
        self._memory = arena.memory
        self._base = _register(agent, self._memory)
        self._headers = memoryview(mmap.mmap(-1, MAX_READS * ENTRY_HEADER_BYTES))
        self._headers_base = _register(agent, self._headers)
        self._free_headers = list(range(MAX_READS))
        self._reads = ThreadPoolExecutor(MAX_READS, thread_name_prefix="read")
        self._peers: dict[str, str] = {}  # the names of their agents
        self._expected: set[str] = set()
        self._expecting = threading.Event()

    def run(self) -> None:
        """Raises ValueError for a protocol violation."""
        threading.Thread(target=self._watch_notifications, daemon=True).start()
        self._report(Started(self._agent.metadata(), self._base))
        while (request := _receive(self._control)) is not None:
            self._handle(request)

    def _handle(self, request: ToMover) -> None:
        match request:
            case Read():
                self._reads.submit(self._read, request)
            case AddPeer():
                self._add_peer(request)
            case RemovePeer(peer):
                self._remove_peer(peer)
            case Expect(notification):
                self._expected.add(notification)
                self._expecting.set()
            case Forget(notification):
                self._expected.discard(notification)
            case Start():
                raise ValueError("a second Start")

    def _add_peer(self, request: AddPeer) -> None:
        try:
            self._peers[request.peer] = self._agent.add_peer(request.metadata)
        except AgentError as error:  # reads from it fail
            logger.warning("a peer's NIXL metadata were refused: %s", error)

    def _remove_peer(self, peer: str) -> None:
        agent = self._peers.pop(peer, None)
        if agent is None or agent in self._peers.values():  # known by later metadata, too
            return
        try:
            self._agent.remove_peer(agent)
        except AgentError as error:
            logger.info("disconnecting from a NIXL agent: %s", error)

    def _read(self, request: Read) -> None:
        try:
            self._copy(request)
        except AgentError as error:
            self._report(ReadFailed(request.read_id, str(error)))
        except Exception:  # the supervisor of one read: the store must get a report
            logger.exception("a read failed unexpectedly")
            os._exit(1)  # whether its transfer has ended is not known: only this stops it
        else:
            self._report(ReadDone(request.read_id))

    def _copy(self, request: Read) -> None:
        sources = list(request.sources)
        destinations = [self._destination(offset, s.size) for offset, s in zip(request.offsets, sources, strict=True)]
        if request.entry is None:
            self._transfer(request, sources, destinations)
            return
        slot = self._free_headers.pop()
        start = slot * ENTRY_HEADER_BYTES
        header = self._headers[start : start + ENTRY_HEADER_BYTES]
        header[:] = bytes(ENTRY_HEADER_BYTES)
        first = sources[0]
        sources.insert(0, Descriptor(first.device, first.ptr - ENTRY_HEADER_BYTES, ENTRY_HEADER_BYTES))
        destinations.insert(0, Descriptor("cpu", self._headers_base + start, ENTRY_HEADER_BYTES))
        try:
            self._transfer(request, sources, destinations)
            if not is_header(header.cast("Q"), request.entry):
                raise AgentError("the entry that was read is not the one that was handed out")
        finally:
            self._free_headers.append(slot)

    def _destination(self, offset: int, size: int) -> Descriptor:
        if not 0 <= offset <= offset + size <= self._memory.nbytes:
            raise AgentError("the destination is not in the arena")
        return Descriptor("cpu", self._base + offset, size)

    def _transfer(self, request: Read, sources: list[Descriptor], destinations: list[Descriptor]) -> None:
        started = time.monotonic()
        if (agent := self._peers.get(request.peer)) is None:
            raise AgentError("the peer's metadata were refused")
        transfer = self._agent.read(agent, sources, destinations, request.notification.encode())
        try:
            wait(transfer, started)
        finally:
            transfer.release()

    def _watch_notifications(self) -> None:
        while self._expecting.wait():
            try:
                self._forward_notifications()
            except AgentError:
                logger.exception("reading notifications")
            time.sleep(_NOTIFICATION_POLL_S)
            if not self._expected:
                self._expecting.clear()

    def _forward_notifications(self) -> None:
        for data in self._agent.notifications():
            notification = data.decode(errors="replace")
            if notification in self._expected:
                self._expected.discard(notification)
                self._report(Notified(notification))

    def _report(self, report: FromMover) -> None:
        try:
            send(self._control, report, max_bytes=MAX_PACKET_BYTES)
        except OSError:
            logger.debug("the store has exited; %s is not reported", type(report).__name__)


def wait(transfer: Transfer, started: float) -> None:
    """Return when all bytes have arrived. Raises AgentError when the transfer has failed."""
    while not transfer.is_done():
        age_s = time.monotonic() - started
        time.sleep(min(max(age_s / 20, _MIN_POLL_S), _MAX_POLL_S))


def _register(agent: Agent, memory: memoryview) -> int:
    """Register the whole of `memory`; return its address."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent.register(Descriptor("cpu", address, memory.nbytes))
    return address


def _receive(control: socket.socket) -> ToMover | None:
    """Return the next request; None if the channel is closed."""
    request, _ = receive(control, decode_to_mover, max_bytes=MAX_PACKET_BYTES)
    return request


def _load(factory_name: str) -> Callable[[str], Agent]:
    module, _, name = factory_name.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # named by the store


def main(argv: list[str]) -> int:
    factory_name, control_fd, parent_pid = argv[0], int(argv[1]), int(argv[2])
    if not signal_on_parent_death(signal.SIGKILL, parent_pid=parent_pid):
        return 0
    set_title("NIXL mover")
    configure_child("nixl-mover")
    with socket.socket(fileno=control_fd) as control:
        start = _receive(control)
        if not isinstance(start, Start):
            return 1
        try:
            slot = ClientSlot.take(start.arena, start.directory, start.slot)
            arena = ArenaView.open(start.arena, start.directory, writable=True)
            mover = MoverProcess(control, _load(factory_name)(start.agent), arena)
        except (ImportError, AgentError, HandoverFailed) as error:
            send(control, ReadRefused(str(error)), max_bytes=MAX_PACKET_BYTES)
            return 1
        mover.run()
        slot.release()
    return 0


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    sys.stderr.flush()
    # Skip interpreter shutdown: NIXL's destructors may wait for peers.
    os._exit(exit_status)
