"""A store of patterns in a process of its own, which takes over the arena of the one before: ADDRESS DIRECTORY.

What it frees is poisoned; SIGUSR1 evicts what is not held. It ends when its arena turns out to be damaged.
"""

import asyncio
import signal
import sys

from store_world import LINEAGE, PatternItems, serve_patterns

import poison
from medialane.arena import Arena, ArenaConfig


async def main(address: str, directory: str) -> None:
    poison.install()
    arena = Arena.open(ArenaConfig(size_bytes=16 << 20, directory=directory), lineage=LINEAGE)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, arena.clear)
    is_damaged = asyncio.Event()
    server = serve_patterns(PatternItems(arena), arena, on_damaged=is_damaged.set)
    await server.serve(address)
    sys.stdout.write("serves\n")
    sys.stdout.flush()
    await is_damaged.wait()


asyncio.run(main(*sys.argv[1:]))
