"""The registration of a connection: one side sends a hello, the other a welcome or the reason to refuse it.

A hello is an array that begins with its kind and the number of its protocol, in every release: whatever else has
changed, the other side can say which numbers differ (docs/reference/stability.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Generic, TypeVar

import msgspec

from medialane import __version__
from medialane.types.errors import MedialaneError, ProtocolViolation, StartupFailed
from medialane.wire.connection import Connection

W = TypeVar("W", bound=msgspec.Struct)


class Registration(Generic[W]):
    """The side that sends the hello. `closed` and `too_late` are the errors if registering is cancelled, or if no
    welcome arrives in time."""

    def __init__(self, connection: Connection, *, closed: MedialaneError, too_late: MedialaneError) -> None:
        self._connection = connection
        self._closed, self._too_late = closed, too_late
        self._welcome: asyncio.Future[W] = asyncio.get_running_loop().create_future()

    async def run(self, hello: msgspec.Struct, *, timeout_s: float, connecting: Awaitable[None] | None = None) -> W:
        """Send `hello`, after `connecting`, and return the welcome. Raises what `connecting` raises, and the error with
        which the connection was lost. Cancellation and errors leave no connection behind."""
        try:
            async with asyncio.timeout(timeout_s):
                if connecting is not None:
                    await connecting
                self._connection.send(hello)
                return await self._welcome
        except BaseException as error:  # includes cancellation
            self._welcome.cancel()
            self._connection.end(self._closed)
            if isinstance(error, TimeoutError):
                raise self._too_late from None
            raise

    def welcome(self, message: W) -> None:
        """The peer has registered us. Raises ProtocolViolation for a second welcome."""
        if self._welcome.done():
            raise ProtocolViolation(f"a second {type(message).__name__}")
        self._connection.accept_large_frames()
        self._welcome.set_result(message)
        self._connection.start_heartbeat()

    def lost(self, error: MedialaneError) -> None:
        """The connection was lost, or we were refused."""
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()  # a peer that has connected may be lost before anything waits for this


class Beginning(msgspec.Struct, array_like=True):
    """Of a hello. Further elements are not looked at."""

    kind: str
    version: int


_BEGINNING = msgspec.msgpack.Decoder(Beginning)


def other_version(frame: memoryview, kind: str, ours: int) -> int | None:
    """Return the number of another release's protocol if `frame` is its hello, which ours need not be able to read."""
    try:
        beginning = _BEGINNING.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return beginning.version if beginning.kind == kind and beginning.version != ours else None


def check_version(theirs: int, ours: int, names: tuple[str, str]) -> None:
    """Raise StartupFailed unless the versions of the protocol are equal; `names` are what the peer and we are."""
    if theirs != ours:
        raise StartupFailed(
            f"the {names[0]} speaks protocol {theirs}, the {names[1]} {ours} (medialane {__version__}):"
            " install the same release on both"
        )
