"""What preparers and workers make of a model, for tests of several folders: made as their processes make it."""

import msgspec
from vllm.config import ModelConfig, VllmConfig
from vllm.renderers import BaseRenderer

from medialane.prepare import FactoryConfig, Processor
from medialane.types.media import FrameSampler
from medialane.vllm_bridge.engine.engine_options import engine_args
from medialane.vllm_bridge.engine.unexpanded_prompt import UnexpandedRenderer
from medialane.vllm_bridge.learned import ModelProfile
from medialane.vllm_bridge.learned.processor_factory import RequestProcessor, build_processor


def preparers_processor(model: object, *flags: str) -> Processor:
    """What a store's fork server builds."""
    return build_processor(msgspec.json.encode(FactoryConfig(str(model), list(flags))))


def request_processor(profile: ModelProfile, sampler: FrameSampler | None = None) -> RequestProcessor:
    return RequestProcessor(profile, sampler)


def engine_config(model: object, *flags: str) -> VllmConfig:
    """vLLM's configuration of a worker's engine."""
    return engine_args(str(model), list(flags)).create_engine_config()


def unexpanded_renderer(
    renderer: BaseRenderer | None, profile: ModelProfile | None = None, *, config: ModelConfig | None = None
) -> UnexpandedRenderer:
    """What renders prompts in stages `decoded` and `url` in a worker, with the configuration of `renderer` if none is
    given. The owner calls `close`."""
    return UnexpandedRenderer(renderer, config or renderer.model_config, profile)
