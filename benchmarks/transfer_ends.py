"""The two stores of `bench_transfer.py`, each in a process: `python transfer_ends.py source HOST`, and `destination`.

They write one line of JSON when they are ready, and read one line for each thing to do. The raw baseline has a
connection of its own between the same two processes and arenas: sendfile from the arena's file, recv_into the reserved
range, in blocking threads, with a request of 16 bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

import msgspec
import uvloop

from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig, Pin, layout
from medialane.transfer import Pulls, peer_server
from medialane.transfer.nixl import NixlMover
from medialane.types.feature import Feature, RemoteEntry
from medialane.types.media import MediaSize
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.wire import RpcConfig

ARENA_BYTES = 512 << 20
MODES = ("raw", "tcp", "nixl")
_REQUEST = struct.Struct("<QQ")


class Source(msgspec.Struct):
    """`pids` are of the store and of its NIXL mover process."""

    pids: list[int]
    raw: tuple[str, int]
    entries: list[RemoteEntry]


class Task(msgspec.Struct):
    """Copy an entry `num_rounds` times by each of `modes`, alternating."""

    entry: RemoteEntry
    num_rounds: int
    modes: tuple[str, ...] = MODES


class Copied(msgspec.Struct):
    """Wall and CPU times in seconds by mode, one per round; whether a second pull of the host was served by the first,
    and the bytes equalled the source's."""

    wall_s: dict[str, list[float]]
    destination_cpu_s: dict[str, float]
    source_cpu_s: dict[str, float]
    num_second_pulls: int


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, all threads: clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def _all_cpu_s(pids: list[int]) -> float:
    return sum(map(cpu_s, pids))


def _arena() -> Arena:
    arena = Arena.create(ArenaConfig(size_bytes=ARENA_BYTES))
    arena.prefault(threading.Event())
    return arena


def _store(arena: Arena, num_bytes: int) -> Pin[Feature]:
    spec = TensorSpec("uint8", (num_bytes,))
    (offset,), size = layout((spec,))
    reservation = arena.reserve(size)
    reservation.buffer[:] = os.urandom(4096) * (size // 4096) + bytes(size % 4096)
    tensors = (TensorDescriptor(spec, reservation.range, offset),)
    return arena.publish(reservation, f"{num_bytes}", Feature("image", "hash", b"", tensors, MediaSize()))


def _stores(arena: Arena, rpc: RpcConfig) -> tuple[Pulls, NixlMover]:
    nixl = NixlMover(
        arena.id, str(arena.path.parent), slot=arena.slot, max_given_up_bytes=ARENA_BYTES, environ=os.environ
    )
    return Pulls(arena, rpc, nixl, prefers_mover=False), nixl


async def source(host: str, rpc: RpcConfig, sizes: list[int]) -> None:
    """Serve until standard input ends."""
    peer_server.CAPABILITY_LIFETIME_S = 3600.0
    arena = _arena()
    pulls, nixl = _stores(arena, rpc)
    await nixl.offer(wait=True)
    pins = [_store(arena, num_bytes) for num_bytes in sizes]
    await pulls.serve(f"tcp://{host}:0")
    raw = socket.create_server((host, 0))
    threading.Thread(target=_serve_raw, args=(raw, arena), daemon=True).start()
    pids = [os.getpid(), *filter(None, [nixl.pid])]
    _say(Source(pids, raw.getsockname()[:2], pulls.grant([pin.range for pin in pins])))
    await asyncio.to_thread(sys.stdin.buffer.readline)
    for pin in pins:
        pin.release()
    await pulls.close()
    arena.close()


def _serve_raw(listener: socket.socket, arena: Arena) -> None:
    file = os.open(arena.path, os.O_RDONLY)
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            while request := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
                offset, left = _REQUEST.unpack(request)
                while left:
                    sent = os.sendfile(sock.fileno(), file, offset, left)
                    offset, left = offset + sent, left - sent


async def destination(rpc: RpcConfig) -> None:
    """Do the tasks of standard input, after a line with the `Source`."""
    arena = _arena()
    pulls, nixl = _stores(arena, rpc)
    await nixl.offer(wait=True)
    _say(None)
    at_source = msgspec.json.decode(await asyncio.to_thread(sys.stdin.buffer.readline), type=Source)
    raw = socket.create_connection(at_source.raw)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        task = msgspec.json.decode(line, type=Task)
        mine = [os.getpid(), *filter(None, [nixl.pid])]
        _say(await _copy(task, at_source, raw=raw, arena=arena, pulls=pulls, pids=mine))
    raw.close()
    await pulls.close()
    arena.close()


async def _copy(
    task: Task, at_source: Source, *, raw: socket.socket, arena: Arena, pulls: Pulls, pids: list[int]
) -> Copied:
    entry, modes = task.entry, task.modes
    result = Copied({m: [] for m in modes}, dict.fromkeys(modes, 0.0), dict.fromkeys(modes, 0.0), 0)
    for number in range(task.num_rounds + 1):
        for mode in modes if number % 2 else modes[::-1]:
            before = (time.perf_counter(), _all_cpu_s(pids), _all_cpu_s(at_source.pids))
            if mode == "raw":
                _copy_raw(entry, raw, arena)
            else:
                (await pulls.pull([msgspec.structs.replace(entry, mover=mode)]))[0].release()
            after = (time.perf_counter(), _all_cpu_s(pids), _all_cpu_s(at_source.pids))
            if number:  # the first one connects
                result.wall_s[mode].append(after[0] - before[0])
                result.destination_cpu_s[mode] += after[1] - before[1]
                result.source_cpu_s[mode] += after[2] - before[2]
            if mode != "raw":
                pulled = sum(pulls.stats.num_pulls.values())
                (await pulls.pull([entry]))[0].release()  # for another worker of this host
                result.num_second_pulls += sum(pulls.stats.num_pulls.values()) - pulled
                arena.evict(entry.key)
    return result


def _copy_raw(entry: RemoteEntry, sock: socket.socket, arena: Arena) -> None:
    num_bytes = entry.range.nbytes - ENTRY_HEADER_BYTES
    with arena.reserve(num_bytes) as reservation, reservation.buffer as buffer:
        sock.sendall(_REQUEST.pack(entry.range.offset + ENTRY_HEADER_BYTES, num_bytes))
        done = 0
        while done < num_bytes:
            received = sock.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError("the raw connection was closed")
            done += received


def _say(message: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    config = RpcConfig(shared_secret="a secret of this benchmark alone", insecure=True)
    if sys.argv[1] == "source":
        uvloop.run(source(sys.argv[2], config, [int(word) for word in sys.argv[3:]]))
    else:
        uvloop.run(destination(config))
