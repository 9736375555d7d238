"""Media that clients send once: from the body of an HTTP request into the store, and from there into other requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack

import pytest
from gateway_parts import Parts, media_endpoints, png
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import (
    AccessKeys,
    AccessMiddleware,
    GatewayConfig,
    ScopeMiddleware,
    current_scope,
    open_scope,
)
from medialane.gateway.http import LEASE_PATH, MEDIA_PATH, error_form, send_error
from medialane.gateway.intake import ExtractedMedia, extract
from medialane.media import MediaConfig
from medialane.observability import Metrics
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.errors import ClientDisconnected, InvalidRequest, MedialaneError, UnknownMedia
from medialane.types.feature import MediaPrompt
from medialane.types.media import MediaRef
from medialane.types.media_lease import MEDIA_SCHEME
from waiting import eventually

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
KEYS = {"search": "key of search", "nightly": "key of nightly"}


class Server:
    """The gateway's middleware around the endpoint, with two tenants."""

    def __init__(self, parts, keys_file, **config):
        lines = [json.dumps({"name": n, "sha256": hashlib.sha256(k.encode()).hexdigest()}) for n, k in KEYS.items()]
        keys_file.write_text("\n".join(lines))
        keys_file.chmod(0o600)
        self.config = GatewayConfig(keys=str(keys_file), **FAST, **config)
        self.intake, self.metrics = Intake(self._route, self.config), Metrics(CollectorRegistry())
        self.routes = media_endpoints(parts, self.config, self.intake.fairness).routes
        self.keys = AccessKeys.load(self.config)
        self.app = ScopeMiddleware(AccessMiddleware(self.intake, self.keys, self._route_of), self.metrics)

    def close(self):
        self.intake.close()
        self.metrics.close()

    def _route_of(self, scope):
        return MEDIA_PATH if scope["path"] == MEDIA_PATH else LEASE_PATH

    async def _route(self, scope, receive, send):
        """Stands in for vLLM's app."""
        try:
            endpoint = self.routes[f"{scope['method']} {self._route_of(scope)}"]
            await endpoint({**scope, "path_params": {"hash": scope["path"].rpartition("/")[2]}}, receive, send)
        except MedialaneError as error:
            current_scope().fail(error)
            await send_error(send, error, error_form(scope))

    async def call(self, method, path, body=(), *, tenant="search", query="", headers=()):
        """Return status and JSON, and how many pieces of the body were read. None as a piece is a disconnect."""
        pieces, num_read, sent = list(body), 0, []

        async def receive():
            nonlocal num_read
            if num_read >= len(pieces):
                await asyncio.Event().wait()
            num_read += 1
            piece = pieces[num_read - 1]
            if callable(piece):
                await piece()
                piece = b""
            if piece is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": piece, "more_body": num_read < len(pieces)}

        async def send(message):
            sent.append(message)

        key = [(b"authorization", b"Bearer " + KEYS.get(tenant, tenant).encode())]
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        await self.app({**scope, "headers": [*key, *headers]}, receive, send)
        status = sent[0]["status"]
        data = b"".join(message.get("body", b"") for message in sent)
        return status, json.loads(data), num_read

    async def put(self, data, *, size=3000, **options):
        pieces = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
        status, media, _ = await self.call("PUT", MEDIA_PATH, pieces, **options)
        assert status == 200, media
        return media


@pytest.fixture
async def world(arena, preparers, worker, tmp_path):
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(Parts(arena, preparers, [worker], config=GatewayConfig(**FAST)))
        server = Server(parts, tmp_path / "keys")
        stack.callback(server.close)
        yield parts, server
        parts.store.leases.close()


async def answer(parts, server, url, *, tenant="search", salt="", describes=False):
    """Answer a chat request with this image, or only describe it."""
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], **({"cache_salt": salt} if salt else {})}
    with open_scope() as scope:
        scope.has_own_cache = True
        scope.tenant = server.keys.tenant(hashlib.sha256(KEYS[tenant].encode()).digest())
        intake = extract(json.dumps(body).encode(), MediaConfig(), references=scope.references)
        scope.extracted = ExtractedMedia(tuple(map(scope.owned, intake.refs)))
        items = tuple(map(parts.gateway.resolve, [scope.references.text(0)]))
        make = parts.gateway.describe if describes else parts.gateway.prepare
        prepared = await make(MediaPrompt([1, 2, PLACEHOLDER_TOKEN], items))
        assert prepared.is_predicted == describes
        return prepared.mm_hashes, scope.timeline.cache


async def test_reference_stands_for_the_image_and_only_for_its_tenant(world):
    parts, server = world
    media = await server.put(png(), headers=[(b"content-type", b"image/png")])
    assert media["size"] == {"bytes": len(png()), "width": 60, "height": 40}
    url = MEDIA_SCHEME + media["hash"]
    hashes, cache = await answer(parts, server, url)
    assert cache == "miss"
    await eventually(lambda: parts.num_held == 1)
    parts.arena.clear()  # the feature is made again from the bytes
    assert await answer(parts, server, url) == (hashes, "miss")
    assert await answer(parts, server, url) == (hashes, "hit")
    assert (await answer(parts, server, url, salt="version 2"))[0] != hashes
    with pytest.raises(UnknownMedia) as raised:
        await answer(parts, server, url, tenant="nightly")
    assert raised.value.param == "messages[0].content[0].image_url"
    status, error, _ = await server.call("GET", f"{MEDIA_PATH}/{media['hash']}", tenant="nightly")
    assert (status, error["error"]["code"]) == (404, "unknown_media")


