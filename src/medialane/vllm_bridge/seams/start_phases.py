"""Where vLLM loads the weights of a model, compiles it, and runs it to measure its memory and to warm up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.compilation import decorators
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.model_loader import weight_utils
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.executor.abstract import Executor

_TQDM = weight_utils.tqdm
_MONITOR_TORCH_COMPILE = decorators.monitor_torch_compile
_DETERMINE_AVAILABLE_MEMORY = Executor.determine_available_memory
_COMPILE_OR_WARM_UP_MODEL = Executor.compile_or_warm_up_model
_GET_DUMMY_ENCODER_PROFILE_INPUTS = MultiModalBudget.get_dummy_encoder_profile_inputs


def watch(
    *,
    loading: Callable[[int, int], None],
    profiling: Callable[[str], None],
    compiling: Callable[[], None],
    warming_up: Callable[[], None],
) -> None:
    """Call these functions when a step begins, in this process and in those that are forked from it. Idempotent.

    `loading` gets the number of files of weights that are loaded, and of all; `profiling` the modality of the items
    that the model runs with, empty for text.
    """

    class CountedFiles(_TQDM):  # type: ignore[misc, valid-type]  # vllm is not typed
        def __iter__(self) -> Any:
            for number, file in enumerate(super().__iter__()):
                loading(number, self.total or 0)
                yield file

    def determine_available_memory(self: Any) -> Any:
        profiling("")
        return _DETERMINE_AVAILABLE_MEMORY(self)

    def get_dummy_encoder_profile_inputs(
        self: Any, modality: str | None = None, max_items_per_batch: int | None = None
    ) -> Any:
        profiling(modality or self.get_modality_with_max_tokens())
        return _GET_DUMMY_ENCODER_PROFILE_INPUTS(self, modality, max_items_per_batch)

    def monitor_torch_compile(vllm_config: VllmConfig, *args: Any, announce_start: bool = True, **kwargs: Any) -> Any:
        if announce_start and vllm_config.compilation_config.mode == CompilationMode.VLLM_COMPILE:
            compiling()
        return _MONITOR_TORCH_COMPILE(vllm_config, *args, announce_start=announce_start, **kwargs)

    def compile_or_warm_up_model(self: Any) -> Any:
        warming_up()
        return _COMPILE_OR_WARM_UP_MODEL(self)

    weight_utils.tqdm = CountedFiles
    decorators.monitor_torch_compile = monitor_torch_compile
    Executor.determine_available_memory = determine_available_memory
    MultiModalBudget.get_dummy_encoder_profile_inputs = get_dummy_encoder_profile_inputs
    Executor.compile_or_warm_up_model = compile_or_warm_up_model
