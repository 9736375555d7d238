"""A real arena with encoded media in it; a test that leaves a pin or a reservation fails. And ways to interfere with
a pool: what its preparers get, how they are forked, and whether they write the arena themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
from preparer_pools import png, put

from builders import checked_arena
from medialane.arena import Arena, Cached, Pin, Reservation
from medialane.prepare import forkserver_process
from medialane.prepare.forkserver_process import ForkserverProcess, PreparerLost, PreparerProcess
from medialane.types.media import EncodedMedia


class InterferedArena(Arena):
    """Calls each of `reserving` once, from the last to the first, with what reserves the next range; and raises
    `publish_errors` when entries are to be published."""

    def __init__(self, *file: object, **settings: object) -> None:
        super().__init__(*file, **settings)
        self.reserving: list[Callable[[Callable[[], Reservation]], Reservation]] = []
        self.publish_errors: list[Exception] = []

    def reserve(self, *size: object, **settings: object) -> Reservation:
        reserve = partial(super().reserve, *size, **settings)
        return self.reserving.pop()(reserve) if self.reserving else reserve()

    def publish(self, reservation: Reservation, key: str, value: Cached) -> Pin[Cached]:
        if self.publish_errors:
            raise self.publish_errors.pop()
        return super().publish(reservation, key, value)


@pytest.fixture
def arena() -> Iterator[InterferedArena]:
    with checked_arena(32 << 20, arena_type=InterferedArena) as arena:
        yield arena


@pytest.fixture
def encoded(arena: Arena) -> Iterator[Pin[EncodedMedia]]:
    with put(arena, png()) as pin:
        yield pin


@pytest.fixture
def before_sending(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[PreparerProcess, object], Awaitable[None]]]:
    """Called in turn with each message that is about to be sent to a preparer."""
    calls: list[Callable[[PreparerProcess, object], Awaitable[None]]] = []
    send = PreparerProcess.send

    async def watched(preparer: PreparerProcess, request: object) -> None:
        for call in calls:
            await call(preparer, request)
        await send(preparer, request)

    monkeypatch.setattr(PreparerProcess, "send", watched)
    return calls


@pytest.fixture
def reported_addresses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., tuple[int, ...]]], None]:
    """Have preparers report other addresses of their tensors: those that a function of theirs, and of the buffers into
    which they are read, returns."""
    read = PreparerProcess.read

    def replace(forge: Callable[..., tuple[int, ...]]) -> None:
        monkeypatch.setattr(
            PreparerProcess, "read", lambda preparer, addresses, into: read(preparer, forge(addresses, into), into)
        )

    return replace


@pytest.fixture
def fork_errors(monkeypatch: pytest.MonkeyPatch) -> list[str | Exception]:
    """Why further forks of preparers fail, from the last to the first: a reason, or a bug."""
    errors: list[str | Exception] = []
    fork = ForkserverProcess.fork

    async def failing(forkserver: ForkserverProcess, on_exit: Callable[[], None]) -> PreparerProcess:
        if errors:
            error = errors.pop()
            raise PreparerLost(error) if isinstance(error, str) else error
        return await fork(forkserver, on_exit)

    monkeypatch.setattr(ForkserverProcess, "fork", failing)
    return errors


@pytest.fixture
def _preparers_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel does not let a process read another's memory."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(forkserver_process, "read_into", refuse)
