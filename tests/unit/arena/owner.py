"""An arena's owner to kill: `python owner.py DIRECTORY`. Prints what the test needs, then waits for its end."""

import sys

import msgspec

from medialane.arena import Arena, ArenaConfig
from medialane.types.feature import Feature
from medialane.types.media import MediaSize
from medialane.types.tensor import ArenaRange


class Ready(msgspec.Struct):
    arena: str
    nonce: bytes
    range: ArenaRange


def main() -> None:
    arena = Arena.create(ArenaConfig(size_bytes=16 << 20, directory=sys.argv[1]))
    reservation = arena.reserve(5)
    reservation.buffer[:] = b"hello"
    with arena.publish(reservation, "key", Feature("image", "key", b"", (), MediaSize())) as pin:
        sys.stdout.buffer.write(msgspec.json.encode(Ready(arena.id, arena.nonce, pin.range)) + b"\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
