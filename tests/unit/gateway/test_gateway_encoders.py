"""What is remembered of encoders, through the door; the rest is in `tests/integration/test_encoders_to_workers.py`."""

import asyncio
import gc
import logging
import weakref

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from medialane.gateway import Encoders, GatewayConfig, ShmTransport, WorkerPool
from medialane.gateway.records import RequestRecord
from medialane.observability import Metrics
from medialane.routing import EncodeCosts, RoutingConfig
from medialane.testing.fake_worker import FAKE_CARD, FakeLink
from medialane.types.feature import Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.types.media import MediaSize
from medialane.types.request import EncoderCard, OutputDelta

DIGEST = "d" * 64
PLACED = PlacedFeature(Feature("image", "h" * 64, b"", (), MediaSize()), PlaceholderRange(0, 4))
PREPARED = PreparedPrompt([1] * 4, (PLACED,), (PLACED.feature.mm_hash,), MediaPrompt([1], ()), None)


CARD = msgspec.structs.replace(FAKE_CARD, role="encoder", encoder=EncoderCard(DIGEST, "bfloat16", {"image": 8}))


class Name(str):
    """Can be referenced weakly."""

    __slots__ = ("__weakref__",)


def encoder(number, *, is_late):
    """One that is late never answers."""
    link = FakeLink(Name(f"host:{number}"), CARD)
    link.join()
    if not is_late:
        encoded = OutputDelta("r", [], embedded=(PLACED.feature.mm_hash,))
        link.worker.requests.answer = lambda remote: remote.on_output(encoded, 1)
    return link


@pytest.mark.parametrize("is_late", [False, True])
async def test_nothing_is_remembered_of_an_encoder_that_left(is_late, caplog):
    """The default name of one contains its process id: each restart has another."""
    caplog.set_level(logging.CRITICAL, "medialane.gateway")  # records would hold the names
    pool, metrics = WorkerPool([encoder(number, is_late=is_late) for number in (1, 2)]), Metrics(CollectorRegistry())
    encoders = Encoders(
        pool,
        ShmTransport(None),
        params=b"",
        costs=EncodeCosts.of(RoutingConfig()),
        mean_sequences=lambda: 0.0,
        config=GatewayConfig(encode_at="encoders", encode_timeout_s=0.01),
        metrics=metrics,
    )
    kept = [weakref.ref(kept) for link in pool.links.values() for kept in (link, link.name, link.client)]
    for _ in range(2):
        encoded = await encoders.encode(PREPARED, [PLACED], DIGEST, RequestRecord())
        assert bool(encoded) != is_late
    assert encoders.is_ready(DIGEST) != is_late, "both were late"
    pool.links.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)
    metrics.close()
