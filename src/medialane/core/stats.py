"""Statistics of store and gateway, read at each scrape of /metrics."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medialane.core.process.memory import ProcessKind


class ArenaStats(msgspec.Struct, frozen=True):
    """Usage of an arena and its cache lookups. Bytes are allocated bytes, including headers and padding.

    free + writing + published = size; pinned is the part of published held by leases. encoded + decoded + processed
    + embedded = writing + published.
    """

    size_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    writing_bytes: int
    published_bytes: int
    pinned_bytes: int
    encoded_bytes: int
    decoded_bytes: int
    processed_bytes: int
    embedded_bytes: int
    num_reservations: int
    num_entries: int
    num_leases: int
    num_hits: int
    num_misses: int
    num_evictions: int


class PoolStats(msgspec.Struct, frozen=True):
    """State and totals of the preparers. `queue_s` is the expected time until the queued items are prepared, if no
    others arrive: their work divided by the number of preparers. `num_restarts` counts replaced preparers that crashed
    or were killed, not those that were recycled as scheduled."""

    num_preparers: int
    num_alive: int
    num_busy: int
    num_queued: int
    num_restarts: int
    num_forkserver_restarts: int
    num_done: int
    num_failed: int
    queue_s: float = 0.0


class PullStats(msgspec.Struct, frozen=True):
    """Entries copied from other hosts' stores, by mover; and the ranges that may still be written by a read that was
    given up."""

    num_pulls: Mapping[str, int] = {}
    num_bytes: Mapping[str, int] = {}
    num_failed: Mapping[str, int] = {}
    num_quarantined: int = 0


class EmbeddingStats(msgspec.Struct, frozen=True):
    """Embeddings (outputs of models' encoders) that were found in the arena, cached after an engine wrote them, and
    dropped as it did not; calls that waited for another engine. Ranges that are reserved for writing, and those that
    are freed when a process no longer writes there."""

    num_found: int = 0
    num_filled: int = 0
    num_dropped: int = 0
    num_waited: int = 0
    num_writing: int = 0
    num_revoking: int = 0


class MediaLeaseStats(msgspec.Struct, frozen=True):
    """Media that clients have sent to be kept (`core.media_lease`), uploads that are being received included."""

    num_leases: int = 0
    num_bytes: int = 0
    max_bytes: int = 0


class HoldRecord(msgspec.Struct, frozen=True):
    """A lease or a reservation of an entry of the arena (`--debug-holds`): the entry's place, size, kind, key and
    state; for whom it was taken (client, call, request), by which calls, innermost first; its age in seconds."""

    offset: int
    size_bytes: int
    kind: str
    key: str
    state: str
    taker: str
    call_site: str
    age_s: float


class StoreStats(msgspec.Struct, frozen=True):
    """State of a host's media store. `memory` is that of its processes, in bytes; `holds` are the oldest
    ones, if they are recorded."""

    arena: ArenaStats
    preparers: PoolStats
    pulls: PullStats = PullStats()
    embeddings: EmbeddingStats = EmbeddingStats()
    memory: Mapping[ProcessKind, int] = {}
    holds: tuple[HoldRecord, ...] = ()
    leases: MediaLeaseStats = MediaLeaseStats()


class QueueStats(msgspec.Struct, frozen=True):
    """Requests of a gateway that wait for one resource: how many, in how many seconds all of them will have been sent,
    by the pace of the last ones, and how long the oldest one has waited."""

    num_requests: int
    expected_s: float
    oldest_s: float


class WaitStats(msgspec.Struct, frozen=True):
    """For how many seconds the last request that has begun at each worker had waited in its engine, while others wait
    there; and how long a request without media waits, in the gateway and at the worker with the shortest wait: None if
    no worker accepts requests."""

    workers_s: Mapping[str, float]
    expected_s: float | None


class RoutingStats(msgspec.Struct, frozen=True):
    """The router's state about workers' caches, its mispredictions, and its choices whose request was never sent; per
    worker the age of its last KV change and the number of gaps in them."""

    num_blocks: int
    num_entries: int
    num_encoder_items: int
    num_unexplained: int
    num_never_stored: int
    num_unsent: int
    event_lag_s: Mapping[str, float]
    num_event_gaps: Mapping[str, int]
