"""vLLM's own OpenAI app in a gateway: endpoints, rendering, speech, pooling."""

from medialane.vllm_bridge.frontend.app import Action, Frontend, build_frontend, take_frontend
from medialane.vllm_bridge.frontend.engine_client import RoutedEngineClient, encode_params
from medialane.vllm_bridge.frontend.http_server import serve_http
from medialane.vllm_bridge.frontend.render import VllmMediaHasher
from medialane.vllm_bridge.frontend.renderer_hook import CONNECTOR
from medialane.vllm_bridge.frontend.segment_cache import (
    MIN_CHARS,
    SegmentCache,
    SegmentSplitter,
    install_segment_cache,
    splitter_of,
)

__all__ = [
    "CONNECTOR",
    "MIN_CHARS",
    "Action",
    "Frontend",
    "RoutedEngineClient",
    "SegmentCache",
    "SegmentSplitter",
    "VllmMediaHasher",
    "build_frontend",
    "encode_params",
    "install_segment_cache",
    "serve_http",
    "splitter_of",
    "take_frontend",
]
