"""Records of names in memory: what an arena's file keeps for the next process."""

from __future__ import annotations


class KeptNames(dict[bytes, bytes]):
    """`media.http_cache.NameRecords`."""

    def read(self) -> list[tuple[bytes, bytes]]:
        return list(self.items())

    def write(self, key: bytes, payload: bytes) -> None:
        self[key] = payload

    def erase(self, key: bytes) -> None:
        self.pop(key, None)
