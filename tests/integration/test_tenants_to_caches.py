"""What an answer tells a tenant of what others have cached: nothing, from its key to the blocks of the engine."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from contextlib import AsyncExitStack, aclosing

import msgspec
import pytest
from gateway_parts import Parts, png, prompt, ref, request
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import AccessKeys, AccessMiddleware, GatewayConfig, ScopeMiddleware, current_scope, open_scope
from medialane.gateway.intake import ExtractedMedia
from medialane.observability import Metrics
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.errors import ClientDisconnected, MedialaneError, UnknownMediaUuid
from medialane.types.feature import MediaPrompt
from waiting import eventually

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
PATH = "/v1/chat/completions"
TOKENS = list(range(10, 200))


class Server:
    """The gateway's middleware, and in place of vLLM's app one that answers with what its client gets to know: how many
    tokens were cached, the outcome at the media's cache, the item's hash, the output's tokens."""

    def __init__(self, parts, config, api_keys=()):
        self.parts = parts
        self.intake, self.metrics = Intake(self._answer, config), Metrics(CollectorRegistry())
        access = AccessMiddleware(self.intake, AccessKeys.load(config, api_keys), lambda scope: scope["path"])
        self.app = ScopeMiddleware(access, self.metrics)
        self.result = None

    def close(self):
        self.intake.close()
        self.metrics.close()

    async def _answer(self, _scope, receive, _send):
        body = json.loads((await receive())["body"])
        scope, prepared, token_ids, cached, tokens = current_scope(), None, TOKENS, [], []
        try:
            if scope.extracted.refs:
                item = await self.parts.gateway.by_uuid(scope.references.text(0))
                prepared = await self.parts.gateway.prepare(MediaPrompt([1, 2, PLACEHOLDER_TOKEN, *TOKENS], (item,)))
                token_ids = prepared.token_ids
        except MedialaneError as error:
            self.result = error
            return
        asked = msgspec.structs.replace(request("r", token_ids), cache_salt=body.get("cache_salt"))
        async with aclosing(self.parts.gateway.generate(asked, prepared)) as deltas:
            async for delta in deltas:
                cached.append(delta.num_cached_tokens)
                tokens += delta.completions[0].token_ids
        hashes = () if prepared is None else prepared.mm_hashes
        self.result = cached[0], scope.timeline.cache, hashes, tokens

    async def ask(self, key, *, data=None, uuid=None, salt=None):
        """Return what the client gets to know, or its error."""
        content = [{"type": "text", "text": "what is this"}]
        if data is not None or uuid is not None:
            url = None if data is None else "data:image/png;base64," + base64.b64encode(data).decode()
            content = [{"type": "image_url", "image_url": {"url": url}, **({} if uuid is None else {"uuid": uuid})}]
        body = {"messages": [{"role": "user", "content": content}], **({} if salt is None else {"cache_salt": salt})}
        pieces = [json.dumps(body).encode()]

        async def receive():
            if not pieces:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": pieces.pop()}

        async def send(message):
            raise AssertionError(message)

        headers = [(b"authorization", b"Bearer " + key.encode())]
        self.result = None
        await self.app({"type": "http", "method": "POST", "path": PATH, "headers": headers}, receive, send)
        return self.result


@pytest.fixture
async def serving(arena, preparers, worker, tmp_path):
    """Returns a server with two tenants, or with API keys."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(Parts(arena, preparers, [worker], config=GatewayConfig(**FAST)))

        def serve(api_keys=(), **config):
            if not api_keys:
                path = tmp_path / "keys"
                named = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("ann", "ben")]
                path.write_text("\n".join(map(json.dumps, named)))
                path.chmod(0o600)
                config["keys"] = str(path)
            server = Server(parts, GatewayConfig(**FAST, **config), api_keys)
            stack.callback(server.close)
            return server

        yield serve
        parts.store.leases.close()


@pytest.mark.parametrize("api_keys", [(), ("ann", "ben")])
@pytest.mark.parametrize("salt", [None, "of both"])
@pytest.mark.parametrize("data", [None, png()])
async def test_answer_does_not_tell_what_another_key_has_cached(serving, api_keys, salt, data):
    server = serving(api_keys)
    first = await server.ask("ann", data=data, salt=salt)
    again = await server.ask("ann", data=data, salt=salt)
    assert again[0] > 0, "the engine has the prompt of the same tenant"
    other = await server.ask("ben", data=data, salt=salt)
    assert other[:2] == first[:2] == (0, "none" if data is None else "miss")
    assert first[3] == again[3] == other[3], "the answer is the same whatever is cached"
    if data is not None:
        assert again[1] == "hit"
        assert again[2] == first[2] != other[2]


async def test_own_salt_still_separates_what_one_tenant_caches(serving):
    server = serving()
    await server.ask("ann", data=png(), salt="one")
    assert (await server.ask("ann", data=png(), salt="two"))[:2] == (0, "miss")
    assert (await server.ask("ann", data=png()))[:2] == (0, "miss")
    assert (await server.ask("ann", data=png(), salt="one"))[1] == "hit"


async def test_uuid_is_that_of_the_tenant(serving):
    server = serving()
    first = await server.ask("ann", data=png(), uuid="mine")
    assert (await server.ask("ann", uuid="mine"))[2] == first[2]
    assert isinstance(await server.ask("ben", uuid="mine"), UnknownMediaUuid)


async def test_operator_may_have_one_cache_for_all(serving):
    server = serving(share_cache=True)
    first = await server.ask("ann", data=png())
    other = await server.ask("ben", data=png())
    assert (first[1], other[1], other[2]) == ("miss", "hit", first[2])
    assert other[0] > 0


async def test_server_without_keys_has_one_cache_whatever_key_is_sent(arena, preparers, worker):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(**FAST)) as parts:
        server = Server(parts, GatewayConfig(**FAST))
        await server.ask("ann", data=png())
        assert (await server.ask("ben", data=png()))[1] == "hit"
        server.close()
        parts.store.leases.close()


async def test_tensors_that_nobody_reads_are_released_in_time(arena, preparers, worker, caplog):
    """A client reads some of a response, made of what its request holds in the arena, and then no more."""
    config = GatewayConfig(**FAST, min_body_rate_grace_s=0.2, min_body_rate_bytes_per_s=1e6)
    async with Parts(arena, preparers, [worker], config=config) as parts:
        with open_scope() as scope:
            scope.extracted = ExtractedMedia((ref(png()),))
            prepared = await parts.gateway.prepare(prompt(png()))
            (feature,) = [placed.feature for placed in prepared.features]
            tensors = parts.gateway.tensors(feature)
            assert parts.num_held > 0
            with pytest.raises(ClientDisconnected):
                async with asyncio.timeout(5), parts.gateway.sending(sum(map(len, tensors))):
                    await asyncio.Event().wait()
        assert scope.error_code == "request_timeout"
        await eventually(lambda: parts.num_held == 0)
        assert "has not read" in caplog.text
        parts.store.leases.close()
