"""vLLM's whole app over a fake backend, with our middleware, and a client for it."""

import base64

import httpx
from fake_backend import FakeBackend
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.middleware import Middleware

from medialane.gateway import AccessKeys, AccessMiddleware, GatewayConfig, IntakeMiddleware, ScopeMiddleware
from medialane.media import MediaConfig
from medialane.observability import Metrics
from medialane.runtime.tasks import LoopFairness
from medialane.vllm_bridge.frontend import take_frontend

VLLM_ARGS = [
    "--max-model-len=8192",
    "--enforce-eager",
    "--skip-mm-profiling",
    '--limit-mm-per-prompt={"image":8,"video":1}',
    "--trust-request-mm-kwargs",
    "--api-key=secret",
    "--enable-mm-embeds",
    "--enable-prompt-tokens-details",
    "--enable-scale-out",
    "--middleware=counted_middleware.CountedMiddleware",
]

DATA = b"what a client sent, base64 on its way " * 50
BASE64 = base64.b64encode(DATA).decode()
DATA_URL = "data:image/png;base64," + BASE64
KEY = {"authorization": "Bearer secret"}


def with_keys(keys):
    return lambda route_of: Middleware(AccessMiddleware, keys=keys, route_of=route_of)


def _collectors():
    return REGISTRY._names_to_collectors  # prometheus_client has no other list of what can be unregistered


def forget_http_metrics():
    """Metrics of an earlier app of this process, which would stay the only ones to be counted."""
    found = {metric for name, metric in _collectors().items() if name.startswith("http_")}
    for metric in found:
        REGISTRY.unregister(metric)


class Server:
    """Started by `start`, stopped by `close`."""

    @classmethod
    async def start(cls, model, vllm_args=VLLM_ARGS, tasks=None, make_backend=None, **options):
        server = cls()
        server.model = model
        server.frontend = take_frontend(model, vllm_args)
        hf_config = server.frontend.config.model_config.hf_config.to_dict()
        make = make_backend or (lambda _frontend: FakeBackend(hf_config.get("image_token_id")))
        server.backend = make(server.frontend)
        server.registry = CollectorRegistry()
        server.fairness = LoopFairness()
        forget_http_metrics()
        server.app = await server.frontend.app(
            server.backend,
            outer=Middleware(ScopeMiddleware, metrics=Metrics(server.registry)),
            access=with_keys(AccessKeys.load(GatewayConfig(), server.frontend.api_keys)),
            inner=[Middleware(IntakeMiddleware, media=MediaConfig(), config=GatewayConfig(), fairness=server.fairness)],
            actions={
                "POST /medialane/publish": server.backend.publish_images,
                "GET /medialane/decisions": server.backend.page,
            },
            tasks=tasks,
            fairness=server.fairness,
            **options,
        )

        @server.app.get("/unforeseen")
        async def unforeseen():
            raise ZeroDivisionError

        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        server.client = httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=KEY)
        return server

    async def close(self):
        await self.client.aclose()
        self.fairness.close()
        self.frontend.renderer.shutdown()

    def body(self, *parts, **options):
        content = [{"type": "text", "text": "look"}, *parts]
        return {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8} | options

    async def chat(self, *parts, **options):
        return await self.client.post("/v1/chat/completions", json=self.body(*parts, **options))

    def num_errors(self, code):
        return self.registry.get_sample_value("medialane_request_errors_total", {"code": code}) or 0


def image(url=DATA_URL, **more):
    return {"type": "image_url", "image_url": {"url": url}, **more}
