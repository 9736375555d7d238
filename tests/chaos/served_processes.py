"""The processes of `medialane serve` by what they are, and what is left of those that were killed."""

import os
from collections.abc import Callable
from contextlib import suppress

from medialane_process import MedialaneProcess, kill
from process_tree import arenas_of, command_of, descendants, is_alive, parent_of, zombies
from small_dummies import with_small_dummies

from medialane.testing.tiny_model import TINY_MODEL_FLAGS
from waiting import eventually

SERVER_FLAGS = (
    *TINY_MODEL_FLAGS,
    with_small_dummies({"image": 8, "video": 1}),
    "--enable-mm-embeds",
    f"--kv-cache-memory-bytes={256 << 20}",
)
#: The arena has room for all media of the tests. Their origins are on the loopback interface.
FLAGS = ("--gateways", "2", "--preparers", "1", "--arena-size", "256MiB", "--allow-media-network", "127.0.0.0/8")
#: Long enough for a worker on a busy machine.
RESTART_S = 240
GONE_S = 30


class ServedProcesses:
    """Of one `serve`, by their kinds."""

    def __init__(self, serve: MedialaneProcess) -> None:
        self.serve = serve
        self._kinds: dict[str, Callable[[], list[int]]] = {
            "warm": lambda: self._children("medialane warm"),
            "gateway": lambda: self._children("medialane gateway"),
            "store": lambda: self._children("medialane store"),
            "preparer": serve.preparer_pids,
            "fork server": lambda: sorted(set(map(parent_of, serve.preparer_pids()))),
            "worker": lambda: self._children("medialane worker"),
            "engine": lambda: [pid for pid in descendants(serve.pid) if "EngineCore" in command_of(pid)],
        }

    def of(self, kind: str) -> list[int]:
        """The processes of this kind that are alive."""
        return [pid for pid in self._kinds[kind]() if is_alive(pid)]

    def all(self) -> list[int]:
        """All but `serve` itself."""
        return sorted({*descendants(self.serve.pid), *self.of("fork server"), *self.of("preparer")})

    async def kill(self, pids: list[int]) -> None:
        """kill -9, and wait until they are gone."""
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended with one of the others
                kill(pid)
        await eventually(lambda: not any(map(is_alive, pids)), "they are gone", GONE_S)

    def numbers(self) -> dict[str, int]:
        """How many there are of each kind, and of zombies."""
        with suppress(ValueError):  # there is no store, or two of them
            return {kind: len(self.of(kind)) for kind in self._kinds} | {"zombie": len(zombies(self.serve.pid))}
        return {}

    async def are(self, numbers: dict[str, int]) -> None:
        """Wait until there are these numbers of processes."""
        await eventually(lambda: self.numbers() == numbers, f"{numbers}", RESTART_S, more=self.numbers)

    def has_another_store(self, than: list[int]) -> bool:
        """Whether there is a store that has mapped an arena."""
        return any(arenas_of(pid) for pid in self.of("store") if pid not in than)

    async def can_fork(self) -> None:
        """Wait until the warm process that was started last is ready."""
        starts, ready = "warm process: starting", "warm process: ready"
        log = self.serve.log
        await eventually(lambda: log.read_text().rfind(starts) < log.read_text().rfind(ready), "it can fork", RESTART_S)

    def num_from_scratch(self) -> int:
        """How many processes were not forked, by the log."""
        return self.serve.log.read_text().count("is started from scratch")

    def num_descriptors(self) -> dict[int, int]:
        """By process, of `serve` itself and of what accepts connections."""
        pids = [self.serve.pid, *(pid for kind in ("store", "gateway", "worker") for pid in self.of(kind))]
        return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}

    def tail(self) -> str:
        """How many processes there are, and the end of the log."""
        return f"{self.numbers()}\n{self.serve.tail()}"

    def _children(self, command: str) -> list[int]:
        mine = [pid for pid in descendants(self.serve.pid) if parent_of(pid) == self.serve.pid]
        return [pid for pid in mine if command in command_of(pid)]
