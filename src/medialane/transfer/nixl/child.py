"""The store's handle on a NIXL mover process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from blake3 import blake3

from medialane.runtime.stop import PidfdProcess, end_process
from medialane.transfer.nixl.agent import (
    MAX_PACKET_BYTES,
    MAX_READS,
    AddPeer,
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
    decode_from_mover,
)
from medialane.types.errors import TransferFailed
from medialane.types.tensor import ArenaRange
from medialane.wire.child_channel import ChannelToChild, spawn

logger = logging.getLogger(__name__)

#: Other hosts' agents that the process knows. Agents of processes that have exited are among them.
MAX_PEERS = 256


class NixlRefused(TransferFailed, code="nixl_refused"):
    """NIXL is not installed, or cannot be used on this host: another attempt would fail in the same way."""


class MoverChild:
    """Owns the process and its channel until `close`. When `ended` is set, the process has exited: it writes nothing
    any more. Its pending reads fail then, and not before."""

    def __init__(self, process: PidfdProcess, control: socket.socket) -> None:
        self._process = process
        self._wait, process.on_exit = process.on_exit, self._reap
        self.ended, self.pid = process.exited, process.pid
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Started] = self._loop.create_future()
        self._reads: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self._slots = asyncio.Semaphore(MAX_READS)
        self._peers: dict[str, None] = {}  # least recently used first
        self._expected: dict[str, asyncio.Future[None]] = {}
        self._num_reads = 0
        self._is_lost = self._is_refused = False
        self._channel = ChannelToChild(control, decode_from_mover, self._handle, self._lose, max_bytes=MAX_PACKET_BYTES)

    @property
    def num_reads(self) -> int:
        """Reads that have not ended."""
        return len(self._reads)

    @property
    def num_peers(self) -> int:
        """Other hosts' agents that the process knows."""
        return len(self._peers)

    @classmethod
    async def start(
        cls, arena: str, directory: str, slot: int, *, factory: str, variables: Mapping[str, str], timeout_s: float
    ) -> Self:
        """Start a process for the arena, in which it has the lock of `slot`, and wait until its agent is ready.

        Raises NixlRefused, or TransferFailed; then no process is left running.
        """
        agent = f"medialane-{secrets.token_hex(8)}"
        self = cls(*spawn("medialane.transfer.nixl.process", factory, environ=variables))
        try:
            self._send(Start(arena, directory, slot, agent))
            async with asyncio.timeout(timeout_s):
                await self._started
        except BaseException as error:  # cancelled or failed: leave no process running
            await self.close()
            if isinstance(error, TimeoutError):
                raise TransferFailed(f"the NIXL mover process was not ready within {timeout_s:g} s") from error
            raise
        return self

    @property
    def started(self) -> Started:
        return self._started.result()

    def know(self, metadata: bytes) -> str:
        """Return how reads refer to the agent of `metadata`. Raises TransferFailed."""
        peer = blake3(metadata).hexdigest()
        if peer in self._peers:
            del self._peers[peer]
        else:
            self._send(AddPeer(peer, metadata))
        self._peers[peer] = None
        if len(self._peers) > MAX_PEERS:
            in_use = {peer, *(other for other, _ in self._reads.values())}
            if (oldest := next((other for other in self._peers if other not in in_use), None)) is not None:
                del self._peers[oldest]
                self._send(RemovePeer(oldest))
        return peer

    async def read(
        self,
        peer: str,
        sources: Sequence[Descriptor],
        offsets: Sequence[int],
        *,
        entry: ArenaRange | None = None,
        notification: str = "",
    ) -> asyncio.Future[None]:
        """Start a read (see `agent.Read`), as soon as fewer than MAX_READS are pending. The future ends,
        successfully or with TransferFailed, when nothing is written to the destinations any more; it must not be
        cancelled. Raises TransferFailed: no read was started."""
        await self._slots.acquire()
        done: asyncio.Future[None] = self._loop.create_future()
        done.add_done_callback(self._read_ended)
        self._num_reads += 1
        self._reads[self._num_reads] = peer, done
        try:
            self._send(Read(self._num_reads, peer, list(sources), list(offsets), entry, notification))
        except TransferFailed as error:
            del self._reads[self._num_reads]
            done.set_exception(error)
        return done

    def expect(self, notification: str) -> asyncio.Future[None]:
        """Return a future that ends when another agent has sent the notification, or with TransferFailed; when it is
        cancelled, the notification is no longer expected."""
        self._send(Expect(notification))
        arrival = self._expected[notification] = self._loop.create_future()
        arrival.add_done_callback(lambda future: self._forget(notification, future))
        return arrival

    def kill(self) -> None:
        """Terminate the process; `ended` is set soon."""
        self._process.kill()

    async def close(self) -> None:
        """Kill the process and wait for its end. Idempotent."""
        if not self._is_lost and not self.ended.is_set():
            self._lose("")
        if not await end_process(self._process, 0.0):
            logger.error("the NIXL mover process (pid %d) could not be killed", self.pid)

    def _reap(self) -> None:
        """Called when the process, with all its threads, has exited."""
        status = cast("int", self._wait())
        self._channel.close()
        if status not in (0, -signal.SIGKILL) and not self._is_refused:
            logger.error("the NIXL mover process (pid %d) has exited with status %d", self.pid, status)
        error = TransferFailed(f"the NIXL mover process has exited with status {status}")
        pending: list[asyncio.Future[Any]] = [self._started, *self._expected.values()]
        pending += [done for _, done in self._reads.values()]
        self._reads.clear()
        for future in pending:
            if not future.done():
                future.set_exception(error)
        if not self._started.cancelled():
            self._started.exception()  # marks it as retrieved

    def _send(self, message: ToMover) -> None:
        try:
            is_sent = self._channel.send(message)
        except ValueError as error:
            raise TransferFailed(str(error)) from error
        if not is_sent:
            raise TransferFailed("the NIXL mover process has exited")

    def _handle(self, report: FromMover, _descriptors: list[int]) -> None:
        match report:
            case Started():
                self._started.set_result(report)
            case ReadRefused(message):
                self._started.set_exception(NixlRefused(message))
                self._is_refused = True
                self._lose("")
            case ReadDone(read_id):
                self._reads.pop(read_id)[1].set_result(None)
            case ReadFailed(read_id, message):
                self._reads.pop(read_id)[1].set_exception(TransferFailed(message))
            case Notified(notification):
                if (arrival := self._expected.get(notification)) is not None and not arrival.done():
                    arrival.set_result(None)

    def _read_ended(self, done: asyncio.Future[None]) -> None:
        self._slots.release()
        done.exception()  # marks it as retrieved: the read may have been given up

    def _forget(self, notification: str, arrival: asyncio.Future[None]) -> None:
        self._expected.pop(notification, None)
        if not arrival.cancelled():
            arrival.exception()  # marks it as retrieved
        elif not self.ended.is_set():
            with contextlib.suppress(TransferFailed):
                self._send(Forget(notification))

    def _lose(self, reason: str) -> None:
        """Stop using the process: it has exited, or is made to."""
        self._is_lost = True
        self._channel.close()
        if reason:
            logger.error("NIXL mover process (pid %d): %s", self.pid, reason)
        self.kill()


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a mover process.

    UCX cannot detect the failure of a peer without tcp, and NIXL then refuses to start. Over tcp, a segment larger than
    the peer receives corrupts the peer's heap: we receive large ones, but send UCX's default, as not all peers are ours
    (Dynamo's). Sending 512k, too, would halve the time of a read.
    """
    variables = {"NIXL_LOG_LEVEL": "WARN", "UCX_TCP_RX_SEG_SIZE": "512k", **inherited}
    if "UCX_TLS" in variables:
        variables["UCX_TLS"] = with_tcp(variables["UCX_TLS"])
    return variables


def with_tcp(transports: str) -> str:
    """Return a value of UCX_TLS that includes tcp: a list of what is used, or, after ^, of what is not."""
    names = [name for name in transports.removeprefix("^").split(",") if name]
    if transports.startswith("^"):
        names = [name for name in names if name != "tcp"]
        return f"^{','.join(names)}" if names else "all"
    return ",".join(names) if {"all", "tcp"} & set(names) else ",".join([*names, "tcp"])
