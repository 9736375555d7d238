"""An arena's owner to kill when its table is full: `python full_owner.py DIRECTORY SIZE_BYTES`. Prints how many entries
it has, and the newest key, then goes on storing tiny ones until it is killed."""

import itertools
import sys

from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig, Lineage
from medialane.types.media import EncodedMedia

LINEAGE = Lineage(b"full".ljust(16), b"table".ljust(16))


def store(arena: Arena, key: str) -> None:
    reservation = arena.reserve(8, "encoded")
    reservation.buffer[:] = key.encode().ljust(8)
    range_ = reservation.range
    arena.publish(reservation, key, EncodedMedia("image", key, "image/png", range_, ENTRY_HEADER_BYTES, 8)).release()


def main() -> None:
    arena = Arena.open(ArenaConfig(size_bytes=int(sys.argv[2]), directory=sys.argv[1]), lineage=LINEAGE)
    for number in itertools.count():
        store(arena, str(number))
        if arena.stats().num_evictions == 1000:
            sys.stdout.write(f"{arena.stats().num_entries} {number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
