"""The supervisor's side of the warm process: asks it to fork the processes of this host.

Importing vLLM takes ten seconds of CPU time and 700 MB of memory. The warm process (`cli/warm.py`) does that once,
and reads the model; gateways, workers and the store are its forks: there in milliseconds, sharing those pages. A fork
becomes a child of the supervisor (`core.process.subreaper`), and is supervised like a process that was started.

Each request is a connection of its own to the warm process's unix socket, in a folder that only this user may enter. So
nothing has to be matched, and a request that is given up ends with its connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from medialane.config import changed_imports
from medialane.wire.child_channel import receive, send

#: Below the kernel's send buffer (`child_channel.send`).
MAX_REQUEST_BYTES = 200_000
#: `Start`, output, and those of `ProcessSpec.pass_fds`.
MAX_DESCRIPTORS = 8


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Fork `medialane COMMAND ...`. The descriptors of the message: one from which only the fork reads its command line
    and whole environment (`Start`), whose secrets must not be in the memory of the warm process, and so of every other
    fork; one that becomes the standard output and error; others, which get the numbers `pass_fds`. `needs_model`: after
    the model was read."""

    command: str
    pass_fds: list[int]
    needs_model: bool


class Start(msgspec.Struct, frozen=True, array_like=True):
    """What a fork becomes: `medialane ARGV...` with the whole environment `environ`."""

    argv: list[str]
    environ: dict[str, str]


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process id of the fork, which is a child of the supervisor."""

    pid: int


class ForkFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    message: str


Answer = Forked | ForkFailed

_FORK = msgspec.msgpack.Decoder(Fork)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class NotForked(Exception):
    """The process has to be started from scratch."""


class WarmProcessGone(NotForked):
    """There is no warm process at the moment."""


@dataclass(frozen=True)
class WarmProcess:
    """Where the warm process listens, and the environment with which it has imported everything. `name` is that of its
    specification, if it is supervised here."""

    path: Path
    environ: Mapping[str, str] = field(repr=False)
    name: str = ""

    async def fork(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Sequence[int],
        *,
        needs_model: bool,
        timeout_s: float,
    ) -> int:
        """Have `medialane ARGV...` forked and return its process id. `descriptors` are that of its output, and those
        that it inherits. Raises NotForked."""
        if changed := changed_imports(environ, self.environ):
            raise NotForked(f"{', '.join(changed)} may change what is imported")
        request = Fork(argv[0], list(descriptors[1:]), needs_model)
        try:
            with _written(Start(list(argv), dict(environ))) as start:
                async with asyncio.timeout(timeout_s):
                    return await self._request(request, [start, *descriptors])
        except TimeoutError:
            raise NotForked(f"the warm process has not answered within {timeout_s:g} s") from None
        except OSError as error:
            raise WarmProcessGone(f"the warm process cannot be asked: {error}") from error
        except ValueError as error:
            raise NotForked(f"the warm process cannot be asked: {error}") from error

    async def _request(self, request: Fork, descriptors: Sequence[int]) -> int:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, str(self.path))
            send(sock, request, descriptors, max_bytes=MAX_REQUEST_BYTES)
            packet = await loop.sock_recv(sock, MAX_REQUEST_BYTES)
        if not packet:
            raise WarmProcessGone("the warm process has exited")
        answer = _ANSWER.decode(packet)
        if isinstance(answer, ForkFailed):
            raise NotForked(answer.message)
        return answer.pid


@contextmanager
def _written(start: Start) -> Iterator[int]:
    """Yield a descriptor of memory that has it. Raises OSError."""
    with open(os.memfd_create("start"), "w+b", buffering=0) as memory:
        memory.write(msgspec.msgpack.encode(start))
        yield memory.fileno()


def read_start(descriptor: int) -> Start:
    """Return command line and environment of a request, for the fork only. Closes the descriptor. Raises ValueError,
    OSError."""
    with open(descriptor, "rb") as memory:
        memory.seek(0)
        return msgspec.msgpack.decode(memory.read(), type=Start)


def receive_fork(sock: socket.socket) -> tuple[Fork | None, list[int]]:
    """Return a request and its descriptors; None if it was given up. Raises ValueError, OSError."""
    return receive(sock, _FORK.decode, max_bytes=MAX_REQUEST_BYTES, max_descriptors=MAX_DESCRIPTORS)


def answer_fork(sock: socket.socket, answer: Answer) -> None:
    """Raises OSError if the request was given up."""
    send(sock, answer, max_bytes=MAX_REQUEST_BYTES)
