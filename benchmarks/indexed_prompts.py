"""Synthetic contents of the workers' KV caches: prompts of 16-token blocks with realistic sharing.

Each begins with one of several system prompts, which every slot holds. Half continue with one of some hundred images,
the hotter ones held by more slots. Then comes the session's own part, which one slot holds, sometimes two. An arriving
prompt is a stored session and new blocks: its next turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: Blocks of 16 tokens.
SYSTEM_BLOCKS, IMAGE_BLOCKS = 32, 64
NUM_SYSTEMS, NUM_IMAGES = 16, 256
#: Blocks of a session's own part. The longest are prompts of 128k tokens.
SESSION_BLOCKS = (32, 128, 256, 512, 1024, 8192)
SESSION_WEIGHTS = (30, 30, 20, 12, 6, 2)

Blocks = NDArray[np.uint64]
#: Stores blocks for a slot.
Store = Callable[[int, Blocks], None]


@dataclass
class IndexedPrompts:
    """Stores prompts until this many distinct blocks are held. Deterministic for a seed."""

    num_slots: int
    num_blocks: int
    seed: int = 1
    #: (slot, blocks of a session as stored there)
    sessions: list[tuple[int, Blocks]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._systems = [self.new_blocks(SYSTEM_BLOCKS) for _ in range(NUM_SYSTEMS)]
        self._images = [[self.new_blocks(IMAGE_BLOCKS) for _ in range(NUM_IMAGES)] for _ in range(NUM_SYSTEMS)]

    def new_blocks(self, count: int) -> Blocks:
        """Return ids that no slot holds."""
        return np.frombuffer(bytearray(self._random.randbytes(8 * count)), np.uint64)

    def store(self, store: Store) -> None:
        held = NUM_SYSTEMS * SYSTEM_BLOCKS
        for slot in range(self.num_slots):
            for system in self._systems:
                store(slot, system)
        while held < self.num_blocks:
            slots, ids, num_new = self._session()
            for slot in slots:
                store(slot, ids)
            self.sessions.append((slots[0], ids))
            held += num_new

    def arriving(self, num_blocks: int) -> Blocks:
        """Return a prompt of this length whose beginning is a stored session."""
        _, ids = self._random.choice(self.sessions)
        known = ids[: self._random.randint(SYSTEM_BLOCKS, len(ids))][:num_blocks]
        return np.concatenate([known, self.new_blocks(num_blocks - len(known))])

    def _session(self) -> tuple[Sequence[int], Blocks, int]:
        draw = self._random
        system = draw.randrange(NUM_SYSTEMS)
        image = self.new_blocks(0)
        slot = draw.randrange(self.num_slots)
        if draw.random() < 0.5:
            number = min(NUM_IMAGES - 1, int(draw.paretovariate(1.0)) - 1)
            image = self._images[system][number]
            # A hot image is on some slots, not on all: its sessions are routed there.
            spread = max(1, min(self.num_slots, 16 // (number + 1)))
            slot = (number * 7919 + system * 104729 + draw.randrange(spread)) % self.num_slots
        own = self.new_blocks(draw.choices(SESSION_BLOCKS, SESSION_WEIGHTS)[0])
        slots = [slot]
        if self.num_slots > 1 and draw.random() < 0.1:
            slots.append((slot + 1) % self.num_slots)
        return slots, np.concatenate([self._systems[system], image, own]), len(own)
