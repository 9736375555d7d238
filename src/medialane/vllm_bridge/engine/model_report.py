"""What can be said about a model before a worker runs it: how its media are handled, if embeddings are kept."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from vllm.config import KVEventsConfig
from vllm.usage.usage_lib import UsageContext

from medialane.vllm_bridge.engine.engine_options import engine_args
from medialane.vllm_bridge.items.processor_profile import ProcessorProfile, ProfileReport
from medialane.vllm_bridge.seams import encoder_cache
from medialane.vllm_bridge.seams.multimodal import new_processor


class ModelReport(msgspec.Struct, frozen=True):
    """`media` is None if the model takes none; `no_embeddings` is why embeddings are not kept, empty if nothing is
    known to prevent it."""

    architecture: str
    media: ProfileReport | None
    no_embeddings: str


def model_report(model: str, vllm_args: Sequence[str]) -> ModelReport:
    """Return the report; loads configuration and processor, no weights. Raises what vLLM raises for its flags."""
    config = engine_args(model, vllm_args, kv_events=KVEventsConfig()).create_engine_config(
        UsageContext.UNKNOWN_CONTEXT
    )
    takes_media = config.model_config.supports_multimodal_inputs
    return ModelReport(
        architecture=config.model_config.architecture,
        media=ProcessorProfile(new_processor(config.model_config)).report() if takes_media else None,
        no_embeddings=encoder_cache.unfit_reason(config),
    )
