"""vLLM's own OpenAI app in a gateway: endpoints, rendering, speech, pooling."""

from medialane.vllm_bridge.frontend.app import Frontend
from medialane.vllm_bridge.frontend.engine_client import RoutedEngineClient, encode_params
from medialane.vllm_bridge.frontend.renderer_hook import CONNECTOR

__all__ = ["CONNECTOR", "Frontend", "RoutedEngineClient", "encode_params"]
