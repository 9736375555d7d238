"""vLLM's own OpenAI app in a gateway: endpoints, rendering, speech, pooling."""

from medialane.vllm_bridge.frontend.app import Action, Frontend
from medialane.vllm_bridge.frontend.engine_client import RoutedEngineClient, encode_params

__all__ = [
    "Action",
    "Frontend",
    "RoutedEngineClient",
    "encode_params",
]
