"""The encoder cache of a simulated engine, as vLLM 0.32's (v1/core/encoder_cache_manager.py).

An item is kept for the requests that refer to it, and after them until its room is needed; the one that was let go
first goes first. Sizes are embeddings.
"""

from __future__ import annotations

from collections import OrderedDict


class EncoderCache:
    def __init__(self, size: int) -> None:
        self._num_free = size
        self._num_freeable = size  # free, or held by nobody
        self._users: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._unused: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._users

    def use(self, mm_hash: str, request_id: str) -> bool:
        """Refer to an item that is held; False if it is not."""
        users = self._users.get(mm_hash)
        if users is None:
            return False
        if not users:
            self._num_freeable -= self._unused.pop(mm_hash)
        users.add(request_id)
        return True

    def make_room(self, num_embeds: int) -> bool:
        """Let unused items go until there is room; False, and nothing done, if there cannot be."""
        if num_embeds > self._num_freeable:
            return False
        while num_embeds > self._num_free:
            mm_hash, size = self._unused.popitem(last=False)
            del self._users[mm_hash], self._sizes[mm_hash]
            self._num_free += size
        return True

    def add(self, mm_hash: str, num_embeds: int, request_id: str) -> None:
        """An item that is not held, for which room was made."""
        self._users[mm_hash] = {request_id}
        self._sizes[mm_hash] = num_embeds
        self._num_free -= num_embeds
        self._num_freeable -= num_embeds

    def release(self, mm_hash: str, request_id: str) -> None:
        """The request refers to the item no more. Nothing happens if it does not."""
        users = self._users.get(mm_hash)
        if not users or request_id not in users:
            return
        users.discard(request_id)
        if not users:
            self._unused[mm_hash] = self._sizes[mm_hash]
            self._num_freeable += self._sizes[mm_hash]
