"""Overwrites what an arena frees, so that a process that reads a range without a hold gets a wrong answer.

`install` is for programs that run a store, `poison_freed` for stores in the process of a test.
"""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from medialane.arena import ENTRY_HEADER_BYTES, Arena
from medialane.cluster import INTERPRETER
from medialane.types.tensor import ArenaRange

POISON = b"\xdb"

#: Written at once: tests measure the heap.
_PIECE = POISON * 65536

#: The command `medialane` with a poisoned store. Its folder has this name because tests find processes by it.
PROGRAM = Path(__file__).parent / "e2e" / "poisoned" / "medialane"

_clear = Arena._clear
_created, _opened = Arena.create, Arena.open


def _clear_and_overwrite(self: Arena, entry: ArenaRange) -> None:
    _clear(self, entry)
    if not self._closed:
        payload = self.view.memory[entry.offset + ENTRY_HEADER_BYTES : entry.offset + entry.nbytes]
        for start in range(0, len(payload), len(_PIECE)):
            piece = payload[start : start + len(_PIECE)]
            piece[:] = _PIECE[: len(piece)]


def _evictable(make: Callable[..., Arena]) -> Callable[..., Arena]:
    def made(*arguments: object, **settings: object) -> Arena:
        arena = make(*arguments, **settings)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, arena.clear)
        return arena

    return made


def install() -> None:
    """Poison the arenas of this process, which evicts every entry that is not held when it gets SIGUSR1."""
    Arena._clear = _clear_and_overwrite
    Arena.create, Arena.open = _evictable(_created), _evictable(_opened)


def poisoned_store(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line of a process of `serve`, by PROGRAM if it is the store, or what that is forked from. As
    many words as INTERPRETER has come before the command."""
    command = argv[len(INTERPRETER) :]
    return (argv[0], "-P", "-u", str(PROGRAM), *command) if command[0] in ("warm", "store") else argv


def poison_freed(monkeypatch) -> None:
    """Poison the arenas that this process creates during a test."""
    monkeypatch.setattr(Arena, "_clear", _clear_and_overwrite)
