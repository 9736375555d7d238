"""A process that decodes its input within the memory of a small image, and reports the result."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from targets import DECODE_BYTES, DECODE_S, DECODE_TARGETS

from medialane.types.errors import MedialaneError


class DecodingProcess:
    """Decodes one input after another; restarted after a crash."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, data: bytes) -> str | None:
        """Return the fault in decoding `data`, or None."""
        if self._process is None:
            self._start()
        self._pipe.send_bytes(data)
        if not self._pipe.poll(DECODE_S):
            self.stop()
            return f"not decoded in {DECODE_S:g} s"
        try:
            return self._pipe.recv_bytes().decode() or None
        except EOFError:
            self._process.join(10)
            code = self._process.exitcode
            self.stop()
            return f"the process ended with {code}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_decode_all, args=(theirs, self._target))
        self._process.start()
        theirs.close()
        assert self._pipe.poll(60)
        self._pipe.recv_bytes()  # it is there


@contextmanager
def decoding_process(target: str) -> Iterator[DecodingProcess]:
    """For the decode target of this name."""
    process = DecodingProcess(target)
    try:
        yield process
    finally:
        process.stop()


def _decode_all(pipe: Connection, target: str) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + DECODE_BYTES, taken + DECODE_BYTES))
    pipe.send_bytes(b"ready")
    while True:
        try:
            data = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_verdict(target, data).encode())


def _verdict(target: str, data: bytes) -> str:
    try:
        DECODE_TARGETS[target].run(data)
    except MedialaneError:
        return ""
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what this process looks for
        return repr(error)
    return ""
