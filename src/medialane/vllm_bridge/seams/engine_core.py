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
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.abstract import Executor

from medialane.runtime.phase import Phase, enter_phase, show_phase
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
        except Exception as error:  # any one would end the front end of a pooling model
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


# KV blocks that were not read

_UPDATE_WAITING = Scheduler._update_waiting_for_remote_kv


def correct_transfers() -> None:
    """Have the statistics of a prompt count tokens that were read from another engine: vLLM counts what it is about to
    read, and computes the tokens behind a block that it could not. Idempotent."""

    def update_waiting_for_remote_kv(self: Any, request: Any) -> None:
        stats, num_valid = request.prefill_stats, request.num_computed_tokens
        if stats is not None and request.request_id in self.failed_recving_kv_req_ids:
            num_local = min(stats.num_local_cached_tokens, num_valid)
            stats.set(stats.num_prompt_tokens, num_local, num_valid - num_local)
        _UPDATE_WAITING(self, request)

    Scheduler._update_waiting_for_remote_kv = update_waiting_for_remote_kv


# The phases of a start

_TQDM = weight_utils.tqdm
_MONITOR_TORCH_COMPILE = decorators.monitor_torch_compile
_DETERMINE_AVAILABLE_MEMORY = Executor.determine_available_memory
_COMPILE_OR_WARM_UP_MODEL = Executor.compile_or_warm_up_model
_GET_DUMMY_ENCODER_PROFILE_INPUTS = MultiModalBudget.get_dummy_encoder_profile_inputs


_REMEDY = (
    "vLLM measures the memory of the largest request that its settings allow. Smaller limits take less time: after a"
    """ lone `--`, --limit-mm-per-prompt '{"image": 4, "video": 0}' and --max-model-len 8192, for example;"""
    " --skip-mm-profiling leaves out the media, --enforce-eager the compilation"
)

_COMPILE_REMEDY = (
    "vLLM keeps what it compiles: later starts take less time. --enforce-eager after a lone `--` leaves it out"
)


def report_phases() -> None:
    """Report what the engine does until it is ready, in this process or one forked from it: its log has it in words,
    and only some. Idempotent."""

    class CountedFiles(_TQDM):  # type: ignore[misc, valid-type]  # vllm is not typed
        def __iter__(self) -> Any:
            for number, file in enumerate(super().__iter__()):
                show_phase(Phase("loading the weights", number, self.total or 0))
                yield file

    def determine_available_memory(self: Any) -> Any:
        show_phase(Phase("profiling", remedy=_REMEDY))
        return _DETERMINE_AVAILABLE_MEMORY(self)

    def get_dummy_encoder_profile_inputs(
        self: Any, modality: str | None = None, max_items_per_batch: int | None = None
    ) -> Any:
        what = modality or self.get_modality_with_max_tokens()
        show_phase(Phase(f"profiling the largest {what}", remedy=_REMEDY))
        return _GET_DUMMY_ENCODER_PROFILE_INPUTS(self, modality, max_items_per_batch)

    def monitor_torch_compile(vllm_config: VllmConfig, *args: Any, announce_start: bool = True, **kwargs: Any) -> Any:
        if announce_start and vllm_config.compilation_config.mode == CompilationMode.VLLM_COMPILE:
            show_phase(Phase("compiling", remedy=_COMPILE_REMEDY))
        return _MONITOR_TORCH_COMPILE(vllm_config, *args, announce_start=announce_start, **kwargs)

    def compile_or_warm_up_model(self: Any) -> Any:
        enter_phase("warming up")
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
