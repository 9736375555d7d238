"""The table of vLLM's private seams. Imports nothing of vLLM, so it is readable with any version installed, or none.

After a change run `python -m medialane.vllm_bridge.seams.probe --table`, which writes the table of
`docs/upgrading-vllm.md`; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The vLLM version that the table describes and all tests run with. `pyproject.toml` pins the same.
TESTED_VLLM = "0.32.0"

#: How a seam is used.
#: `call`: we call it, with `parameters` by name; vLLM may add parameters that have defaults.
#: `override`: our subclass defines it and vLLM calls ours; `parameters` are all of its parameters, in order.
#: `replace`: we replace it by our own; `parameters` as for `override`, unless it is a class.
#: `order`: values are passed or decoded by position: `parameters` are all of them, in order.
#: `read`: a class, object or module of which we use `attributes`.
Kind = Literal["call", "override", "replace", "order", "read"]

Process = Literal["gateway", "worker"]
BOTH: tuple[Process, ...] = ("gateway", "worker")


@dataclass(frozen=True)
class Seam:
    """One name of vLLM, or of a library through which we change vLLM's app.

    `where` is `module:qualified.name`, or a module alone. `attributes` are members of it, or are set by its methods.
    `called_in` is the vLLM function that refers to the last name of `where` (or to `lookup`): if it no longer does, an
    override or replacement has no effect.
    """

    where: str
    kind: Kind
    parameters: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()
    called_in: str = ""
    lookup: str = ""


@dataclass(frozen=True)
class Group:
    """Seams that serve one purpose, are only useful together, and are pinned by the same tests.

    `adapter` is the module of `seams` that uses them, `users` the modules of `vllm_bridge` that use the adapter for it;
    if it is empty, the users refer to no private name but rely on the behaviour that the seams describe.
    `without` is what fails without the seams, `instead` the public vLLM interface that would replace them.
    """

    name: str
    purpose: str
    adapter: str
    users: tuple[str, ...]
    processes: tuple[Process, ...]
    without: str
    instead: str
    tests: tuple[str, ...]
    seams: tuple[Seam, ...]


_LAUNCHERS = "vllm.entrypoints.launchers"
_PROCESSOR = "vllm.multimodal.processing.processor"
_BASE = f"{_PROCESSOR}:BaseMultiModalProcessor"
_SERIAL = "vllm.v1.serial_utils"
_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.core_client"
_EVENTS = "vllm.distributed.kv_events"
_SHM = "vllm.distributed.device_communicators.shm_broadcast"

GROUPS: tuple[Group, ...] = (
    Group(
        name="command line",
        purpose="vLLM's own parser reads the flags after `--`",
        adapter="arguments",
        users=("arguments", "flag_table"),
        processes=BOTH,
        without="vLLM's flags cannot be parsed: nothing starts",
        instead="`AsyncEngineArgs.add_cli_args` for the engine's flags; none for those of the server",
        tests=("tests/contract/test_vllm_server_flags.py", "tests/contract/test_vllm_engine_options.py"),
        seams=(
            Seam(f"{_LAUNCHERS}.cli_args:make_arg_parser", "call", ("parser",)),
            Seam(f"{_LAUNCHERS}.cli_args:validate_parsed_serve_args", "call", ("args",)),
            Seam("vllm.utils.argparse_utils:FlexibleArgumentParser", "read", attributes=("error", "_actions")),
        ),
    ),
    Group(
        name="API server",
        purpose="vLLM's OpenAI app and HTTP server over our engine client",
        adapter="api_server",
        users=("app", "http_server"),
        processes=("gateway",),
        without="the gateway has no HTTP server",
        instead="none: vLLM documents no way to build its app for another EngineClient",
        tests=("tests/contract/test_renderer_hook.py", "tests/contract/test_vllm_http_server.py"),
        seams=(
            Seam(f"{_LAUNCHERS}.app:build_app", "call", ("args", "supported_tasks", "model_config")),
            Seam(
                f"{_LAUNCHERS}.api_server.app_state:init_app_state",
                "call",
                ("engine_client", "state", "args", "supported_tasks"),
            ),
            Seam(f"{_LAUNCHERS}.launcher:validate_api_server_args", "call", ("args",)),
            Seam(f"{_LAUNCHERS}.launcher:NoSignalServer", "read", attributes=("serve", "should_exit")),
            Seam(f"{_LAUNCHERS}.utils.server_utils:get_uvicorn_log_config", "call", ("args",)),
            Seam(
                f"{_LAUNCHERS}.utils.ssl:SSLCertRefresher",
                "call",
                ("ssl_context", "key_path", "cert_path", "ca_path"),
                ("stop",),
            ),
            Seam("vllm.logger:configure_logging_from_args", "call", ("args",)),
            Seam(
                "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware",
                "call",
                ("app", "tokens"),
                ("verify_token",),
            ),
        ),
    ),
    Group(
        name="middleware stack",
        purpose="middleware is instantiated once, ours included, although vLLM builds the stack before ours is added",
        adapter="api_server",
        users=("app",),
        processes=("gateway",),
        without="the user's middleware is instantiated twice, and http_requests_total counts nothing",
        instead="none; unnecessary once vLLM leaves the stack to Starlette",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=(
            Seam(
                "fastapi:FastAPI.build_middleware_stack",
                "replace",
                ("self",),
                called_in="model_hosting_container_standards.common.fastapi.middleware.core:load_middlewares",
            ),
        ),
    ),
    Group(
        name="validation in a thread",
        purpose="vLLM's app validates large bodies in a thread",
        adapter="api_server",
        users=("app",),
        processes=("gateway",),
        without="a body with thousands of items blocks the event loop for 100 ms",
        instead="none",
        tests=("tests/contract/test_vllm_fail_fast.py",),
        seams=(
            Seam(
                "fastapi.dependencies.utils:request_body_to_args",
                "replace",
                ("body_fields", "received_body", "embed_body_fields"),
                called_in="fastapi.dependencies.utils:solve_dependencies",
            ),
        ),
    ),
    Group(
        name="request validation",
        purpose="vLLM's app rejects a body at the first invalid element of a list",
        adapter="",
        users=("fail_fast",),
        processes=("gateway",),
        without="a body with many invalid elements blocks the event loop for seconds",
        instead="`fail_fast` in vLLM's request models",
        tests=("tests/unit/vllm_bridge/test_vllm_bridge_fail_fast.py", "tests/contract/test_vllm_fail_fast.py"),
        seams=(
            Seam(
                "pydantic:TypeAdapter",
                "call",
                ("type", "config", "_parent_depth"),
                ("core_schema", "pydantic_complete", "validator"),
            ),
        ),
    ),
    Group(
        name="input processor",
        purpose="beam search asks the engine client's input processor whether outputs are watermarked",
        adapter="engine",
        users=("engine_client",),
        processes=("gateway",),
        without="beam search fails",
        instead="none",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=(
            Seam(
                "vllm.v1.engine.input_processor:InputProcessor.resolve_watermarking",
                "call",
                ("self", "params"),
                called_in="vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
            ),
        ),
    ),
    Group(
        name="renderer",
        purpose="the gateway prepares media instead of the renderer's own thread",
        adapter="multimodal",
        users=("renderer_hook",),
        processes=("gateway",),
        without="media are processed by the gateway's renderer: without the arena, and not in parallel",
        instead="none; a public hook at this point would suffice",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=(
            Seam(
                "vllm.renderers.base:BaseRenderer._process_multimodal",
                "replace",
                (
                    "self",
                    "prompt",
                    "mm_data",
                    "mm_uuids",
                    "mm_processor_kwargs",
                    "media_io_kwargs",
                    "skip_mm_cache",
                ),
                called_in="vllm.renderers.base:BaseRenderer._process_tokens_async",
                lookup="_process_multimodal_async",
            ),
        ),
    ),
    Group(
        name="multimodal processor",
        purpose="one job per item: Hugging Face processor and prompt expansion run separately; features are checked",
        adapter="multimodal",
        users=("assembler", "placeholder_layout", "preparation", "validation"),
        processes=BOTH,
        without="items are not processed one by one; features are not checked before EngineCore",
        instead="none; `BaseMultiModalProcessor.apply` does all of it for a whole prompt",
        tests=(
            "tests/contract/test_preparation.py",
            "tests/contract/test_family_preparation.py",
            "tests/contract/test_vllm_engine_validation.py",
        ),
        seams=(
            Seam(f"{_BASE}._apply_hf_processor_main", "call", ("self", "mm_items", "hf_kwargs")),
            Seam(f"{_BASE}._get_mm_fields_config", "call", ("self", "hf_inputs", "hf_processor_mm_kwargs")),
            Seam(
                f"{_BASE}._get_mm_prompt_updates",
                "call",
                ("self", "mm_items", "hf_processor_mm_kwargs", "out_mm_kwargs"),
            ),
            Seam(f"{_BASE}._find_mm_placeholders", "call", ("self", "new_token_ids", "mm_prompt_updates")),
            Seam(f"{_BASE}._postprocess_prompt", "call", ("self", "prompt")),
            Seam(
                f"{_BASE}._cached_apply_hf_processor",
                "replace",
                ("self", "inputs", "timing_ctx"),
                called_in=f"{_BASE}.apply",
            ),
            Seam(f"{_BASE}.apply", "call", ("self", "inputs", "timing_ctx")),
            Seam(
                f"{_PROCESSOR}:MultiModalProcessingResult", "call", ("prompt_ids", "kwargs", "hashes", "prompt_updates")
            ),
            Seam(
                "vllm.multimodal.processing.inputs:ProcessorInputs",
                "call",
                ("prompt", "mm_data_items", "hf_processor_mm_kwargs"),
            ),
            Seam("vllm.multimodal.processing.context:TimingContext", "call", ("enabled",)),
        ),
    ),
    Group(
        name="embeddings",
        purpose="embeddings sent by clients are converted to the form that vLLM's renderer expects",
        adapter="multimodal",
        users=("embeds",),
        processes=("worker",),
        without="requests with `image_embeds` fail",
        instead="none",
        tests=("tests/contract/test_embeds.py",),
        seams=(Seam("vllm.renderers.chat_utils:_get_embeds_data", "call", ("modality", "data_items", "mm_processor")),),
    ),
    Group(
        name="video loaders",
        purpose="frames are sampled by vLLM's loaders and decoded by us",
        adapter="multimodal",
        users=("frame_sampler", "source_prompt"),
        processes=BOTH,
        without="videos are decoded in workers only (`--stage url`)",
        instead="none; a registered video decoder backend would suffice",
        tests=("tests/contract/test_video_exactness.py",),
        seams=(
            Seam(
                "vllm.multimodal.video_decoders.opencv:decode_opencv",
                "replace",
                ("loader_cls", "data", "target", "sampling_kwargs", "frame_recovery"),
            ),
            Seam("vllm.multimodal.video_decoders.opencv", "read", attributes=("cv2",)),
            Seam("vllm.multimodal.video:VideoLoader._prepare_source", "call", ("source",)),
            Seam("vllm.multimodal.video:VideoLoader.compute_frames_index_to_sample", "call", ("source", "target")),
            Seam(
                "vllm.multimodal.video:VideoLoader.read_frames",
                "call",
                ("cap", "frame_idx", "total_frames_num", "frame_recovery"),
                called_in="vllm.multimodal.video_decoders.opencv:decode_opencv",
            ),
            Seam(
                "vllm.multimodal.video_decoders:VideoSourceMetadata",
                "order",
                ("total_frames_num", "original_fps", "duration"),
            ),
            Seam("vllm.multimodal.video_decoders:VideoTargetMetadata", "read"),
            Seam("vllm.multimodal.video:VIDEO_LOADER_REGISTRY", "read", attributes=("backend_requires_gpu",)),
            Seam(
                "vllm.multimodal.media.video:VideoMediaIO",
                "call",
                ("image_io",),
                ("merge_kwargs", "video_loader", "num_frames", "kwargs", "load_base64"),
            ),
            Seam("vllm.multimodal.video:get_video_loader_backend_for_processor", "call", ("video_processor",)),
            Seam("vllm.transformers_utils.processor:get_video_processor_cls_name", "call", ("model_config",)),
        ),
    ),
    Group(
        name="message encoder",
        purpose="items are sent to EngineCore as header and descriptors; sampling parameters are encoded for workers",
        adapter="engine",
        users=("administration", "arena_decoder", "arena_encoder", "engine_client", "engine_core", "engine_request"),
        processes=BOTH,
        without="no request reaches a worker; tensors are copied through vLLM's socket",
        instead="none",
        tests=("tests/contract/test_vllm_engine_plugin.py",),
        seams=(
            Seam(
                f"{_SERIAL}:MsgpackEncoder",
                "call",
                ("size_threshold", "oob_tensor_consumer"),
                ("encode", "size_threshold", "oob_tensor_consumer"),
            ),
            Seam(f"{_SERIAL}:MsgpackDecoder", "call", ("t", "share_mem", "oob_tensor_provider"), ("decode",)),
            Seam(
                f"{_SERIAL}:MsgpackEncoder._encode_mm_item",
                "override",
                ("self", "item"),
                called_in=f"{_SERIAL}:MsgpackEncoder.enc_hook",
            ),
            Seam(
                f"{_SERIAL}:MsgpackDecoder._decode_mm_item",
                "override",
                ("self", "obj"),
                called_in=f"{_SERIAL}:MsgpackDecoder.dec_hook",
            ),
            Seam(
                "vllm.v1.engine:EngineCoreRequest",
                "read",
                attributes=("request_id", "external_req_id", "mm_features"),
            ),
        ),
    ),
    Group(
        name="EngineCore",
        purpose="EngineCore maps arenas, rejects requests whose features it cannot read, and exits with its worker",
        adapter="engine_core",
        users=("engine_core",),
        processes=("worker",),
        without="features are sent in the message (`--transport inline`); EngineCore survives the kill of its worker",
        instead="none; vLLM's multimodal receiver cache is private, too",
        tests=("tests/contract/test_vllm_engine_plugin.py", "tests/contract/test_vllm_engine_features.py"),
        seams=(
            Seam(f"{_CORE}:MsgpackDecoder", "replace", called_in=f"{_CORE}:EngineCoreProc.process_input_sockets"),
            Seam(
                f"{_CORE}:EngineCore.preprocess_add_request",
                "replace",
                ("self", "request"),
                called_in=f"{_CORE}:EngineCoreProc.process_input_sockets",
            ),
            Seam(f"{_CORE}:EngineCore", "read", attributes=("is_sleeping", "add_lora")),
        ),
    ),
    Group(
        name="engine front end",
        purpose="utility calls to every EngineCore, our encoder, unfinished requests by rank, silent shutdown",
        adapter="engine",
        users=("engine",),
        processes=("worker",),
        without="a worker does not know when EngineCore has released a request's memory",
        instead="`AsyncLLM.collective_rpc` reaches the model's processes, not EngineCore; none for the rest",
        tests=("tests/contract/test_vllm_engine_contract.py", "tests/contract/test_vllm_engine_load.py"),
        seams=(
            Seam(
                "vllm.v1.engine.async_llm:AsyncLLM",
                "read",
                attributes=("engine_core", "input_processor", "output_processor", "output_handler"),
            ),
            Seam(
                f"{_CLIENT}:AsyncMPClient",
                "read",
                attributes=("core_engines", "encoder", "resources"),
                called_in=f"{_CLIENT}:AsyncMPClient._send_input",
                lookup="encoder",
            ),
            Seam(f"{_CLIENT}:AsyncMPClient.call_utility_all_async", "call", ("self", "method", "args")),
            Seam(f"{_CLIENT}:BackgroundResources", "read", attributes=("engine_dead",)),
            Seam(f"{_CLIENT}:DPLBAsyncMPClient", "read", attributes=("reqs_in_flight",)),
            Seam("vllm.v1.engine.output_processor:OutputProcessor", "read", attributes=("request_states",)),
            Seam("vllm.v1.engine.input_processor:InputProcessor", "read", attributes=("mm_encoder_cache_size",)),
        ),
    ),
    Group(
        name="engine statistics",
        purpose="load of each rank for the router, timings of a request for its report",
        adapter="engine",
        users=("engine", "outputs"),
        processes=("worker",),
        without="workers report no load",
        instead="the Prometheus metrics have the same values, without the rank's last step",
        tests=("tests/contract/test_vllm_engine_load.py",),
        seams=(
            Seam("vllm.v1.metrics.stats:SchedulerStats", "read", attributes=("num_running_reqs", "kv_cache_usage")),
            Seam(
                "vllm.v1.metrics.stats:RequestStateStats",
                "read",
                attributes=("queued_ts", "scheduled_ts", "first_token_ts"),
            ),
        ),
    ),
    Group(
        name="KV events",
        purpose="the worker decodes the KV events that EngineCore publishes",
        adapter="",
        users=("kv_events",),
        processes=("worker",),
        without="requests are routed without regard to KV caches",
        instead="vLLM documents the events and a subscriber, but not the replay socket or the endpoints of other ranks",
        tests=("tests/contract/test_vllm_kv_events.py", "tests/contract/test_vllm_kv_event_reader.py"),
        seams=(
            Seam(f"{_EVENTS}:EventBatch", "order", ("ts", "events", "data_parallel_rank")),
            Seam(
                f"{_EVENTS}:BlockStored",
                "read",
                attributes=(
                    "block_hashes",
                    "parent_block_hash",
                    "token_ids",
                    "block_size",
                    "medium",
                    "lora_name",
                    "extra_keys",
                    "group_idx",
                    "kv_cache_spec_kind",
                    "locality",
                ),
            ),
            Seam(f"{_EVENTS}:BlockRemoved", "read", attributes=("block_hashes", "medium", "group_idx", "locality")),
            Seam(f"{_EVENTS}:AllBlocksCleared", "read"),
            Seam(f"{_EVENTS}:ZmqEventPublisher", "read", attributes=("END_SEQ",)),
            Seam(
                f"{_EVENTS}:ZmqEventPublisher.offset_endpoint_port",
                "call",
                ("endpoint", "data_parallel_rank"),
            ),
        ),
    ),
    Group(
        name="model on a CPU",
        purpose="a CPU model of one rank runs in EngineCore's process; others yield cores while they wait",
        adapter="cpu",
        users=("cpu_executor", "cpu_waiting"),
        processes=("worker",),
        without="vLLM's own processes busy-wait on every core (`--distributed-executor-backend mp` works)",
        instead="the executor's qualified name in `distributed_executor_backend` is public; its methods are not",
        tests=("tests/contract/test_vllm_cpu_executor.py", "tests/contract/test_vllm_cpu_waiting.py"),
        seams=(
            Seam(
                "vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor",
                "override",
                ("self",),
                called_in="vllm.v1.executor.abstract:Executor.__init__",
            ),
            Seam("vllm.utils.ompmultiprocessing:OMPProcessManager", "call", ("config",), ("cpu_lists",)),
            Seam(
                f"{_SHM}:SpinCondition",
                "replace",
                attributes=("is_reader", "last_read", "busy_loop_s"),
                called_in=f"{_SHM}:MessageQueue.create_from_handle",
            ),
            Seam(f"{_SHM}:SpinCondition.wait", "override", ("self", "timeout_ms")),
        ),
    ),
)
