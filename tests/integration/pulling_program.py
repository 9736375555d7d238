"""A store's arena and its pulls in a process of their own: `python pulling_program.py DIRECTORY [HOST NUM_BYTES]`.

With a host it is a source: it listens there, stores one entry, and writes it as JSON. For each line of JSON with an
entry it copies that and writes the hash of the bytes, or why it failed.
"""

import asyncio
import hashlib
import os
import sys

import msgspec
import uvloop

from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig, layout
from medialane.transfer import Pulls
from medialane.types.errors import MedialaneError
from medialane.types.feature import Feature, RemoteEntry
from medialane.types.media import MediaSize
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.wire import RpcConfig

SECRET = "a secret for tests in namespaces"
PULL_S = 3.0


class Pulled(msgspec.Struct):
    sha256: str = ""
    error: str = ""


class Stored(msgspec.Struct):
    entry: RemoteEntry
    sha256: str


def _hash(arena: Arena, pin) -> str:
    return hashlib.sha256(arena.view.entry(pin.range)[ENTRY_HEADER_BYTES:]).hexdigest()


async def main(directory: str, host: str | None = None, num_bytes: str = "0") -> None:
    arena = Arena.create(ArenaConfig(size_bytes=64 << 20, directory=directory))
    pulls = Pulls(arena, RpcConfig(shared_secret=SECRET, insecure=True), max_pull_s=lambda _: PULL_S)
    pin = None
    if host is not None:
        await pulls.serve(f"tcp://{host}:0")
        pin = _store(arena, int(num_bytes))
        _say(Stored(pulls.grant([pin.range])[0], _hash(arena, pin)))
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        _say(await _pull(pulls, arena, msgspec.json.decode(line, type=RemoteEntry)))
    if pin is not None:
        pin.release()
    await pulls.close()
    arena.close()


async def _pull(pulls: Pulls, arena: Arena, entry: RemoteEntry) -> Pulled:
    try:
        (pin,) = await pulls.pull([entry])
    except MedialaneError as error:
        return Pulled(error=error.message)
    with pin:
        found = Pulled(_hash(arena, pin))
    arena.evict(entry.key)
    return found


def _store(arena: Arena, num_bytes: int):
    spec = TensorSpec("uint8", (num_bytes,))
    (offset,), size = layout((spec,))
    reservation = arena.reserve(size)
    reservation.buffer[:] = os.urandom(size)
    tensors = (TensorDescriptor(spec, reservation.range, offset),)
    return arena.publish(reservation, "key", Feature("image", "key", b"", tensors, MediaSize()))


def _say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
