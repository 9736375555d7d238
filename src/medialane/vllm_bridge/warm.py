"""What vLLM needs of a process that others are forked from, and of its forks: modules that vLLM's front end and
EngineCore import when they start, rather than when vLLM is imported, and the number of threads of torch."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping

import torch
from vllm.platforms import current_platform

logger = logging.getLogger(__name__)

#: None starts a thread or uses a device. `tests/contract/test_vllm_warm_imports.py` checks it.
_MODULES = (
    "medialane.vllm_bridge.engine.plugin",
    "medialane.vllm_bridge.engine.engine_cpu",
    "vllm.renderers.hf",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.triton_utils.dispatcher",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.pool.flash_maxsim",
    "vllm.transformers_utils.chat_templates",
    "transformers.tokenization_mistral_common",
    "einops._torch_specific",
)
_OF_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")
_OF_GPU = ("vllm.v1.worker.gpu_worker",)

_NUM_THREADS = torch.get_num_threads()


def warm_imports() -> None:
    """Import them. One that is missing, or cannot be imported on this machine, is left to the process that needs it."""
    for name in (*_MODULES, *(_OF_CPU if current_platform.is_cpu() else _OF_GPU)):
        try:
            importlib.import_module(name)
        except ImportError as error:
            logger.info("%s is not imported ahead: %s", name, error)


def set_num_threads(environ: Mapping[str, str]) -> None:
    """Use as many threads for torch's CPU operations as a process that is started with `environ`: OpenMP reads its
    variable when it is loaded. Starts none."""
    number = environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(number) if number.isdecimal() and int(number) else _NUM_THREADS)
