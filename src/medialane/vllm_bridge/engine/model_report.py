"""What can be said about a model before a worker runs it: the stage of its media, and whether embeddings are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from vllm.config import KVEventsConfig
from vllm.usage.usage_lib import UsageContext

from medialane.vllm_bridge.engine.engine_options import engine_args
from medialane.vllm_bridge.items.stage_fitness import summary, unfit_reasons
from medialane.vllm_bridge.seams import encoder_cache
from medialane.vllm_bridge.seams.multimodal import new_processor


class ModelReport(TypedDict):
    """`limits` are the most items of each modality in a prompt; `no_features` is why stage `features` is not used, for
    some modality or all, `no_embeddings` why embeddings are not kept; empty if nothing is known to prevent it."""

    architecture: str
    takes_media: bool
    limits: dict[str, int]
    no_features: str
    no_embeddings: str


def model_report(model: str, vllm_args: Sequence[str]) -> ModelReport:
    """Return the report; loads configuration and processor, no weights. Raises what vLLM raises for its flags."""
    config = engine_args(model, vllm_args, kv_events=KVEventsConfig()).create_engine_config(
        UsageContext.UNKNOWN_CONTEXT
    )
    report = ModelReport(
        architecture=config.model_config.architecture,
        takes_media=config.model_config.supports_multimodal_inputs,
        limits={},
        no_features="",
        no_embeddings=encoder_cache.unfit_reason(config),
    )
    if report["takes_media"]:
        processor = new_processor(config.model_config)
        report["limits"] = dict(processor.info.allowed_mm_limits)
        report["no_features"] = summary(unfit_reasons(processor))
    return report
