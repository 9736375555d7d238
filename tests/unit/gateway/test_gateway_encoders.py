"""What is remembered of encoders, through the door; the rest is in `tests/seams/test_encoders_to_workers.py`."""

import asyncio
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from medialane.core.feature import Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.core.media import MediaSize
from medialane.core.request import OutputDelta
from medialane.gateway import Encoders, GatewayConfig, ShmTransport
from medialane.gateway.requests import RequestRecord
from medialane.observability import Metrics
from medialane.routing import EncodeCosts, RoutingConfig

DIGEST = "d" * 64
PLACED = PlacedFeature(Feature("image", "h" * 64, b"", (), MediaSize()), PlaceholderRange(0, 4))
PREPARED = PreparedPrompt([1] * 4, (PLACED,), (PLACED.feature.mm_hash,), MediaPrompt([1], ()), None)


class Name(str):
    """Can be referenced weakly."""

    __slots__ = ("__weakref__",)


class Client:
    def __init__(self):
        self.reports = SimpleNamespace(encoder=None, num_gateways=1, loads=())
        self.requests = [self.reports]  # not yet released


class Remote:
    """An encode request. One that is late never ends."""

    def __init__(self, is_late):
        self._is_late = is_late

    async def __aiter__(self):
        if self._is_late:
            await asyncio.Event().wait()
        yield OutputDelta("r", [], embedded=(PLACED.feature.mm_hash,))

    def abort(self):
        pass


class Link:
    is_ready = same_host = True
    encoder = DIGEST
    store_client = ""
    encoder_card = None

    def __init__(self, number, is_late):
        self.name, self.client, self._is_late = Name(f"host:{number}"), Client(), is_late

    def submit(self, _request):
        return Remote(self._is_late)


class Pool:
    def __init__(self):
        self.links = []

    def of_role(self, _role):
        return self.links


@pytest.mark.parametrize("is_late", [False, True])
async def test_nothing_is_remembered_of_an_encoder_that_left(is_late, caplog):
    """The default name of one contains its process id: each restart has another."""
    caplog.set_level(logging.CRITICAL, "medialane.gateway.encoders")  # records would hold the names
    pool, metrics = Pool(), Metrics(CollectorRegistry())
    encoders = Encoders(
        pool,
        ShmTransport(None),
        params=b"",
        costs=EncodeCosts.of(RoutingConfig()),
        mean_sequences=lambda: 0.0,
        config=GatewayConfig(encode_at="encoders", encode_timeout_s=0.01),
        metrics=metrics,
    )
    pool.links = [Link(1, is_late), Link(2, is_late)]
    kept = [weakref.ref(kept) for link in pool.links for kept in (link, link.name, link.client)]
    for _ in range(2):
        encoded = await encoders.encode(PREPARED, [PLACED], DIGEST, RequestRecord())
        assert bool(encoded) != is_late
    assert encoders.is_ready(DIGEST) != is_late, "both were late"
    pool.links = []
    await asyncio.sleep(0)
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)
    metrics.close()
