"""The encoder cache of a simulated engine, like vLLM 0.32's (v1/core/encoder_cache_manager.py).

An item stays while requests refer to it, and then until its space is needed; the item unreferenced for the longest time
is evicted first. Sizes are numbers of embeddings.
"""

from __future__ import annotations

from collections import OrderedDict


class EncoderCache:
    def __init__(self, size: int) -> None:
        self._num_free = size
        self._num_freeable = size  # free or unreferenced
        self._users: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._unused: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._users

    def use(self, mm_hash: str, request_id: str) -> bool:
        """Add a reference to a cached item; return False if it is not cached."""
        users = self._users.get(mm_hash)
        if users is None:
            return False
        if not users:
            self._num_freeable -= self._unused.pop(mm_hash)
        users.add(request_id)
        return True

    def make_room(self, num_embeds: int) -> bool:
        """Evict unused items until there is space. Return False, with no effect, if there cannot be enough."""
        if num_embeds > self._num_freeable:
            return False
        while num_embeds > self._num_free:
            mm_hash, size = self._unused.popitem(last=False)
            del self._users[mm_hash], self._sizes[mm_hash]
            self._num_free += size
        return True

    def add(self, mm_hash: str, num_embeds: int, request_id: str) -> None:
        """Add a new item after `make_room`."""
        self._users[mm_hash] = {request_id}
        self._sizes[mm_hash] = num_embeds
        self._num_free -= num_embeds
        self._num_freeable -= num_embeds

    def release(self, mm_hash: str, request_id: str) -> None:
        """Remove the request's reference to the item, if it has one."""
        users = self._users.get(mm_hash)
        if not users or request_id not in users:
            return
        users.discard(request_id)
        if not users:
            self._unused[mm_hash] = self._sizes[mm_hash]
            self._num_freeable += self._sizes[mm_hash]
