"""Reports changes of the engine's KV blocks to gateways, batched over some milliseconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from medialane.types.kv_events import AllBlocksCleared, KvChange, KvEventBatch
from medialane.types.request import ModelCard
from medialane.worker.block_table import BlockTable

logger = logging.getLogger(__name__)

#: Time over which events are batched: an engine under load takes 10 to 50 ms per step, and reports it in several
#: batches.
REPORT_PAUSE_S = 0.01

#: More events than this are reported immediately: a listener needs some microseconds for each.
MAX_WAITING_EVENTS = 2048

Listener = Callable[[KvChange], None]


class BlockReports:
    """The block tables of all ranks and their listeners. Used on one event loop."""

    def __init__(self, card: ModelCard, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._tables = {
            rank: BlockTable(card.block_size, max_blocks=card.num_kv_blocks)
            for rank in range(max(1, card.data_parallel_size))
        }
        self._listeners: list[Listener] = []
        self._since: dict[int, float] = {}
        self._num_waiting = 0
        self._waiting: asyncio.TimerHandle | None = None
        self._num_faults_logged = 0
        #: The engine's blocks cannot be compared with prompts: gateways get none.
        self.has_unknown_blocks = False

    def apply(self, batch: KvEventBatch) -> None:
        """Apply the engine's events (the listener of `Engine.watch_blocks`)."""
        table = self._tables.get(batch.rank)
        if table is None:
            logger.error("KV events of rank %d, which the engine does not have", batch.rank)
            return
        table.apply(batch.events)
        if table.hashes_lookahead and not self.has_unknown_blocks:
            self.has_unknown_blocks = True
            logger.error(
                "the engine's KV blocks depend on tokens after them (lookahead_token_ids, with speculative decoding): "
                "requests are routed to this worker without regard to its KV cache"
            )
        self._since.setdefault(batch.rank, batch.time_s)
        self._num_waiting += len(batch.events)
        if self._num_waiting > MAX_WAITING_EVENTS:
            self._report()
        elif self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(REPORT_PAUSE_S, self._report)

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every change until the returned function is called."""
        self._report()
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def held(self) -> dict[int, list[int]]:
        """Return the ids that each rank holds; listeners have been called for all earlier changes."""
        self._report()
        return {rank: table.held() for rank, table in self._tables.items()}

    def num_clears(self) -> dict[int, int]:
        """Return how often each rank's cache has been cleared."""
        return {rank: table.num_clears for rank, table in self._tables.items()}

    def clear(self, *, unless_since: Mapping[int, int]) -> None:
        """Clear the tables, except those of ranks for which the engine has reported it since `num_clears` returned
        `unless_since`: they may have stored blocks again."""
        for rank, table in self._tables.items():
            if table.num_clears == unless_since[rank]:
                table.apply([AllBlocksCleared()])
        self._report()

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _report(self) -> None:
        self.close()
        self._num_waiting = 0
        for rank, table in self._tables.items():
            since = self._since.pop(rank, 0.0)
            age_s = max(0.0, self._clock() - since) if since else 0.0
            if (net := table.take()) is not None:
                change = KvChange(rank, 0, net.stored, net.removed, snapshot=net.snapshot, age_s=age_s)
                for listener in list(self._listeners):
                    listener(change)
        self._log_faults()

    def _log_faults(self) -> None:
        """Log when the number of faults has doubled: a fault may repeat with every block."""
        num_faults = sum(table.num_faults for table in self._tables.values())
        if num_faults >= max(1, 2 * self._num_faults_logged):
            self._num_faults_logged = num_faults
            details = ", ".join(
                f"rank {rank}: {t.num_unknown_parents} with an unknown parent, {t.num_unreadable} unreadable, "
                f"{t.num_dropped} blocks over the limit"
                for rank, t in self._tables.items()
                if t.num_faults
            )
            logger.warning("KV events that could not be applied so far (%s): routing may miss cached blocks", details)
