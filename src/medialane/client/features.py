"""The features of a host as tensors over its arena, for as long as a `with` block.

Theory of operation. The block holds the entries at the store, as a worker does while its engine reads them, so nothing
evicts or overwrites them. The tensors are views of a mapping without write permission. At the end of the block the
memory may be reused, so the tensors that were handed out are made empty, and the mapping raises; what was sliced from
them before that would show whatever is written there next.

Programs are synchronous; the link to the store has an event loop in a thread of its own. It must run while entries are
held: it answers the store's heartbeats, and connects again to the next store if one is lost, which learns from it what
is held.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from medialane.arena import ArenaConfig
from medialane.runtime.tasks import gather_or_cancel
from medialane.store.client import StoreLink
from medialane.store.messages import FindFeature, ItemFound
from medialane.types.errors import (
    HandoverFailed,
    InvalidRequest,
    MedialaneError,
    NoWorkerReady,
    StoreUnavailable,
    UnknownMedia,
    WorkerLost,
)
from medialane.types.feature import Feature
from medialane.types.tensor import TensorDescriptor
from medialane.wire.config import RpcConfig

T = TypeVar("T")

#: The fields of an item by name: a tensor, a plain value, or a list of these where the processor nests them.
ItemTensors = Mapping[str, Any]

#: The default of --arena-directory.
_ARENA_DIRECTORY = ArenaConfig().directory

#: For what takes no longer than some messages.
_END_S = 10.0

_HASH = re.compile(r"(?:medialane:feature/)?([0-9a-f]{64})")


class FeaturesReleased(RuntimeError):
    """The `with` block has ended."""


class Features(Mapping[str, ItemTensors]):
    """Tensors by hash and by the field's name, in the order of the hashes; yielded by `features`. `empty` makes each
    of its tensors empty."""

    def __init__(self, by_hash: Mapping[str, ItemTensors], empty: Sequence[Callable[[], object]]) -> None:
        self._by_hash: Mapping[str, ItemTensors] | None = by_hash
        self._empty = empty

    def __getitem__(self, name: str) -> ItemTensors:
        """Return the fields of a feature, named by its hash or reference. Raises KeyError, FeaturesReleased."""
        matched = _HASH.fullmatch(name)
        return self._held[matched[1] if matched else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return "Features(released)" if self._by_hash is None else f"Features({', '.join(self._by_hash)})"

    @property
    def _held(self) -> Mapping[str, ItemTensors]:
        if self._by_hash is None:
            raise FeaturesReleased(
                "the features were released at the end of the `with` block: copy what is needed later"
            )
        return self._by_hash

    def release(self) -> None:
        """Called at the end of the block. Idempotent."""
        self._by_hash = None
        for empty in self._empty:
            empty()
        self._empty = ()


@contextmanager
def features(
    hashes: Sequence[str], *, store: str, arena_directory: str = _ARENA_DIRECTORY, timeout_s: float = 60.0
) -> Iterator[Features]:
    """Hold features of this host, and yield their tensors, until the end of the block.

    `hashes` are from `mm_hashes` in medialane's answers, or references to features. `store` is the address of the
    store's unix socket. This process must be of the user who runs the store, and share its `arena_directory`, which in
    a container means a common IPC namespace or volume. A feature that was evicted is made again, within `timeout_s`.

    The tensors are read-only, although torch has no such notion: writing to one ends the process with SIGSEGV. A
    process that is forked within the block may read them until the block ends in this one.

    Raises StoreUnavailable if the store cannot be reached, does not answer in time, or has another arena than this
    process sees; UnknownMedia for a hash that it does not know; InvalidRequest for what is none.
    """
    names = [_hash(name) for name in hashes]
    with StoreThread(store, arena_directory, timeout_s) as connection:
        found = connection.hold(list(dict.fromkeys(names)))
        from medialane.client.tensors import fields_of

        empty: list[Callable[[], object]] = []
        held = Features({name: fields_of(found[name], connection.tensor, empty) for name in names}, empty)
        try:
            yield held
        finally:
            held.release()


def _hash(name: str) -> str:
    matched = _HASH.fullmatch(name)
    if matched is None:
        raise InvalidRequest(f"{name[:100]!r} is no hash of a feature: it has 64 hex digits")
    return matched[1]


class StoreThread:
    """A context manager: connected, and mapping the arena, within its block. Its holds end with it."""

    def __init__(self, address: str, arena_directory: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._address = address
        self._link = StoreLink(address, rpc=RpcConfig(), arena_directory=arena_directory, wait_timeout_s=timeout_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="medialane client", daemon=True)
        self._running: asyncio.Task[None] | None = None
        self._holds: list[tuple[int, str]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait(self._start())
        except BaseException:  # KeyboardInterrupt included: the thread must not be left behind
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def hold(self, hashes: Sequence[str]) -> dict[str, Feature]:
        """Find features and hold them until the end. Raises UnknownMedia naming the hash, StoreUnavailable."""
        return self._wait(self._hold_all(hashes))

    def tensor(self, descriptor: TensorDescriptor) -> memoryview:
        """Return the bytes of a tensor that is held, read-only."""
        return self._link.tensor(descriptor)

    async def _start(self) -> None:
        try:
            await self._link.connect()
        except MedialaneError as error:
            raise _unreachable(self._address, error) from error
        self._running = self._loop.create_task(self._link.run(), name="the connection to the media store")

    async def _hold_all(self, hashes: Sequence[str]) -> dict[str, Feature]:
        return dict(zip(hashes, await gather_or_cancel([self._hold(name) for name in hashes]), strict=True))

    async def _hold(self, mm_hash: str) -> Feature:
        try:
            found = await self._link.call(lambda call_id: FindFeature(call_id, mm_hash))
        except UnknownMedia as error:
            raise UnknownMedia(f"the media store does not know the feature {mm_hash}, or not any more") from error
        if not isinstance(found, ItemFound) or found.feature is None:
            raise StoreUnavailable("the media store has answered something else than a feature")
        self._holds.append((found.hold_id, found.range.arena))
        return found.feature

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop until it is done, at most `timeout_s`."""

        async def in_time() -> T:
            async with asyncio.timeout(self._timeout_s):
                return await work

        running: Future[T] = asyncio.run_coroutine_threadsafe(in_time(), self._loop)
        try:
            return running.result()
        except TimeoutError as error:
            raise StoreUnavailable(f"the media store did not answer within {self._timeout_s:g} s") from error
        except BaseException:  # KeyboardInterrupt, say
            running.cancel()
            raise

    def _end(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            ending.result(_END_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close(self) -> None:
        for hold_id, arena in self._holds:
            self._link.release(hold_id, arena)
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])


def _unreachable(address: str, error: MedialaneError) -> StoreUnavailable:
    """Return an error that says what to do."""
    match error:
        case NoWorkerReady():
            advice = "is medialane running on this host, and is the socket's folder visible here?"
        case WorkerLost():
            advice = "only the user who runs the store may open its socket"
        case HandoverFailed():
            advice = (
                "this process must share the store's /dev/shm (the container's IPC namespace, or a volume) and user; "
                "elsewhere, get features by HTTP"
            )
        case _:
            advice = ""
    return StoreUnavailable(f"{address}: {error.message}{f': {advice}' if advice else ''}")
