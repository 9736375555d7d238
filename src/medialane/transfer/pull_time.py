"""How long a pull may take: a peer that is stopped or unreachable must not delay a request for much longer than its
fallback takes."""

from __future__ import annotations

#: For the start of a pull, on a busy machine.
_BASE_S = 5.0
#: The slowest link that is worth using: a network of 100 Mbit/s.
_MIN_BYTES_PER_S = 10e6


def longest_pull_s(nbytes: int) -> float:
    """Return the destination's deadline for a pull, in seconds."""
    return _BASE_S + nbytes / _MIN_BYTES_PER_S


def longest_hold_s(nbytes: int) -> float:
    """Return how long the source holds an entry for a pull, in seconds: longer than any pull of it."""
    return 2 * longest_pull_s(nbytes)
