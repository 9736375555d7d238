"""EngineCore, in its own process or in its parent before the fork."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from vllm import envs
from vllm.compilation import decorators
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.model_loader import weight_utils
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.engine import core
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.abstract import Executor

from medialane.vllm_bridge.seams.engine import EngineCoreRequest, ItemDecoder


def change(
    decoder: type[ItemDecoder],
    *,
    before_add: Callable[[EngineCoreRequest], None],
    utilities: Mapping[str, Callable[..., Any]],
) -> None:
    """Make EngineCore decode requests with `decoder` and serve calls of `utilities`. Idempotent.

    `before_add` gets each request, in the input thread; what it raises fails only that request.
    """
    if core.MsgpackDecoder is decoder:
        return
    core.MsgpackDecoder = decoder
    inner = core.EngineCore.preprocess_add_request

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        try:
            before_add(request)
            preprocessed = inner(self, request)
        except Exception as error:
            if request.pooling_params is None:
                raise
            # vLLM's front end fails at any other error of a pooling request, for which it expects a tensor.
            raise MultiModalCacheMissError([request.request_id]) from error
        # The input thread's frame keeps this message alive until the next one; its items would pin their arena.
        request.mm_features = None
        return preprocessed

    core.EngineCore.preprocess_add_request = preprocess_add_request
    for name, utility in utilities.items():
        setattr(core.EngineCore, name, utility)


# The phases of a start

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


# The file through which the processes of an engine find each other (torch's FileStore)


def use_socket_folder() -> None:
    """Create the file where vLLM creates its sockets, not in the folder for temporary files, in which it stays. For
    executors created in this process, or in one forked from it. Idempotent."""
    for executor in (uniproc_executor, multiproc_executor):
        executor.get_file_store_init_method = _init_method


def _init_method() -> str:
    return f"file://{envs.VLLM_RPC_BASE_PATH}/vllm_dist_{uuid4().hex}"
