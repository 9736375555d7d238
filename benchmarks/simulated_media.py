"""Where the media of simulated requests are encoded: by workers, by encoders, or by cost; and what a host keeps of it.

For `simulated_cluster`: the embeddings of all workers and encoders of a host are in one arena (`EmbeddingStore`). The
choice is that of the gateway (`routing.cost`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, Protocol

from msgspec.structs import replace

from medialane.routing import EncodeCosts, NewItem, Router, choose_encoder, least_loaded
from medialane.testing.simulated import SimulatedConfig
from medialane.types.feature import MediaSpan
from simulated_encoders import EmbeddingStore, EncoderScheduler, EncodeStep, encode_step_s

#: Who encodes new items.
EncodeAt = Literal["workers", "encoders", "auto"]
Media = tuple[MediaSpan, ...]


class MediaPath(Protocol):
    """What happens to the media of requests besides routing."""

    def prepare(self, media: Media, router: Router, send: Callable[[Media], None]) -> None:
        """At the gateway, before routing: call `send` with the media as they are routed."""
        ...

    def find(self, worker: int, media: Media, add: Callable[[Collection[str]], None]) -> None:
        """At the worker: call `add` with the items whose embeddings are loaded."""
        ...

    def computed(self, worker: int, media: Media) -> None:
        """A request has its first token."""
        ...

    def has_embedding(self, mm_hash: str) -> bool: ...

    def received(self, mm_hashes: Collection[str]) -> None:
        """The embeddings of these items were copied from another host."""
        ...


class KeepsNothing:
    """Each worker encodes what is not in its encoder cache."""

    def prepare(self, media: Media, router: Router, send: Callable[[Media], None]) -> None:
        send(media)

    def find(self, worker: int, media: Media, add: Callable[[Collection[str]], None]) -> None:
        add(())

    def computed(self, worker: int, media: Media) -> None:
        """Nothing is kept."""

    def has_embedding(self, mm_hash: str) -> bool:
        return False

    def received(self, mm_hashes: Collection[str]) -> None:
        """No gateway here has embeddings, so none is sent."""


class KeepsEmbeddings:
    """Embeddings are kept; new items are encoded where `encode_at` says. `cluster` sets the loop and the simulated
    engine (`attach`)."""

    def __init__(
        self, encode_at: EncodeAt, num_encoders: int, costs: EncodeCosts, simulated: SimulatedConfig, *, hop_s: float
    ) -> None:
        self.store = EmbeddingStore()
        self.num_at_workers = self.num_at_encoders = 0
        self._encode_at = encode_at
        self._costs = costs
        self._simulated = simulated
        self._hop_s = hop_s
        self._encoders = [_Encoder(self, number) for number in range(num_encoders)]

    @property
    def encoder_work_s(self) -> list[float]:
        return [encoder.work_s for encoder in self._encoders]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @property
    def simulated(self) -> SimulatedConfig:
        return self._simulated

    def prepare(self, media: Media, router: Router, send: Callable[[Media], None]) -> None:
        awaited = {s.mm_hash for s in media if s.mm_hash not in self.store and self._encodes(s, router)}
        if not awaited:
            send(self._as_known(media))
            return

        def encoded(mm_hash: str, _is_computed: bool) -> None:
            awaited.discard(mm_hash)
            if not awaited:
                self.loop.call_later(self._hop_s, lambda: send(self._as_known(media)))

        for mm_hash in sorted(awaited):
            self.store.wait(mm_hash, partial(encoded, mm_hash))

    def find(self, worker: int, media: Media, add: Callable[[Collection[str]], None]) -> None:
        client, embedded, awaited = f"w{worker}", set[str](), dict[str, MediaSpan]()
        for span in media:
            if span.mm_hash in self.store:
                embedded.add(span.mm_hash)
            elif not self.store.begin(span.mm_hash, client) and self.store.writer(span.mm_hash) != client:
                awaited[span.mm_hash] = span
        if not awaited:
            add(embedded)
            return
        waiting = _Waiting(awaited, embedded, add)
        for mm_hash in awaited:
            self.store.wait(mm_hash, partial(waiting.ended, mm_hash))
        num_embeds = sum(span.num_embeds for span in awaited.values())
        self.loop.call_later(num_embeds * self._costs.embed_ms / 1e3, waiting.give_up)

    def computed(self, worker: int, media: Media) -> None:
        for mm_hash in {span.mm_hash for span in media}:
            if self.store.writer(mm_hash) == f"w{worker}":
                self.num_at_workers += 1
                self.store.end(mm_hash, is_computed=True)

    def has_embedding(self, mm_hash: str) -> bool:
        return mm_hash in self.store

    def received(self, mm_hashes: Collection[str]) -> None:
        for mm_hash in mm_hashes:
            if self.store.begin(mm_hash, "another host"):
                self.store.end(mm_hash, is_computed=True)

    def _encodes(self, span: MediaSpan, router: Router) -> bool:
        """Have an encoder encode an item, unless the worker is to; return whether to wait for it."""
        writer = self.store.writer(span.mm_hash)
        if writer is not None:
            return writer.startswith("e")
        item = NewItem(span.num_embeds, span.num_embeds * self._simulated.embedding_bytes)
        number = self._choose(item, [encoder.queue_ms for encoder in self._encoders], router)
        if number is None:
            return False
        encoder = self._encoders[number]
        self.store.begin(span.mm_hash, encoder.name)
        self.num_at_encoders += 1
        encoder.queue_ms += self._costs.encode_ms(item)
        self.loop.call_later(self._hop_s, encoder.add, span)
        return True

    def _choose(self, item: NewItem, queues_ms: Sequence[float], router: Router) -> int | None:
        if self._encode_at == "workers":
            return None
        if self._encode_at == "encoders":
            return least_loaded(queues_ms)
        return choose_encoder(item, queues_ms, router.mean_sequences, self._costs)

    def _as_known(self, media: Media) -> Media:
        bytes_of_one = self._simulated.embedding_bytes
        return tuple(
            replace(s, embedding_bytes=s.num_embeds * bytes_of_one) if s.mm_hash in self.store else s for s in media
        )

    def encoded(self, encoder: _Encoder, step: EncodeStep) -> None:
        for mm_hash in step.mm_hashes:
            self.store.end(mm_hash, is_computed=True)
        self.loop.call_later(self._hop_s, encoder.answered, step.num_embeds * self._costs.embed_ms)


class _Waiting:
    """A request at a worker that waits for items which others compute; it gives up after the time of computing them."""

    def __init__(
        self,
        awaited: dict[str, MediaSpan],
        embedded: set[str],
        add: Callable[[Collection[str]], None],
    ) -> None:
        self._awaited = set(awaited)
        self._embedded = embedded
        self._add: Callable[[Collection[str]], None] | None = add

    def ended(self, mm_hash: str, is_computed: bool) -> None:
        self._awaited.discard(mm_hash)
        if is_computed:
            self._embedded.add(mm_hash)
        if not self._awaited:
            self.give_up()

    def give_up(self) -> None:
        """Add the request, with what is known. Idempotent."""
        add, self._add = self._add, None
        if add is not None:
            add(self._embedded)


class _Encoder:
    """`queue_ms` is the work that the gateway has sent and that is not answered."""

    def __init__(self, media: KeepsEmbeddings, number: int) -> None:
        self.name = f"e{number}"
        self.queue_ms = 0.0
        self.work_s = 0.0
        self._media = media
        self._scheduler = EncoderScheduler()
        self._stepping = False

    def add(self, span: MediaSpan) -> None:
        self._scheduler.add(span.mm_hash, span.num_embeds)
        if not self._stepping:
            self._step()

    def answered(self, work_ms: float) -> None:
        self.queue_ms -= work_ms

    def _step(self) -> None:
        step = self._scheduler.step()
        self._stepping = step is not None
        if step is not None:
            duration = encode_step_s(self._media.simulated, step)
            self.work_s += duration
            self._media.loop.call_later(duration, self._complete, step)

    def _complete(self, step: EncodeStep) -> None:
        self._media.encoded(self, step)
        self._step()
