"""vLLM's own OpenAI app in a gateway: endpoints, rendering, speech, pooling."""

from medialane.vllm_bridge.frontend.app import Action, Frontend, build_frontend, take_frontend
from medialane.vllm_bridge.frontend.engine_client import RoutedEngineClient, encode_params
from medialane.vllm_bridge.frontend.http_server import serve_http
from medialane.vllm_bridge.frontend.render import VllmMediaHasher
from medialane.vllm_bridge.frontend.renderer_hook import CONNECTOR

__all__ = [
    "CONNECTOR",
    "Action",
    "Frontend",
    "RoutedEngineClient",
    "VllmMediaHasher",
    "build_frontend",
    "encode_params",
    "serve_http",
    "take_frontend",
]
