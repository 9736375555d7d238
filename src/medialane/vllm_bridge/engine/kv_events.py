"""Reads vLLM's KV events, sent by its EngineCore processes.

Each rank's scheduler publishes a numbered batch after every step that changed its cache, through ZeroMQ sockets in a
private folder: a PUB to which we subscribe, and a ROUTER that replays missed batches from its buffer. We request a
replay at the start (a subscription takes effect with a delay), at a gap, and when a rank has sent nothing for a while
(a loss of the last batch shows no gap). Batches no longer in the buffer are lost: the rank is then treated as empty,
since assuming a block that is not cached misroutes requests, while the opposite only costs compute.

The folder's mode is 0700, since the events contain prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig

from medialane.runtime.tasks import WatchedTask
from medialane.types.kv_blocks import AllBlocksCleared, KvEvent, KvEventBatch

logger = logging.getLogger(__name__)

Listener = Callable[[KvEventBatch], None]

#: Batches queued in the sockets for a slow reader; later ones are dropped, and replayed from the buffer.
MAX_WAITING_BATCHES = 10_000

#: Batches that a publisher can replay. A batch has the tokens of one step: about 10 kB under load.
BUFFER_STEPS = 10_000

#: A batch has one step's tokens and removals; no valid one comes near.
MAX_BATCH_BYTES = 64 << 20

#: Time without a batch after which we check, once, whether the last one was missed.
SILENCE_S = 2.0

#: A publisher polls for replay requests between two batches, at least every 0.1 s.
REPLAY_TIMEOUT_S = 10.0

#: Events passed to a listener at once, before yielding to the event loop (about 1 us each, plus time for tokens).
MAX_EVENTS_AT_ONCE = 1024

#: `ZmqEventPublisher.END_SEQ`: end of the replay.
END = b"\xff" * 8


class PublishedBatch(msgspec.Struct, frozen=True, array_like=True):
    """vLLM's KVEventBatch. Unknown fields of events are ignored."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


def events_config(folder: Path) -> KVEventsConfig:
    """Return the settings with which vLLM publishes in `folder`.

    Each data-parallel rank publishes at its own endpoint, named by `ZmqEventPublisher.offset_endpoint_port`. For rank 1
    and above it accepts endpoints that contain "inproc" (a suffix is appended) or "tcp" (the port is incremented). Ours
    contain "inproc", since ports would be open to every user of the host.
    """
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/inproc-events",
        replay_endpoint=f"ipc://{folder}/inproc-replay",
        buffer_steps=BUFFER_STEPS,
        hwm=MAX_WAITING_BATCHES,
        max_queue_size=MAX_WAITING_BATCHES,
    )


class KvEventReader:
    """Reads all ranks of one engine. Created before the engine, which needs `config`, its publisher settings.

    `folder` is private, and must exist until the engine has exited. The owner calls `start` once, on the event loop,
    and `close`.
    """

    def __init__(self, folder: Path, *, silence_s: float = SILENCE_S) -> None:
        self.config = events_config(folder)
        self._silence_s = silence_s
        self.ranks: list[RankReader] = []
        self._context: zmq.asyncio.Context | None = None
        self._running: list[WatchedTask] = []

    def start(self, sources: Mapping[int, KVEventsConfig], listener: Listener) -> None:
        """Start reading, including events published earlier. `sources` are the engine's own (`get_kv_event_sources`).

        Ranks are numbered in the order of these sources, from 0.
        """
        self._context = zmq.asyncio.Context()
        ordered = [source for _, source in sorted(sources.items())]
        self.ranks = [
            RankReader(self._context, rank, source, listener, silence_s=self._silence_s)
            for rank, source in enumerate(ordered)
        ]
        self._running = [WatchedTask(rank.run, f"the reader of KV events of rank {rank.rank}") for rank in self.ranks]

    async def close(self) -> None:
        """Idempotent."""
        for running in self._running:
            await running.close()
        for rank in self.ranks:
            rank.close()
        if self._context is not None:
            self._context.term()
            self._context = None


class RankReader:
    """One rank. `num_lost` counts the losses that a replay could not repair."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        rank: int,
        source: KVEventsConfig,
        listener: Listener,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.rank = rank
        self._silence_ms = int(silence_s * 1000)
        self.num_lost = 0
        self._listener = listener
        self._next = 0  # the number of the next batch to apply
        self._last_live = -1
        self._decoder = msgspec.msgpack.Decoder(PublishedBatch)
        self._num_unanswered = 0
        self._live: zmq.asyncio.Socket = context.socket(zmq.SUB)
        self._replay: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        for socket in (self._live, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, MAX_WAITING_BATCHES)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        self._live.subscribe(b"")
        self._live.connect(source.endpoint)
        self._replay.connect(source.replay_endpoint)

    async def run(self) -> None:
        """Read until cancelled. After an error the rank is empty, and the next call reads it anew."""
        try:
            await self._read()
        except Exception:  # raised again: whatever it was, the rank is no longer known
            self.lose("its reader has failed")
            self._next = 0
            raise

    async def _read(self) -> None:
        await self._request_replay()
        settled = False
        while True:
            if settled or await self._live.poll(self._silence_ms):
                frames = await self._live.recv_multipart()
                settled = False
                await self._apply_live(frames)
            else:
                settled = await self._request_replay()

    def lose(self, why: str) -> None:
        """Handle lost events: report the rank as empty."""
        self.num_lost += 1
        logger.warning("KV events of rank %d were lost (%d times so far): %s", self.rank, self.num_lost, why)
        self._listener(KvEventBatch(self.rank, (AllBlocksCleared(),), time.time()))

    def close(self) -> None:
        for socket in (self._live, self._replay):
            socket.close(linger=0)

    async def _apply_live(self, frames: list[bytes]) -> None:
        """Process a live batch."""
        if len(frames) != 3:
            self.lose("a batch cannot be read")
            return
        number = int.from_bytes(frames[1], "big")
        if number <= self._last_live:
            self.lose("the publisher has restarted")
            self._next = 0
        self._last_live = number
        if number > self._next:
            await self._request_replay()
        await self._apply(number, frames[2])

    async def _apply(self, number: int, payload: bytes) -> None:
        """Apply a batch, unless it has been already. Earlier ones that are missing are lost."""
        if number < self._next:
            return
        if number > self._next:
            self.lose(f"batches {self._next} to {number - 1} are missing")
        self._next = number + 1
        await self._notify(payload)

    async def _request_replay(self) -> bool:
        """Process the missing batches that are in the publisher's buffer. Return False if it does not reply."""
        await self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        self._num_unanswered += 1
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                while self._num_unanswered:
                    await self._apply_replayed(await self._replay.recv_multipart())
        except TimeoutError:
            logger.warning("rank %d does not replay its KV events", self.rank)
        return not self._num_unanswered

    async def _apply_replayed(self, frames: list[bytes]) -> None:
        if len(frames) != 4 or frames[2] == END:
            self._num_unanswered -= 1
            return
        await self._apply(int.from_bytes(frames[2], "big"), frames[3])

    async def _notify(self, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            self.lose("a batch cannot be read")
            return
        for start in range(0, len(batch.events), MAX_EVENTS_AT_ONCE):
            self._listener(KvEventBatch(self.rank, batch.events[start : start + MAX_EVENTS_AT_ONCE], batch.ts))
            await asyncio.sleep(0)  # receiving from a non-empty socket does not yield to the event loop
