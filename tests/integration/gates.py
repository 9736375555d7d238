"""Gates at which the processes of a test stop: a test closes one, waits until they have arrived, and opens it.

Preparers may open no files: they inherit these from the fork server.
"""

import mmap
import os
import signal
import time
from pathlib import Path

import msgspec

from medialane.prepare import FactoryConfig, ProcessedItem
from medialane.testing.fake_processor import FakeProcessor
from medialane.types.media import Decoded
from waiting import eventually, wait_until

#: Steps of a request. A URL is fetched, a body is written into the arena by the gateway.
STEPS = ("before find", "fetch", "upload", "prepare", "before first token", "write embedding", "mid-stream")

#: Steps in which a worker has the request.
WORKER_STEPS = STEPS[-3:]

#: Between two hosts: the destination has asked for the bytes, and receives none.
PULL = "pull"
GATES = (*STEPS, PULL)

OPENS_S = 60.0


class Gates:
    """In the memory of `folder`/gates, for all processes; they append the gate and their id to `folder`/arrived."""

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / "gates", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, len(GATES))
        self._closed = mmap.mmap(descriptor, len(GATES))
        os.close(descriptor)
        self._arrived = os.open(folder / "arrived", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def close(self, step: str) -> None:
        os.ftruncate(self._arrived, 0)
        self._closed[GATES.index(step)] = 1

    def open(self, step: str) -> None:
        self._closed[GATES.index(step)] = 0

    def arrived(self) -> list[int]:
        """The process of each arrival since a gate was last closed."""
        return [int(line) for line in os.pread(self._arrived, 1 << 16, 0).splitlines()]

    async def passed(self, step: str) -> None:
        if self._arrives(step):
            await eventually(lambda: not self._is_closed(step), f"the gate {step!r} opens", OPENS_S)

    def wait(self, step: str) -> None:
        """`passed`, for a process without an event loop."""
        if self._arrives(step):
            wait_until(lambda: not self._is_closed(step), f"the gate {step!r} opens", OPENS_S)

    def _arrives(self, step: str) -> bool:
        if self._is_closed(step):
            os.write(self._arrived, b"%d\n" % os.getpid())
            return True
        return False

    def _is_closed(self, step: str) -> bool:
        return bool(self._closed[GATES.index(step)])


class GatedProcessor(FakeProcessor):
    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        self._gates.wait("prepare")
        return super().process(media, options)


def build_processor(config: bytes) -> GatedProcessor:
    """A factory for the fork server, of a store whose model is the folder of the gates."""
    signal.signal(signal.SIGRTMIN, lambda *_: time.sleep(3600))  # time: as in the other processes of the host
    return GatedProcessor(Gates(Path(msgspec.json.decode(config, type=FactoryConfig).model)))
