"""vLLM's KV events, from its EngineCore processes to this one.

Each rank's scheduler publishes a numbered batch after every step that changed its cache, through ZeroMQ sockets in a
private folder: a PUB that we subscribe to, and a ROUTER that repeats what we missed out of its buffer. We ask it at the
start (a subscription takes effect some time after it was made), at a gap, and when a rank has fallen silent (the last
batch before a silence is missed by nobody else). What is not in the buffer any more is lost: the rank counts as empty
then, since a block that is believed held and is not sends requests astray, while the opposite only costs work.

The folder is mode 0700, since the events carry prompts.
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

from medialane.core.kv_events import AllBlocksCleared, KvEvent, KvEventBatch
from medialane.vllm_bridge.event_sequence import EventSequence, Verdict

logger = logging.getLogger(__name__)

Listener = Callable[[KvEventBatch], None]

#: Batches that may wait in the sockets for a reader that is late; later ones are dropped, and found in the buffer.
MAX_WAITING_BATCHES = 10_000

#: Batches that a publisher can repeat. A batch's tokens are those of one step: some 10 kB each under load.
BUFFER_STEPS = 10_000

#: A batch is one step's tokens and removals; no lawful one comes near.
MAX_BATCH_BYTES = 64 << 20

#: After so much silence we ask whether the last batch was missed. Once per silence.
SILENCE_S = 2.0

#: A publisher looks at requests between two batches, at least every 0.1 s.
REPLAY_TIMEOUT_S = 10.0

#: Events that a listener gets at once; the loop is let go in between (about 1 us each there, and some more of tokens).
MAX_EVENTS_AT_ONCE = 1024

#: `ZmqEventPublisher.END_SEQ`: nothing more to repeat.
END = b"\xff" * 8


class Published(msgspec.Struct, frozen=True, array_like=True):
    """vLLM's KVEventBatch. Fields of events that we do not know are ignored."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


def events_config(folder: Path) -> KVEventsConfig:
    """Settings with which vLLM publishes in `folder`.

    Data-parallel ranks publish each at an endpoint of its own, named by `ZmqEventPublisher.offset_endpoint_port`. It
    takes endpoints for rank 1 and above that contain "inproc" (a name is appended) or "tcp" (the port is counted up),
    so ours contain it: ports would be open to every user of the host.
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
    """Reads all ranks of one engine. Made before the engine, so that nothing is told before somebody can listen.

    `folder` is private, and stays until the engine has ended. `config` is how vLLM publishes there. The owner calls
    `start` once, on the loop, and `close`.
    """

    def __init__(self, folder: Path) -> None:
        self.config = events_config(folder)
        self.ranks: list[RankReader] = []
        self._context: zmq.asyncio.Context | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, sources: Mapping[int, KVEventsConfig], listener: Listener) -> None:
        """Read from now on, and what was told before; `sources` are the engine's own words (`get_kv_event_sources`).

        Ranks are counted among these sources, from 0.
        """
        self._context = zmq.asyncio.Context()
        ordered = [source for _, source in sorted(sources.items())]
        self.ranks = [RankReader(self._context, rank, source, listener) for rank, source in enumerate(ordered)]
        self._running = asyncio.create_task(self._run(), name="kv events")

    async def close(self) -> None:
        """Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        for rank in self.ranks:
            rank.close()
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for rank in self.ranks:
                    tasks.create_task(rank.run(), name=f"kv events of rank {rank.rank}")
        except Exception as error:
            logger.critical("KV events are no longer read: requests are routed without them", exc_info=error)
            for rank in self.ranks:
                rank.lose("its reader has failed")


class RankReader:
    """One rank. `num_gaps` counts the times that batches were missing, `num_lost` those that could not be repeated."""

    def __init__(self, context: zmq.asyncio.Context, rank: int, source: KVEventsConfig, listener: Listener) -> None:
        self.rank = rank
        self.num_gaps = 0
        self.num_lost = 0
        self._listener = listener
        self._sequence = EventSequence()
        self._decoder = msgspec.msgpack.Decoder(Published)
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
        """Read until cancelled."""
        await self._repeat()
        settled = False
        while True:
            if settled or await self._live.poll(int(SILENCE_S * 1000)):
                frames = await self._live.recv_multipart()
                settled = False
                await self._take(frames)
            else:
                settled = await self._repeat()

    def lose(self, why: str) -> None:
        """Events are lost: the rank counts as empty."""
        self.num_lost += 1
        logger.warning("KV events of rank %d are lost (%d times so far): %s", self.rank, self.num_lost, why)
        self._listener(KvEventBatch(self.rank, (AllBlocksCleared(),), time.time()))

    def close(self) -> None:
        for socket in (self._live, self._replay):
            socket.close(linger=0)

    async def _take(self, frames: list[bytes]) -> None:
        """A live batch."""
        if len(frames) != 3:
            self.lose("a batch cannot be read")
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        verdict = self._sequence.live(number)
        if verdict is Verdict.RESTARTED:
            self.lose("the publisher has started again")
            verdict = self._sequence.live(number)
        if verdict is Verdict.GAP:
            self.num_gaps += 1
            await self._repeat()
            verdict = self._sequence.buffered(number)
        if verdict is Verdict.GAP:
            self._skip_to(number)
            verdict = self._sequence.buffered(number)
        if verdict is Verdict.TAKE:
            await self._notify(payload)

    def _skip_to(self, number: int) -> None:
        self.lose(f"batches {self._sequence.next} to {number - 1} are missing")
        self._sequence.skip_to(number)

    async def _repeat(self) -> bool:
        """Take what the publisher's buffer has of the batches that are wanted. False if it does not answer."""
        await self._replay.send_multipart([b"", self._sequence.next.to_bytes(8, "big")])
        self._num_unanswered += 1
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                while self._num_unanswered:
                    await self._take_repeated(await self._replay.recv_multipart())
        except TimeoutError:
            logger.warning("rank %d does not replay its KV events", self.rank)
        return not self._num_unanswered

    async def _take_repeated(self, frames: list[bytes]) -> None:
        if len(frames) != 4 or frames[2] == END:
            self._num_unanswered -= 1
            return
        number = int.from_bytes(frames[2], "big")
        if number > self._sequence.next:
            self._skip_to(number)
        if self._sequence.buffered(number) is Verdict.TAKE:
            await self._notify(frames[3])

    async def _notify(self, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            self.lose("a batch cannot be read")
            return
        for start in range(0, len(batch.events), MAX_EVENTS_AT_ONCE):
            self._listener(KvEventBatch(self.rank, batch.events[start : start + MAX_EVENTS_AT_ONCE], batch.ts))
            await asyncio.sleep(0)  # a socket that has more does not let the loop go by itself
