"""A server that answers as vLLM's does, from the words of the prompt; a subclass may be slow, or wrong about some."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

CHAT = "/v1/chat/completions"
REPORT = {
    "items": [{"cache": "hit", "embedding": "loaded"}],
    "stage": "features",
    "transport": "shm",
    "copied_bytes": 300,
    "times_ms": {"route": 1.5, "prefill": 20.0},
    "routing": {"num_tokens": 40, "engine_cached_tokens": 32},
}


class FakeVllm:
    """`bodies` are what it got, the warm-up's excluded."""

    def __init__(self, *, reports=False):
        self.bodies = []
        self.headers = []
        self._reports = reports
        self.app = web.Application(client_max_size=1 << 28)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/openapi.json", self._openapi)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_post("/v1/embeddings", self._embeddings)
        self.app.router.add_post(CHAT, self._chat)
        self.app.router.add_post("/v1/completions", self._chat)

    @asynccontextmanager
    async def served(self):
        async with TestServer(self.app) as server:
            yield str(server.make_url("")).rstrip("/")

    def tokens(self, body):
        """The answer's token ids."""
        words = json.dumps(body.get("messages") or body["prompt"])
        return [(hash(words) + n) % 1000 for n in range(body.get("max_tokens", 4))]

    async def before(self, body):
        """Called before the first token."""

    async def _models(self, _request):
        return web.json_response({"data": [{"id": "served-name"}]})

    async def _openapi(self, _request):
        return web.json_response({"properties": {"return_token_ids": {}}})

    async def _metrics(self, _request):
        count = len(self.bodies)
        return web.Response(
            text="# TYPE vllm:prefix_cache_queries counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {count * 10}.0\n'
            f'vllm:prefix_cache_queries_total{{engine="1"}} {count * 10}.0\n'
            f"# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total {count * 5}.0\n"
        )

    async def _embeddings(self, request):
        body = await request.json()
        return web.json_response({"data": [{"embedding": [0.5, len(str(body["input"]))]}], "created": id(request)})

    async def _chat(self, request):
        body = await request.json()
        if "return_token_ids" not in body:
            return web.json_response({"choices": [{"message": {"content": "warm"}}]})
        self.bodies.append(body)
        self.headers.append(request.headers)
        if "refuse" in json.dumps(body):
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        await self.before(body)
        tokens = self.tokens(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in tokens:
            await self._event(response, {"choices": [_choice(body, f"w{token} ", token)]})
            await asyncio.sleep(0.001)  # time: between tokens
        usage = {"prompt_tokens": 40, "completion_tokens": len(tokens)}
        report = {"medialane": REPORT} if self._reports and request.headers.get("X-Medialane-Report") else {}
        await self._event(response, {"choices": [], "usage": usage, **report})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response, event):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _choice(body, text, token):
    said = {"text": text} if "prompt" in body else {"delta": {"content": text}}
    return {"index": 0, "token_ids": [token], **said}