async def test_reference_is_described_for_its_tenant_only_and_as_it_is_prepared(world):
    parts, server = world
    url = MEDIA_SCHEME + (await server.put(png()))["hash"]
    for _ in range(2):
        described, _ = await answer(parts, server, url, describes=True)
        with pytest.raises(UnknownMedia):
            await answer(parts, server, url, tenant="nightly", describes=True)
    assert described == (await answer(parts, server, url))[0]


async def test_body_is_not_read_before_it_is_accepted(world):
    parts, server = world
    refused = [
        (401, {"tenant": "stranger"}),
        (413, {"headers": [(b"content-length", b"999999999")]}),
        (413, {"headers": [(b"content-length", str(5 << 20).encode())]}),  # more than a tenant may keep
        (400, {"query": "ttl=0"}),
        (400, {"query": "ttl=1e9"}),
        (400, {"query": "cache_salt=x"}),
        (400, {"query": "uuid=%ff"}),
        (400, {"headers": [(b"x-cache-salt", b"\xff")]}),
        (400, {"headers": [(b"content-length", b"0")]}),
    ]
    for status, options in refused:
        found = await server.call("PUT", MEDIA_PATH, [b"never read"], **options)
        assert (found[0], found[2]) == (status, 0), (options, found)
    assert parts.store.leases.stats.num_bytes == 0


async def test_server_that_requires_salts_requires_one_here(world, tmp_path):
    parts, _ = world
    server = Server(parts, tmp_path / "salted", require_salt=True)
    status, error, num_read = await server.call("PUT", MEDIA_PATH, [b"never read"])
    assert (status, error["error"]["param"], num_read) == (400, "cache_salt", 0)
    media = await server.put(png(), headers=[(b"x-cache-salt", b"mine")])
    url = MEDIA_SCHEME + media["hash"]
    await answer(parts, server, url, salt="mine")
    with pytest.raises(UnknownMedia):
        await answer(parts, server, url, salt="other")
    path = LEASE_PATH.replace("{hash}", media["hash"])
    for method in ("GET", "POST", "DELETE"):
        for headers in ((), [(b"x-cache-salt", b"other")]):
            status, error, _ = await server.call(method, path, [b""], headers=headers)
            assert (status, error["error"]["code"]) == (404, "unknown_media")
    for method in ("GET", "POST", "DELETE"):
        assert (await server.call(method, path, [b""], headers=[(b"x-cache-salt", b"mine")]))[0] == 200
    server.close()


async def test_only_media_are_published(world):
    parts, _ = world
    feature = MediaRef("image", "features.mm_hashes.image[0]", content="a" * 64, is_feature=True)
    with open_scope() as scope:
        scope.extracted = ExtractedMedia((feature,))
        with pytest.raises(InvalidRequest, match="must have images"):
            await parts.gateway.publish_images()


async def test_truncated_body_leaves_nothing(world):
    parts, server = world
    for headers in ((), [(b"content-length", b"5000")]):
        status, error, _ = await server.call("PUT", MEDIA_PATH, [png()[:3000], None], headers=headers)
        assert (status, error["error"]["code"]) == (ClientDisconnected.status, ClientDisconnected.code)
        await eventually(lambda: parts.store.leases.stats.num_bytes == parts.arena.stats().num_reservations == 0)


async def test_media_that_outgrow_their_range_arrive_whole(world):
    parts, server = world
    data = png(900, 500, seed=3)  # noise: 1.3 MB
    assert len(data) > 1 << 20
    chunked = await server.put(data, size=100_000)
    declared = await server.put(data, size=100_000, headers=[(b"content-length", str(len(data)).encode())])
    assert chunked == {**declared, "expires": chunked["expires"]}
    assert (await answer(parts, server, MEDIA_SCHEME + chunked["hash"]))[1] == "miss"


async def test_more_bytes_than_a_tenant_may_keep_are_refused_while_they_arrive(world):
    parts, server = world
    status, error, num_read = await server.call("PUT", MEDIA_PATH, [bytes(1 << 20)] * 300)
    assert status == 413, error
    assert num_read < 300
    await eventually(lambda: parts.store.leases.stats.num_bytes == parts.arena.stats().num_reservations == 0)


async def test_store_that_is_lost_while_it_receives_gives_503(world):
    parts, server = world

    async def lose():
        await parts.store.link._client.close()  # noqa: SLF001 - as if the store had been killed

    async def lose_and_wait():
        await lose()
        await asyncio.Event().wait()

    for then in (lose, lose_and_wait):  # nothing is written to ranges of the earlier connection, however late it comes
        status, error, _ = await server.call("PUT", MEDIA_PATH, [png()[:3000], then, png()[3000:]])
        assert (status, error["error"]["code"]) == (503, "media_store_unavailable")
    await server.put(png())
