"""Has new media items encoded by encoders: workers without a language model, on this host.

An encoder gets a request whose prompt is the placeholder of one item, with the token after it, and writes the
embedding to the arena like any worker that encodes. The request that brought the item waits for that, and is then
routed and sent with the embedding: its worker loads it, and no sequence there waits for an encoder run.

An encoder can only help. If it is lost, refuses, fails or is late, the request is sent with the item's tensors, as it
would be without encoders. One that was late gets no more items until it has released all that it was sent.

Several requests of this gateway that bring the same item wait for one encode request. It is aborted when none is left.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from medialane.gateway.config import GatewayConfig
from medialane.gateway.records import RequestRecord
from medialane.gateway.request.handover_paths import ShmTransport, feature_payload
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import WorkerPool
from medialane.observability.metrics import Metrics
from medialane.routing.cost import EncodeCosts, NewItem, choose_encoder, least_loaded
from medialane.runtime.tasks import SingleFlight, gather_or_cancel
from medialane.types.errors import MedialaneError
from medialane.types.feature import PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.types.tensor import TensorSpec

if TYPE_CHECKING:
    from medialane.gateway.workers.client import RpcClient

logger = logging.getLogger(__name__)

#: `encoded`: its embedding is in the arena. `unkept`: it is not, as there was no memory, or another worker is writing
#: it. `late`, `failed`: the encoder did not do it. `worker`: the worker was expected to do it with less delay.
EncodeOutcome = Literal["encoded", "unkept", "late", "failed", "worker"]


class Encoders:
    """The encoders among `workers`, of this gateway's host. `params` are the sampling parameters of a request to an
    encoder, in the engine's encoding; `mean_sequences` returns the mean number of sequences at a worker."""

    def __init__(
        self,
        workers: WorkerPool,
        transport: ShmTransport,
        *,
        params: bytes,
        costs: EncodeCosts,
        mean_sequences: Callable[[], float],
        config: GatewayConfig,
        metrics: Metrics,
    ) -> None:
        self._workers = workers
        self._transport = transport
        self._params = params
        self._costs = costs
        self._mean_sequences = mean_sequences
        self._config = config
        self._metrics = metrics
        self._flights: SingleFlight[str, EncodeOutcome] = SingleFlight()
        #: Expected work at each encoder. What is known of an encoder goes with its link.
        self._queue_ms: WeakKeyDictionary[WorkerLink, float] = WeakKeyDictionary()
        #: Connections of encoders that were late.
        self._suspended: WeakSet[RpcClient] = WeakSet()
        self._num_sent = 0
        self._gateway_id = secrets.token_hex(4)  # an encoder has several gateways

    def is_ready(self, digest: str) -> bool:
        """Return whether new items may be sent to an encoder whose embeddings have this digest."""
        return bool(digest) and self._config.encode_at != "workers" and bool(self._ready(digest))

    async def encode(
        self,
        prepared: PreparedPrompt,
        items: Sequence[PlacedFeature],
        digest: str,
        record: RequestRecord,
        *,
        trace_headers: dict[str, str] | None = None,
    ) -> frozenset[str]:
        """Have the items of a prompt encoded for which that is best. Return the hashes of items whose
        embeddings are in the arena now.

        The request's scope holds their tensors. Raises nothing; if it is cancelled, encoders stop working for it.
        """
        distinct = {placed.feature.mm_hash: placed for placed in items}

        async def encode(mm_hash: str, placed: PlacedFeature) -> EncodeOutcome:
            started = time.perf_counter()
            work = partial(self._encode, prepared, placed, digest, trace_headers)
            if (outcome := await self._flights.do(mm_hash, work)) != "worker":
                record.embedded(mm_hash, started)
            return outcome

        outcomes = await gather_or_cancel([encode(*each) for each in distinct.items()])
        return frozenset(mm_hash for mm_hash, outcome in zip(distinct, outcomes, strict=True) if outcome == "encoded")

    async def _encode(
        self, prepared: PreparedPrompt, placed: PlacedFeature, digest: str, trace_headers: dict[str, str] | None
    ) -> EncodeOutcome:
        item = NewItem(placed.placeholder.num_embeds, self._num_bytes(placed, digest))
        link = self._choose(item, digest)
        outcome: EncodeOutcome = "worker"
        if link is not None:
            with self._queued(link, self._costs.encode_ms(item)):
                outcome = await self._send(link, prepared, placed, trace_headers)
        self._metrics.encoder_requests.labels(outcome).inc()
        return outcome

    def _choose(self, item: NewItem, digest: str) -> WorkerLink | None:
        links = self._ready(digest)
        queues_ms = [self._queue_ms.get(link, 0.0) + self._of_others_ms(link, item) for link in links]
        if self._config.encode_at == "encoders":
            number = least_loaded(queues_ms)
        else:
            number = choose_encoder(item, queues_ms, self._mean_sequences(), self._costs)
        return None if number is None else links[number]

    async def _send(
        self, link: WorkerLink, prepared: PreparedPrompt, placed: PlacedFeature, trace_headers: dict[str, str] | None
    ) -> EncodeOutcome:
        """Send an item to an encoder, and wait until it is encoded."""
        mm_hash, client = placed.feature.mm_hash, link.client
        try:
            request = self._request(link, prepared, placed)
            remote = link.submit(msgspec.structs.replace(request, trace_headers=trace_headers))
        except MedialaneError as error:
            return _failed(link, error)
        try:
            async with asyncio.timeout(self._config.encode_timeout_s):
                async for delta in remote:
                    if mm_hash in delta.embedded:
                        return "encoded"
            return "unkept"
        except TimeoutError:
            logger.warning("encoder %s is late: it gets no items until it has released the others", link.name)
            if client is not None:
                self._suspended.add(client)
            return "late"
        except MedialaneError as error:
            return _failed(link, error)
        finally:
            remote.abort()

    def _request(self, link: WorkerLink, prepared: PreparedPrompt, placed: PlacedFeature) -> EngineRequest:
        """Return a request whose prompt is the item's placeholder, and the token after it, if there is one: engines of
        some models (Qwen3-Omni) crash if that token is missing."""
        self._num_sent += 1
        request_id = f"encode-{placed.feature.mm_hash[:16]}#{self._gateway_id}-{self._num_sent}"
        place = placed.placeholder
        alone = PlacedFeature(placed.feature, PlaceholderRange(0, place.length, place.is_embed))
        token_ids = prepared.token_ids[place.offset : place.end + 1]
        payload = feature_payload(alone, self._costs.embed_ms)
        prompt = ExpandedPrompt(token_ids, (payload,), prepared.source.options)
        has_passed_holds = self._transport.pass_holds(prompt, link, request_id)
        return EngineRequest(request_id, prompt, self._params, has_passed_holds=has_passed_holds)

    def _ready(self, digest: str) -> list[WorkerLink]:
        """Return the encoders that accept items: ready, with our arena and this digest, and not late."""
        return [
            link
            for link in self._workers.of_role("encoder")
            if link.is_ready and link.same_host and link.encoder == digest and not self._is_suspended(link)
        ]

    def _is_suspended(self, link: WorkerLink) -> bool:
        client = link.client
        if client is None or client not in self._suspended:
            return False
        if not len(client.requests):  # it has released everything
            self._suspended.discard(client)
        return client in self._suspended

    def _of_others_ms(self, link: WorkerLink, item: NewItem) -> float:
        """Return the expected work of other gateways at an encoder, if their items are like this one."""
        client = link.client
        if client is None or client.reports.num_gateways == 1:
            return 0.0
        total = sum(load.num_running + load.num_waiting for load in client.reports.loads)
        return max(0, total - len(client.requests)) * self._costs.encode_ms(item)

    def _num_bytes(self, placed: PlacedFeature, digest: str) -> int:
        """Return the size of an item's embedding."""
        for link in self._ready(digest):
            card = link.client.reports.encoder if link.client is not None else None
            if card is not None:
                shape = (placed.placeholder.num_embeds, card.widths.get(placed.feature.modality, 0))
                return TensorSpec(card.dtype, shape).nbytes
        return 0

    @contextmanager
    def _queued(self, link: WorkerLink, work_ms: float) -> Iterator[None]:
        """Count an item in the queue of its encoder."""
        self._queue_ms[link] = self._queue_ms.get(link, 0.0) + work_ms
        try:
            yield
        finally:
            self._queue_ms[link] -= work_ms


def _failed(link: WorkerLink, error: MedialaneError) -> EncodeOutcome:
    logger.warning("encoder %s has not encoded an item: %s", link.name, error.message)
    return "failed"
