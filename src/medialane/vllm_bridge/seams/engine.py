"""vLLM's front end in a worker, and the messages between it and EngineCore."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.stats import RequestStateStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    # Importing it loads EngineCore. A gateway, which also encodes messages, must not: `plugin.register` checks for it.
    from vllm.v1.engine.async_llm import AsyncLLM


class ItemEncoder(MsgpackEncoder):  # type: ignore[misc]  # vllm is not typed
    """vLLM's encoder, with a public method for multimodal items, which subclasses override."""

    def encode_item(self, item: MultiModalKwargsItem) -> dict[str, Any]:
        return super()._encode_mm_item(item)

    def _encode_mm_item(self, item: MultiModalKwargsItem) -> dict[str, Any]:
        return self.encode_item(item)


class ItemDecoder(MsgpackDecoder):  # type: ignore[misc]  # vllm is not typed
    """vLLM's decoder, with a public method for multimodal items, which subclasses override."""

    def decode_item(self, obj: dict[str, Any]) -> MultiModalKwargsItem:
        return super()._decode_mm_item(obj)

    def _decode_mm_item(self, obj: dict[str, Any]) -> MultiModalKwargsItem:
        return self.decode_item(obj)


class FrontEndInputs(InputProcessor):  # type: ignore[misc]  # vllm is not typed
    """The input processor for vLLM's app, whose beam search queries whether outputs are watermarked. It lacks what only
    an engine needs: workers validate requests."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config


def encode_with(llm: AsyncLLM, encoder: type[ItemEncoder]) -> None:
    """Make the front end encode its messages to EngineCore with `encoder`."""
    inner = llm.engine_core.encoder
    llm.engine_core.encoder = encoder(inner.size_threshold, inner.oob_tensor_consumer)


async def call_every_engine(llm: AsyncLLM, method: str, *args: Any) -> list[Any]:
    """Call a method of every EngineCore, between two of its steps. Raises EngineDeadError, or Exception if the method
    fails."""
    return list(await llm.engine_core.call_utility_all_async(method, *args))


def is_engine_dead(llm: AsyncLLM) -> bool:
    return bool(llm.engine_core.resources.engine_dead)


def num_unfinished_by_rank(llm: AsyncLLM) -> list[int]:
    """Return the number of unfinished requests of each data-parallel rank, for an engine with several."""
    core = llm.engine_core
    num_by_engine = Counter(core.reqs_in_flight.get(request_id) for request_id in llm.output_processor.request_states)
    return [num_by_engine[engine] for engine in core.core_engines]


def stop_listening(llm: AsyncLLM) -> None:
    """Stop the output handler before a shutdown, which it would otherwise log as the engine's death."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()


def encoder_cache_tokens(llm: AsyncLLM) -> int:
    return int(llm.input_processor.mm_encoder_cache_size)
