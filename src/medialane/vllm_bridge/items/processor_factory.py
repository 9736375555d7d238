"""The factory of a model's processor, which a fork server calls (see `prepare.pool`)."""

from __future__ import annotations

from typing import Any

import msgspec
import numba
import torch
from huggingface_hub import constants

from medialane.core.process.phase import enter_phase
from medialane.prepare.processor import FactoryConfig, NoProcessor, Processor
from medialane.vllm_bridge.arguments import create_model_config, parse_vllm_args
from medialane.vllm_bridge.items.frame_sampler import VllmFrameSampler
from medialane.vllm_bridge.items.request_processor import RequestProcessor
from medialane.vllm_bridge.items.settings import processor_settings
from medialane.vllm_bridge.items.stage_fitness import unfit_reasons
from medialane.vllm_bridge.seams.multimodal import new_processor


def build_processor(config: bytes) -> Processor:
    """Build and warm up a fork server's processor from a JSON `FactoryConfig`. The process stays single-threaded."""
    enter_phase("loading the model's processor")
    factory_config = msgspec.json.decode(config, type=FactoryConfig)
    torch.set_num_threads(1)
    _compile_loops_for_one_thread()
    model_config = create_model_config(parse_vllm_args(factory_config.model, factory_config.vllm_args))
    if not model_config.supports_multimodal_inputs:
        return NoProcessor()
    engine_processor = new_processor(model_config)
    takes_video = "video" in engine_processor.info.supported_mm_limits
    sampler = VllmFrameSampler(model_config, max_sampled_frames=factory_config.max_sampled_frames)
    settings = processor_settings(model_config, engine_processor)
    processor = RequestProcessor(engine_processor, sampler if takes_video else None, settings)
    processor.warm_up(without=unfit_reasons(engine_processor))
    constants.HF_HUB_OFFLINE = True  # preparers have no network: huggingface_hub must not check its cache for updates
    return processor


def _compile_loops_for_one_thread() -> None:
    """Make numba compile functions that other libraries declare parallel (Kimi-K2.5's image processor) as ordinary ones
    from now on, with equal results: numba's threads do not survive a fork. Such a function is not cached: the parallel
    one has the same name in the cache."""
    compile_parallel = numba.njit

    def njit(*args: Any, **options: Any) -> Any:
        alone = {"parallel": False, "cache": False} if options.get("parallel") else {}
        return compile_parallel(*args, **options | alone)

    numba.njit = njit
