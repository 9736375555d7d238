"""A simulated encoder: a worker that only encodes, in batches over all requests, in order of arrival."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from medialane.testing.simulated.config import SimulatedConfig

#: The fixed part of a step, and the most embeddings of one, unless a single item has more.
STEP_MS = 2.0
MAX_EMBEDS = 8192
_MIB = 1 << 20


class EncodeStep(NamedTuple):
    """The items of one step, and the number of their embeddings."""

    mm_hashes: tuple[str, ...]
    num_embeds: int


def encode_step_s(config: SimulatedConfig, step: EncodeStep) -> float:
    """Return the duration of a step, in simulated seconds: encoding, and copying the results to the arena."""
    mib = step.num_embeds * config.embedding_bytes / _MIB
    ms = STEP_MS + config.embedding_ms * step.num_embeds + config.load_ms_per_mib * mib
    return ms * 1e-3


class EncoderScheduler:
    """Plans the steps of an encoder. It uses no clock and no event loop, like `Scheduler`."""

    def __init__(self, *, max_embeds: int = MAX_EMBEDS) -> None:
        self._max_embeds = max_embeds
        self._waiting: deque[tuple[str, int]] = deque()

    def add(self, mm_hash: str, num_embeds: int) -> None:
        self._waiting.append((mm_hash, num_embeds))

    def step(self) -> EncodeStep | None:
        """Plan the next step, of at most `max_embeds` embeddings, but at least one item. None if there is no work."""
        if not self._waiting:
            return None
        hashes: list[str] = []
        total = 0
        while self._waiting and (not hashes or total + self._waiting[0][1] <= self._max_embeds):
            mm_hash, num_embeds = self._waiting.popleft()
            hashes.append(mm_hash)
            total += num_embeds
        return EncodeStep(tuple(hashes), total)
