"""The supervisor's side of the warm process: asks it to fork the processes of this host.

Importing vLLM takes ten seconds of CPU time and 700 MB of memory. The warm process (`cli/warm.py`) does that once,
and reads the model; gateways, workers and the store are its forks: there in milliseconds, sharing those pages. A fork
becomes a child of the supervisor (`runtime.linux.fork_child_of`), and is supervised like a process that was started.

Each request is a connection of its own to the warm process's unix socket, in a folder that only this user may enter. So
nothing has to be matched, and a request that is given up ends with its connection:

    supervisor                    warm process
    ForkRequest + descriptors --> forks, and closes its end: the rest is between the supervisor and the fork
          <---------------------- the fork's process id, when it is a child of the supervisor
    ForkStart ------------------> becomes what it is to be; without it, it exits

What cannot be forked now is not waited for: it is started from scratch.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from medialane.config import changed_imports
from medialane.wire.child_channel import receive, send

#: Below the kernel's send buffer (`child_channel.send`).
_MAX_BYTES = 200_000
#: Output, and `ProcessSpec.pass_fds`.
_MAX_DESCRIPTORS = 7
_MAX_PID_BYTES = 20


class ForkRequest(msgspec.Struct, frozen=True):
    """Fork a process for `medialane COMMAND ...`. The first descriptor of the message becomes its output."""

    command: str


class ForkStart(msgspec.Struct, frozen=True):
    """What a fork becomes: `medialane ARGV...` with the whole environment `environ`; the descriptors after the first
    get the numbers `pass_fds`. Only the fork receives it: its secrets must not be in the memory of the warm process,
    and so of every other fork."""

    argv: list[str]
    environ: dict[str, str]
    pass_fds: list[int]


class NotForked(Exception):
    """The process has to be started from scratch."""


class WarmProcessGone(NotForked):
    """Nothing listens, or no longer: the warm process has exited, or imports."""


@dataclass(frozen=True)
class WarmProcess:
    """Where the warm process listens, and the environment with which it has imported everything."""

    path: Path
    environ: Mapping[str, str] = field(repr=False)

    async def fork(
        self, argv: Sequence[str], environ: Mapping[str, str], output: int, pass_fds: Sequence[int], *, timeout_s: float
    ) -> int:
        """Have `medialane ARGV...` forked and return its process id. Raises NotForked."""
        if changed := changed_imports(environ, self.environ):
            raise NotForked(f"{', '.join(changed)} may change what is imported")
        loop, start = asyncio.get_running_loop(), ForkStart(list(argv), dict(environ), list(pass_fds))
        try:
            async with asyncio.timeout(timeout_s):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.setblocking(False)
                    await loop.sock_connect(sock, str(self.path))
                    send(sock, ForkRequest(argv[0]), [output, *pass_fds], max_bytes=_MAX_BYTES)
                    if not (pid := await loop.sock_recv(sock, _MAX_PID_BYTES)):
                        raise NotForked("the warm process has exited, or cannot fork (see its log)")
                    send(sock, start, max_bytes=_MAX_BYTES)
                    return int(pid)
        except TimeoutError:
            raise NotForked(f"the warm process has not answered within {timeout_s:g} s") from None
        except (ConnectionError, FileNotFoundError) as error:  # reset: it has exited before it has read the request
            raise WarmProcessGone(f"the warm process cannot be asked: {error}") from error
        except (OSError, ValueError) as error:
            raise NotForked(f"the warm process cannot be asked: {error}") from error


def receive_fork(sock: socket.socket) -> tuple[ForkRequest | None, list[int]]:
    """Return a request and its descriptors; None if it was given up. Raises ValueError, OSError."""
    decode = msgspec.msgpack.Decoder(ForkRequest).decode
    return receive(sock, decode, max_bytes=_MAX_BYTES, max_descriptors=_MAX_DESCRIPTORS)


def receive_start(sock: socket.socket) -> ForkStart | None:
    """Report this process, a fork, to the supervisor, and return what it becomes; None if the request was given up.
    Raises ValueError, OSError."""
    with suppress(BrokenPipeError):  # read below
        sock.send(str(os.getpid()).encode())
    return receive(sock, msgspec.msgpack.Decoder(ForkStart).decode, max_bytes=_MAX_BYTES)[0]
