"""Statistics: of store and gateway, read at each scrape of /metrics; Prometheus series as sent from a worker to a
gateway; and the work of a request without a first token yet, for the worker's other gateways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from medialane.types.setting import format_bytes

#: What a process is for, as in its title. `engine` are the processes below a worker or an encoder.
ProcessKind = Literal["gateway", "worker", "encoder", "engine", "store", "forkserver", "preparer", "warm"]


class ArenaStats(msgspec.Struct, frozen=True):
    """Usage of an arena and its cache lookups. Bytes are allocated bytes, including headers and padding.

    free + writing + published = size; pinned is the part of published that has pins; `num_leases` counts the pins.
    encoded + decoded + processed + embedded = writing + published.
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
    or were killed, not ones that were recycled as scheduled."""

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
    dropped as it did not; calls that waited for another engine. Ranges that are reserved for writing, and ranges that
    are freed when a process no longer writes there."""

    num_found: int = 0
    num_filled: int = 0
    num_dropped: int = 0
    num_waited: int = 0
    num_writing: int = 0
    num_revoking: int = 0


class MediaLeaseStats(msgspec.Struct, frozen=True):
    """Media that clients have sent to be kept (`types.media_lease`), uploads that are being received included."""

    num_leases: int = 0
    num_bytes: int = 0
    max_bytes: int = 0


class HoldRecord(msgspec.Struct, frozen=True):
    """A pin or a reservation of an entry of the arena (`--debug-holds`): the entry's place, size, kind, key and
    state; for whom it was taken (client, call, request), by which calls, innermost first; its age in seconds."""

    offset: int
    size_bytes: int
    kind: str
    key: str
    state: str
    taker: str
    call_site: str
    age_s: float

    def __str__(self) -> str:
        """Return what is known of it in a line, for operators."""
        entry = f"{self.state} {self.kind} entry at {self.offset} ({format_bytes(self.size_bytes)})"
        key = f", key {self.key[:12]}" if self.key else ""
        return f"{self.age_s:.1f} s: {entry}{key}: {self.taker or 'the store itself'} [{self.call_site}]"


class StoreStats(msgspec.Struct, frozen=True):
    """State of a host's media store. `memory` is its processes', in bytes; `holds` are the oldest
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
    there; and how long requests wait, in the gateway and at the worker with the shortest wait, None if no worker
    accepts requests."""

    workers_s: Mapping[str, float]
    expected_s: float | None


class SegmentStats(msgspec.Struct, frozen=True):
    """Characters of prompts by whether their tokens were known from earlier ones, and the memory of what is known."""

    num_cached: int = 0
    num_new: int = 0
    num_bytes: int = 0


class RoutingStats(msgspec.Struct, frozen=True):
    """The router's state about workers' caches, its mispredictions, and its choices whose request was never sent; per
    worker the age of its last KV change and how often a snapshot replaced queued ones."""

    num_blocks: int
    num_entries: int
    num_encoder_items: int
    num_fewer_cached: int
    num_more_cached: int
    num_unsent: int
    event_lag_s: Mapping[str, float]
    num_event_gaps: Mapping[str, int]


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """A metric family; `name` as in prometheus_client, without the suffixes of its samples."""

    name: str
    documentation: str
    kind: str


class MetricSeries(msgspec.Struct, frozen=True, array_like=True):
    """One sample's name and labels. `family` is the index of its family in the order in which families were sent."""

    family: int
    name: str
    labels: dict[str, str]


class MetricChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes since the previous message on this connection; the first message has all series.

    `families` and `series` are new; series are numbered from 0 as they are sent, and no number is reused. `ids` (u32,
    little-endian) are the series whose values have changed, `values` (f64) their new values; `removed` (u32) are series
    that no longer exist. `memory` is the worker's processes', in bytes; the first message of a read has it.
    """

    families: tuple[MetricFamily, ...] = ()
    series: tuple[MetricSeries, ...] = ()
    ids: bytes = b""
    values: bytes = b""
    removed: bytes = b""
    memory: Mapping[ProcessKind, int] = {}


#: Limits of one announcement: ids of a prompt of any length (`routing.block_index` samples them), its first items.
MAX_BLOCK_IDS: Final = 64
MAX_ITEMS: Final = 64
#: Longest mm_hash: ours are 64 hex digits.
_MAX_HASH: Final = 128
#: Largest number of embeddings and of milliseconds.
_MAX_COUNT: Final = 1 << 31

_ID_BYTES: Final = 8


class PendingWork(msgspec.Struct, frozen=True, array_like=True):
    """`block_ids` are ids of a prefix's blocks at increasing lengths, the last one of the longest, 8 bytes each, little
    endian. `items` are the mm_hashes that it reads from the encoder cache, with their embeddings; `work_ms` is the
    expected time of prefill and encoder. Raises ValueError beyond the limits: workers relay it between gateways."""

    rank: int
    block_ids: bytes
    items: tuple[tuple[str, int], ...]
    work_ms: float

    def __post_init__(self) -> None:
        if not (
            self.rank >= 0
            and len(self.block_ids) % _ID_BYTES == 0
            and len(self.block_ids) <= MAX_BLOCK_IDS * _ID_BYTES
            and len(self.items) <= MAX_ITEMS
            and all(len(mm_hash) <= _MAX_HASH and 0 <= count <= _MAX_COUNT for mm_hash, count in self.items)
            and 0 <= self.work_ms <= _MAX_COUNT
        ):
            raise ValueError("pending work out of range")

    def __repr__(self) -> str:
        num_ids = len(self.block_ids) // _ID_BYTES
        return f"PendingWork(rank {self.rank}, {num_ids} ids, {len(self.items)} items, {self.work_ms:.1f} ms)"
