"""A process that writes to a range, to kill: `python writer.py DIRECTORY RANGE`. Prints a line when it has written one
byte, and completes the entry after the next line of its input."""

import sys

import msgspec

from medialane.arena import FillWriter
from medialane.types.tensor import ArenaRange


def say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.flush()


def main() -> None:
    directory, entry = sys.argv[1], msgspec.json.decode(sys.argv[2], type=ArenaRange)
    with FillWriter.open(entry, directory) as payload:
        payload[0] = 1
        say(b"writing\n")
        sys.stdin.readline()
        payload[:] = b"\x02" * len(payload)
    say(b"completed\n")


if __name__ == "__main__":
    main()
