"""Numbers that the gateways of one port count together, in memory that all of them map.

Theory of operation. A connection belongs to one gateway, and connections are spread unevenly: to divide a limit by
the number of gateways would lower it, as a client with one connection would have a part of it. Each name has a row: a
value that any gateway sets, and a count for each gateway that only this one changes. A row is found by a hash of the
name, so gateways need not exchange its place. There are no locks, which a stopped process would hold for ever:
reads and writes of eight aligned bytes are atomic, and if two gateways set a value in the same microsecond, one of the
two changes is lost. A gateway that starts sets its counts to 0, whatever the one before it has left.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable

from medialane.types.errors import StartupFailed

#: Names that all gateways have; tenants have none that begins like these.
QUEUED_REQUESTS = "~requests"
QUEUED_BYTES = "~bytes"
PREPARING = "~preparing"
PREPARED = "~prepared"
WAITING = "~waiting"
#: Rows; the file is sparse, and a row that no name has takes no memory.
_NUM_ROWS = 1 << 16
_FLOAT_BYTES = 8


class SharedCounts:
    """The counts of gateway `index` of `num_gateways`, which share the file at `path`; without a path, its own."""

    def __init__(self, path: str = "", *, index: int = 0, num_gateways: int = 1) -> None:
        """Raises StartupFailed."""
        self._index, self._width = 1 + index, 1 + num_gateways
        self._rows: dict[str, int] = {}
        size = _NUM_ROWS * self._width * _FLOAT_BYTES
        self._values = memoryview(_mapped(path, size) if path else mmap.mmap(-1, size)).cast("d")
        self.assign(())

    def assign(self, names: Iterable[str]) -> None:
        """Give each name, besides the constant ones, its row, the same one in every gateway with the same names; of
        names that hash to one row, all but the first get the next free one. Own counts move along, counts of other
        names end."""
        counts = {name: self.own(name) for name in self._rows}
        for name in counts:
            self.set_own(name, 0)
        taken: set[int] = set()
        self._rows = {}
        for name in sorted({QUEUED_REQUESTS, QUEUED_BYTES, PREPARING, PREPARED, WAITING, *names}):
            row = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % _NUM_ROWS
            while row in taken:
                row = (row + 1) % _NUM_ROWS
            taken.add(row)
            self._rows[name] = row * self._width
            self.set_own(name, counts.get(name, 0))

    def value(self, name: str) -> float:
        return self._values[self._rows[name]]

    def set_value(self, name: str, value: float) -> None:
        self._values[self._rows[name]] = value

    def own(self, name: str) -> int:
        return int(self._values[self._rows[name] + self._index])

    def set_own(self, name: str, count: int) -> None:
        self._values[self._rows[name] + self._index] = count

    def total(self, name: str) -> int:
        """Return the sum of all gateways' counts."""
        row = self._rows[name]
        return int(sum(self._values[row + 1 : row + self._width]))

    def is_turn(self, name: str, now: float, *, turn_s: float) -> bool:
        """Return whether it is the turn of this gateway, by a clock that all have in common: this one, and each other
        that has a count, have turns of `turn_s`."""
        row = self._rows[name]
        others = [at for at in range(1, self._width) if at == self._index or self._values[row + at]]
        return others[int(now / turn_s) % len(others)] == self._index


def _mapped(path: str, size: int) -> mmap.mmap:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(file, size)
            return mmap.mmap(file, size)
        finally:
            os.close(file)
    except OSError as error:
        raise StartupFailed(
            f"cannot map {path}, by which gateways share limits: {os.strerror(error.errno or 0)}"
        ) from error
