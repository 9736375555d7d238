"""The features of a host as tensors over its arena, for as long as a `with` block.

Theory of operation. The block holds the entries at the store, as a worker does while its engine reads them, so nothing
evicts or overwrites them. The tensors are views of a mapping without write permission. At the end of the block the
memory may be reused, so the tensors that were handed out are made empty, and the mapping raises; what was sliced from
them before that would show whatever is written there next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from medialane.arena import ArenaConfig
from medialane.client.store_thread import StoreThread
from medialane.types.errors import InvalidRequest

#: The fields of an item by name: a tensor, a plain value, or a list of these where the processor nests them.
ItemTensors = Mapping[str, Any]

#: The default of --arena-directory.
_ARENA_DIRECTORY = ArenaConfig().directory

_HASH = re.compile(r"(?:medialane:feature/)?([0-9a-f]{64})")


class FeaturesReleased(RuntimeError):
    """The `with` block has ended."""


class Features(Mapping[str, ItemTensors]):
    """Tensors by hash and by the field's name, in the order of the hashes; yielded by `features`. `empty` makes each
    of its tensors empty."""

    def __init__(self, by_hash: Mapping[str, ItemTensors], empty: Sequence[Callable[[], object]]) -> None:
        self._by_hash: Mapping[str, ItemTensors] | None = by_hash
        self._empty = empty

    def __getitem__(self, name: str) -> ItemTensors:
        """Return the fields of a feature, named by its hash or reference. Raises KeyError, FeaturesReleased."""
        matched = _HASH.fullmatch(name)
        return self._held[matched[1] if matched else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return "Features(released)" if self._by_hash is None else f"Features({', '.join(self._by_hash)})"

    @property
    def _held(self) -> Mapping[str, ItemTensors]:
        if self._by_hash is None:
            raise FeaturesReleased(
                "the features were released at the end of the `with` block: copy what is needed later"
            )
        return self._by_hash

    def release(self) -> None:
        """Called at the end of the block. Idempotent."""
        self._by_hash = None
        for empty in self._empty:
            empty()
        self._empty = ()


@contextmanager
def features(
    hashes: Sequence[str], *, store: str, arena_directory: str = _ARENA_DIRECTORY, timeout_s: float = 60.0
) -> Iterator[Features]:
    """Hold features of this host, and yield their tensors, until the end of the block.

    `hashes` are those of `mm_hashes` in medialane's answers, or references to features. `store` is the address of the
    store's unix socket. This process must be of the user who runs the store, and share its `arena_directory`, which in
    a container means a common IPC namespace or volume. A feature that was evicted is made again, within `timeout_s`.

    The tensors are read-only, although torch has no such notion: writing to one ends the process with SIGSEGV. A
    process that is forked within the block may read them until the block ends in this one.

    Raises StoreUnavailable if the store cannot be reached, does not answer in time, or has another arena than this
    process sees; UnknownMedia for a hash that it does not know; InvalidRequest for what is none.
    """
    names = [_hash(name) for name in hashes]
    with StoreThread(store, arena_directory, timeout_s) as connection:
        found = connection.hold(list(dict.fromkeys(names)))
        from medialane.client.tensors import fields_of

        empty: list[Callable[[], object]] = []
        held = Features({name: fields_of(found[name], connection.tensor, empty) for name in names}, empty)
        try:
            yield held
        finally:
            held.release()


def _hash(name: str) -> str:
    matched = _HASH.fullmatch(name)
    if matched is None:
        raise InvalidRequest(f"{name[:100]!r} is no hash of a feature: it has 64 hex digits")
    return matched[1]
