"""The table of vLLM's private seams. Imports nothing of vLLM, so it is readable with any version installed, or none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

#: The vLLM version that the table describes and all tests run with. `pyproject.toml` pins the same.
TESTED_VLLM = "0.32.0"

#: How a seam is used.
#: `call`: we call it, with `parameters` by name; vLLM may add parameters that have defaults.
#: `override`: our subclass defines it and vLLM calls ours; `parameters` are all of its parameters, in order.
#: `replace`: we replace it by our own; `parameters` as for `override`, unless it is a class.
#: `order`: values are passed or decoded by position: `parameters` are all of them, in order.
#: `read`: a class, object or module whose `attributes` we use.
Kind = Literal["call", "override", "replace", "order", "read"]

Process = Literal["gateway", "worker", "check"]
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

    `module` of `vllm_bridge` uses them: an adapter in `seams`, or a module that refers to no private name but relies on
    the behaviour that the seams describe.
    `without` is what fails without the seams, `instead` the public vLLM interface that would replace them.
    """

    name: str
    purpose: str
    module: str
    without: str
    tests: tuple[str, ...]
    seams: tuple[Seam, ...]
    instead: str = "none"
    processes: tuple[Process, ...] = BOTH
    #: Whether all else works without the seams: then a process starts without them.
    is_optional: bool = False


_WORD = re.compile(r"\w+")

#: A row of `Group.seams`: `module:Class.method(self, request) with attributes in module:caller as lookup`.
_ROW = re.compile(
    r"(?P<kind>\w+)\s+(?P<where>[\w.:]+)(?:\((?P<parameters>[^)]*)\))?(?:\s+with\s+(?P<attributes>\w+(?:,\s+\w+)*))?"
    r"(?:\s+in\s+(?P<called_in>[\w.:]+))?(?:\s+as\s+(?P<lookup>\w+))?"
)


def _seams(text: str) -> tuple[Seam, ...]:
    """Return the seams of rows that begin with their kind. `.name` is a member of the class of the row before, `:name`
    is in its module; `called_in` needs no module if it is the same as in `where`."""
    seams: list[Seam] = []
    for row in re.split(rf"\n *(?=(?:{'|'.join(get_args(Kind))}) )", text)[1:]:
        seams.append(_seam(row.strip(), before=seams[-1].where if seams else ""))
    return tuple(seams)


def _seam(row: str, *, before: str) -> Seam:
    found = _ROW.fullmatch(row)
    if found is None:
        raise ValueError(f"malformed row: {row}")
    where, called_in = found["where"], found["called_in"] or ""
    if where.startswith((".", ":")):
        where = before.rpartition(where[0])[0] + where
    if called_in and ":" not in called_in:
        called_in = f"{where.partition(':')[0]}:{called_in}"
    return Seam(
        where,
        found["kind"],  # type: ignore[arg-type]  # rows begin with one
        None if found["parameters"] is None else tuple(_WORD.findall(found["parameters"])),
        attributes=tuple(_WORD.findall(found["attributes"] or "")),
        called_in=called_in,
        lookup=found["lookup"] or "",
    )


# Groups by the adapter that uses them
_api_server = partial(Group, module="seams.api_server", processes=("gateway",))
_cpu = partial(Group, module="seams.cpu", processes=("worker",))
_engine = partial(Group, module="seams.engine")
_engine_core = partial(Group, module="seams.engine_core", processes=("worker",))
_multimodal = partial(Group, module="seams.multimodal")

GROUPS: tuple[Group, ...] = (
    Group(
        name="command line",
        purpose="vLLM's own parser reads the flags after `--`",
        module="seams.arguments",
        without="vLLM's flags cannot be parsed: nothing starts",
        instead="`AsyncEngineArgs.add_cli_args` for the engine's flags; none for the server's",
        tests=("tests/contract/test_vllm_server_flags.py", "tests/contract/test_vllm_engine_options.py"),
        seams=_seams("""
            call vllm.entrypoints.launchers.cli_args:make_arg_parser(parser)
            call :validate_parsed_serve_args(args)
            read vllm.utils.argparse_utils:FlexibleArgumentParser with error
        """),
    ),
    _api_server(
        name="API server",
        purpose="vLLM's OpenAI app and HTTP server over our engine client",
        without="the gateway has no HTTP server",
        instead="none: vLLM documents no way to build its app for another EngineClient",
        tests=("tests/contract/test_renderer_hook.py", "tests/contract/test_vllm_http_server.py"),
        seams=_seams("""
            call vllm.entrypoints.launchers.app:build_app(args, supported_tasks, model_config)
            call vllm.entrypoints.launchers.api_server.app_state:init_app_state(engine_client, state, args,
                supported_tasks)
            call vllm.entrypoints.launchers.launcher:validate_api_server_args(args)
            call vllm.entrypoints.launchers.utils.server_utils:get_uvicorn_log_config(args)
            call vllm.entrypoints.launchers.utils.ssl:SSLCertRefresher(ssl_context, key_path, cert_path, ca_path) with
                stop
            call vllm.logger:configure_logging_from_args(args)
            read vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware
        """),
    ),
    _api_server(
        name="unloading of adapters",
        purpose="workers unload a LoRA adapter that vLLM's app unloads",
        without="an adapter that was unloaded uses memory of the workers until it is loaded again, or they restart",
        instead="none: the app forgets the adapter, and does not call its EngineClient",
        tests=("tests/contract/test_vllm_adapters.py",),
        seams=_seams("""
            replace vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter(self, request) in
                vllm.entrypoints.serve.lora.api_router:_attach_router
            read vllm.entrypoints.serve.engine.protocol:ErrorResponse
            read vllm.entrypoints.serve.lora.protocol:UnloadLoRAAdapterRequest with model_fields
        """),
    ),
    _api_server(
        name="middleware stack",
        purpose="middleware is instantiated once, ours included, although vLLM builds the stack before ours is added",
        without="the user's middleware is instantiated twice, and http_requests_total counts nothing",
        instead="none; unnecessary once vLLM leaves the stack to Starlette",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=_seams("""
            replace fastapi:FastAPI.build_middleware_stack(self) in
                model_hosting_container_standards.common.fastapi.middleware.core:load_middlewares
        """),
    ),
    _api_server(
        name="routes",
        purpose="the frequent routes take a body alone; a client's disconnect is listened for once, by the gateway",
        without="each request has two tasks more, and takes more CPU time",
        tests=("tests/contract/test_renderer_hook.py", "tests/contract/test_short_routes.py"),
        seams=_seams("""
            call vllm.entrypoints.serve.utils.api_utils:with_cancellation(handler_func)
            call :validate_json_request(raw_request)
            read fastapi.routing:APIRoute with dependant, app, _embed_body_fields
        """),
    ),
    _api_server(
        name="media tokens",
        purpose="usage.prompt_tokens_details has the tokens of media in a prompt that a worker expands",
        without="multimodal_tokens is null for embeddings, and in stages decoded and url",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=_seams("""
            replace vllm.entrypoints.openai.chat_completion.serving:_get_mm_token_counts(engine_input) in
                OpenAIServingChat._create_chat_completion
        """),
    ),
    _api_server(
        name="pooling endpoints",
        purpose="embeddings, classification and scores: media are prepared by the gateway, responses built in a thread",
        without="requests with media are refused",
        instead="none: the endpoints render prompts with the renderer's blocking methods",
        tests=("tests/contract/test_pooling_endpoints.py",),
        seams=_seams("""
            read vllm.entrypoints.pooling.base.serving:PoolingBaseServing with _postprocessing, _postprocessing_async,
                _build_response in PoolingBaseServing.__call__ as _postprocessing_async
            read vllm.entrypoints.pooling.base.io_processor:PoolingIOProcessor with renderer, render, render_async in
                vllm.entrypoints.pooling.base.serving:PoolingBaseServing._preprocessing as render_async
            read vllm.entrypoints.pooling.scoring.protocol:RerankRequest with model_fields
            call vllm.plugins.io_processors:has_io_processor(vllm_config, plugin_from_init)
        """),
    ),
    Group(
        name="render endpoints",
        purpose="requests that are only rendered: items are described, not processed, and tensors are sent in pieces",
        module="seams.scale_out",
        processes=("gateway",),
        without="the render endpoints process every item, and their answers block the event loop",
        instead="none; an option of `ServingRender` that leaves the features' data to a hook would suffice",
        tests=("tests/contract/test_render.py",),
        seams=_seams("""
            call vllm.entrypoints.scale_out.render.serving:ServingRender(models, online_renderer, request_logger,
                tool_server) with models, online_renderer, request_logger, tool_server, _placeholder_metadata_parser,
                _placeholder_metadata_fields
            override :ServingRender.render_chat_request(self, request, raw_request) in
                vllm.entrypoints.scale_out.render.api_router:render_chat_completion
            override .render_completion_request(self, request, raw_request) in
                vllm.entrypoints.scale_out.render.api_router:render_completion
            override .render_messages_request(self, request, raw_request) in
                vllm.entrypoints.scale_out.render.api_router:render_messages
            override .render_responses_request(self, request) in
                vllm.entrypoints.scale_out.render.api_router:render_responses
            override ._extract_mm_features(self, engine_input, mm_payload) in ServingRender.render_chat_request
            read vllm.entrypoints.scale_out.token_in_token_out.protocol:MultiModalFeatures with kwargs_data, mm_metadata
            read :GenerateRequest with token_ids, token_offsets
            read vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest with mm_payload
            read vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest with mm_payload
            read vllm.entrypoints.openai.completion.protocol:CompletionRequest with mm_payload
            read vllm.entrypoints.openai.responses.protocol:ResponsesRequest with mm_payload
            override vllm.v1.serial_utils:MsgpackEncoder._encode_tensor(self, obj) in
                MsgpackEncoder._encode_nested_tensors
            override vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens(self, request,
                raw_request) in vllm.entrypoints.scale_out.token_in_token_out.api_router:generate
            read :ServingTokens with online_renderer, _check_model
            read vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest with features
            read vllm.v1.serial_utils with CUSTOM_TYPE_RAW_VIEW
            call vllm.v1.utils:tensor_data(tensor)
        """),
    ),
    _api_server(
        name="request validation",
        purpose="vLLM's app rejects a body at the first invalid element of a list, large ones in a thread",
        without="a body with many elements blocks the event loop, one with many invalid ones for seconds",
        instead="`fail_fast` in vLLM's request models",
        tests=("tests/unit/vllm_bridge/test_vllm_bridge_fail_fast.py", "tests/contract/test_vllm_fail_fast.py"),
        seams=_seams("""
            replace fastapi.dependencies.utils:request_body_to_args(body_fields, received_body, embed_body_fields) in
                solve_dependencies
            call pydantic:TypeAdapter(type, config, _parent_depth) with core_schema, pydantic_complete, validator
        """),
    ),
    _engine(
        name="input processor",
        purpose="beam search asks the engine client's input processor whether outputs are watermarked",
        processes=("gateway",),
        without="beam search fails",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=_seams("""
            call vllm.v1.engine.input_processor:InputProcessor.resolve_watermarking(self, params) in
                vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search
        """),
    ),
    _multimodal(
        name="renderer",
        purpose="the gateway prepares media instead of the renderer's own thread",
        processes=("gateway",),
        without="media are processed by the gateway's renderer: without the arena, and not in parallel",
        instead="none; a public hook at this point would suffice",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=_seams("""
            replace vllm.renderers.base:BaseRenderer._process_multimodal(self, prompt, mm_data, mm_uuids,
                mm_processor_kwargs, media_io_kwargs, skip_mm_cache) in BaseRenderer._process_tokens_async as
                _process_multimodal_async
        """),
    ),
    _multimodal(
        name="renderer's warm-up",
        purpose="the gateway's renderer does not process the model's largest items when it is warmed up",
        processes=("gateway",),
        without="a gateway starts a second later, with hundreds of MB more",
        instead="none; a flag of the renderer would suffice",
        tests=("tests/contract/test_prebuilt_frontend.py",),
        seams=_seams("""
            read vllm.renderers.base:BaseRenderer with _mm_warmup_done
        """),
    ),
    _api_server(
        name="events of streams",
        purpose="events that differ in their text alone are made from a template, without vLLM's models",
        without="every event of a stream takes the CPU time of vLLM's models",
        tests=("tests/contract/test_event_template.py",),
        seams=_seams("""
            read vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat with parser_cls, enable_log_outputs,
                enable_force_include_usage
            replace :OpenAIServingChat.chat_completion_stream_generator(self, request, result_generator, request_id,
                model_name, conversation, tokenizer, request_metadata, chat_template_kwargs, mm_token_counts) in
                OpenAIServingChat._create_chat_completion
            read vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion with enable_force_include_usage
            replace :OpenAIServingCompletion.completion_stream_generator(self, request, engine_inputs, result_generator,
                request_id, created_time, model_name, num_prompts, tokenizer, request_metadata) in
                OpenAIServingCompletion._create_completion
        """),
        is_optional=True,
    ),
    _api_server(
        name="speech",
        purpose="the store decodes uploads for transcription, sandboxed and cached",
        without="uploads are decoded in the gateway's process",
        instead="none; a public hook at this point would suffice",
        tests=("tests/contract/test_speech.py",),
        seams=_seams("""
            replace vllm.entrypoints.speech_to_text.base.serving:SpeechToTextBaseServing._decode_and_chunk_speech(self,
                audio_data) in SpeechToTextBaseServing._preprocess_speech_to_text as _decode_and_chunk_speech_async
            read :SpeechToTextBaseServing with asr_config
        """),
    ),
    _multimodal(
        name="rendering thread",
        purpose="chat templates and tokenization of short prompts run on the event loop, without a thread's hand-over",
        processes=("gateway",),
        without="short requests take some milliseconds longer on a busy gateway",
        instead="none; an `Executor` as an argument of the renderer would suffice",
        tests=("tests/contract/test_renderer_hook.py",),
        seams=_seams("""
            read vllm.renderers.base:_SwappableExecutor with submit in BaseRenderer.__init__ as _executor
        """),
    ),
    _multimodal(
        name="prompts' tokens",
        purpose="a turn of a chat is joined from the tokens of its segments, most of which earlier turns had",
        processes=("gateway",),
        without="each turn of a chat is tokenized from its start",
        instead="none; a tokenizer's wrapper would not know whose prompt it is",
        tests=("tests/contract/test_segment_cache.py",),
        seams=_seams("""
            replace vllm.renderers.base:BaseRenderer._tokenize_prompt(self, prompt, params) in
                BaseRenderer._tokenize_singleton_prompt_async as _tokenize_prompt_async
            call vllm.renderers.base:BaseRenderer._tokenize_prompt(self, prompt, params)
            call vllm.renderers.base:BaseRenderer._wants_offsets(self, prompt, params)
            call vllm.renderers.base:BaseRenderer._build_tokens_prompt(token_ids, prompt)
            read vllm.renderers.params:TokenizeParams with truncate_prompt_tokens, get_encode_kwargs
            call vllm.utils.async_utils:make_async(func, executor)
        """),
    ),
    Group(
        name="tensors without values",
        purpose="prompts are expanded over tensors that have a shape, but no values to be read",
        module="seams.stand_ins",
        without="a value that is not in an item's header could be read by mistake",
        instead="torch's meta tensors; some operations leave real tensors as they are",
        tests=("tests/unit/vllm_bridge/test_vllm_bridge_stand_ins.py",),
        seams=_seams("""
            read torch:Tensor with _make_wrapper_subclass
            read :_C with _disabled_torch_function_impl
            read torch._ops:OpOverload with _schema
        """),
    ),
    _multimodal(
        name="multimodal processor",
        purpose="one job per item: Hugging Face processor and prompt expansion run separately; features are checked",
        without="items are not processed one by one; features are not checked before EngineCore",
        instead="none; `BaseMultiModalProcessor.apply` does all of it for a whole prompt",
        tests=(
            "tests/contract/test_preparation.py",
            "tests/contract/test_family_preparation.py",
            "tests/contract/test_vllm_engine_validation.py",
        ),
        seams=_seams("""
            call vllm.multimodal.processing.processor:BaseMultiModalProcessor._apply_hf_processor_main(self, mm_items,
                hf_kwargs)
            call ._get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs)
            call ._get_mm_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
            call ._find_mm_placeholders(self, new_token_ids, mm_prompt_updates)
            call ._postprocess_prompt(self, prompt)
            replace ._cached_apply_hf_processor(self, inputs, timing_ctx) in BaseMultiModalProcessor.apply
            call .apply(self, inputs, timing_ctx)
            call :MultiModalProcessingResult(prompt_ids, kwargs, hashes, prompt_updates)
            call vllm.multimodal.processing.inputs:ProcessorInputs(prompt, mm_data_items, hf_processor_mm_kwargs)
            call vllm.multimodal.processing.context:TimingContext(enabled)
        """),
    ),
    _multimodal(
        name="media hashes",
        purpose="`medialane render` answers the hashes that plain vLLM gives to media, mostly without decoding them",
        without="routers in front of plain vLLM servers cannot use our render service for requests with media",
        tests=(
            "tests/contract/test_media_hash.py",
            "tests/contract/test_family_hashes.py",
            "tests/e2e/test_e2e_render.py",
        ),
        processes=("gateway",),
        seams=_seams("""
            call vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_mm_hashes(self, inputs)
            call vllm.multimodal.processing.inputs:ProcessorInputs(prompt, mm_data_items, mm_uuid_items,
                hf_processor_mm_kwargs, media_io_kwargs)
            call vllm.multimodal.media:MediaWithBytes(media, original_bytes, io_config)
            call vllm.multimodal.parse:ProcessorBatchItems(data, modality)
        """),
    ),
    Group(
        name="vision chunks",
        purpose="models that take images as parts of vLLM's modality `vision_chunk` take images of ours",
        module="seams.vision_chunk",
        without="requests with media are refused for these models (Kimi-K2.5)",
        tests=("tests/contract/test_vision_chunk.py",),
        seams=_seams("""
            replace vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_mm_fields_config(self, hf_inputs,
                hf_processor_mm_kwargs)
            replace ._get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs) in
                BaseMultiModalProcessor._get_mm_prompt_updates
            replace vllm.multimodal.parse:MultiModalDataParser._get_subparsers(self) in
                MultiModalDataParser.parse_mm_data
            call ._parse_image_data(self, data)
            replace vllm.multimodal.processing.dummy_inputs:BaseDummyInputsBuilder.get_dummy_text(self, mm_counts)
            replace .get_dummy_mm_data(self, seq_len, mm_counts, mm_options)
            call ._get_dummy_images(self, width, height, num_images, overrides)
            call vllm.multimodal.inputs:MultiModalFieldConfig(field, modality)
            call vllm.multimodal.parse:VisionChunkProcessorItems(data)
            call :ProcessorBatchItems(data, modality) with get_all
            call vllm.renderers.chat_utils:_resolve_vision_chunk_items(vision_chunk_items, mm_processor,
                vision_chunks_modality_order)
        """),
    ),
    _multimodal(
        name="processor settings",
        purpose="settings of the Hugging Face processor come from a new one, not from one that was used",
        without="processes may disagree about settings, and features are not used",
        tests=("tests/contract/test_vllm_engine_settings.py",),
        seams=_seams("""
            read vllm.transformers_utils.processor:cached_get_processor with cache_clear
        """),
    ),
    _multimodal(
        name="Mistral chats",
        purpose="chats of models with a Mistral tokenizer are tokenized with blanks for their media",
        without="requests with media fail for models in Mistral's format (`--tokenizer-mode mistral`)",
        instead="none: vLLM expects the placeholders of media that were opened with the chat",
        tests=("tests/contract/test_mistral_chat.py",),
        seams=_seams("""
            replace vllm.multimodal.processing.processor:BaseMultiModalProcessor._maybe_apply_prompt_updates(self,
                mm_items, mm_res) in BaseMultiModalProcessor.apply
            call vllm.utils.mistral:is_mistral_tokenizer(obj)
        """),
    ),
    _multimodal(
        name="embeddings",
        purpose="embeddings sent by clients are converted to the form that vLLM's renderer expects",
        processes=("worker",),
        without="requests with `image_embeds` fail",
        tests=("tests/contract/test_embeds.py",),
        seams=_seams("""
            call vllm.renderers.chat_utils:_get_embeds_data(modality, data_items, mm_processor)
        """),
    ),
    _multimodal(
        name="video loaders",
        purpose="frames are sampled by vLLM's loaders and decoded by us",
        without="videos are decoded in workers only (`--stage url`)",
        instead="none; a registered video decoder backend would suffice",
        tests=("tests/contract/test_video_exactness.py",),
        seams=_seams("""
            replace vllm.multimodal.video_decoders.opencv:decode_opencv(loader_cls, data, target, sampling_kwargs,
                frame_recovery)
            read vllm.multimodal.video_decoders.opencv with cv2
            call vllm.multimodal.video:VideoLoader._prepare_source(source)
            call .compute_frames_index_to_sample(source, target)
            call .read_frames(cap, frame_idx, total_frames_num, frame_recovery) in
                vllm.multimodal.video_decoders.opencv:decode_opencv
            order vllm.multimodal.video_decoders:VideoSourceMetadata(total_frames_num, original_fps, duration)
            read :VideoTargetMetadata
            read vllm.multimodal.video:VIDEO_LOADER_REGISTRY with backend_requires_gpu
            call vllm.multimodal.media.video:VideoMediaIO(image_io) with merge_kwargs, video_loader, num_frames, kwargs,
                load_base64
            call vllm.multimodal.video:get_video_loader_backend_for_processor(video_processor)
            call vllm.transformers_utils.processor:get_video_processor_cls_name(model_config)
        """),
    ),
    _multimodal(
        name="compared tensors",
        purpose="items are compared with plain vLLM's",
        without="`medialane check --tensors` fails",
        tests=("tests/contract/test_tensor_comparison.py",),
        seams=_seams("""
            call vllm.multimodal.media:MediaConnector.fetch_image(self, image_url)
            call .fetch_video(self, video_url, video_processor)
            call .fetch_audio(self, audio_url)
        """),
        processes=("check",),
    ),
    _multimodal(
        name="normalisation on the device",
        purpose="clients learn how the engine normalises raw pixels, and comparisons do it likewise",
        without="tensors of features do not say whether they are raw; `medialane check --tensors` fails",
        tests=("tests/contract/test_sent_tensors.py", "tests/contract/test_tensor_comparison.py"),
        seams=_seams("""
            call vllm.model_executor.layers.fusion.mm_input_norm:_load_norm_params(model_config)
            order :NormParams(image_mean, image_std, rescale_factor)
        """),
        processes=("gateway", "check"),
    ),
    _engine(
        name="message encoder",
        purpose="items are sent to EngineCore as header and descriptors; sampling parameters are encoded for workers",
        without="no request reaches a worker; tensors are copied through vLLM's socket",
        tests=("tests/contract/test_vllm_engine_plugin.py",),
        seams=_seams("""
            call vllm.v1.serial_utils:MsgpackEncoder(size_threshold, oob_tensor_consumer) with encode, size_threshold,
                oob_tensor_consumer
            call :MsgpackDecoder(t, share_mem, oob_tensor_provider) with decode
            override :MsgpackEncoder._encode_mm_item(self, item) in MsgpackEncoder.enc_hook
            override :MsgpackDecoder._decode_mm_item(self, obj) in MsgpackDecoder.dec_hook
            read vllm.v1.engine:EngineCoreRequest with request_id, external_req_id, mm_features
        """),
    ),
    _engine(
        name="text at the seam",
        purpose="the text of an answer that goes on at another worker equals an undisturbed one's",
        processes=("gateway",),
        without="an answer ends with its worker",
        tests=("tests/contract/test_continued_text.py", "tests/contract/test_vllm_engine_continuation.py"),
        seams=_seams("""
            call vllm.v1.engine:EngineCoreRequest(request_id, prompt_token_ids, mm_features, sampling_params,
                pooling_params, arrival_time, lora_request, cache_salt, data_parallel_rank)
            call vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request(tokenizer, request)
            call .update(self, new_token_ids, stop_terminated)
            call .get_next_output_text(self, finished, delta)
            call .num_output_tokens(self)
            call vllm.v1.engine.logprobs:LogprobsProcessor(tokenizer, logprobs, prompt_logprobs, cumulative_logprob,
                num_logprobs, num_prompt_logprobs)
            call :LogprobsProcessor._verify_tokens(self, decoded_tokens_list, tokens, context_token_ids)
            call vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens(tokenizer, token_ids)
        """),
    ),
    _engine_core(
        name="EngineCore",
        purpose="EngineCore maps arenas, rejects requests whose features it cannot read, and exits with its worker",
        without="features are sent in the message (`--transport inline`); EngineCore survives the kill of its worker",
        instead="none; vLLM's multimodal receiver cache is private, too",
        tests=("tests/contract/test_vllm_engine_plugin.py", "tests/contract/test_vllm_engine_features.py"),
        seams=_seams("""
            replace vllm.v1.engine.core:MsgpackDecoder in EngineCoreProc.process_input_sockets
            replace :EngineCore.preprocess_add_request(self, request) in EngineCoreProc.process_input_sockets
            read :EngineCore with is_sleeping, add_lora
            call vllm.multimodal.cache:MultiModalCacheMissError(mm_hashes) in
                vllm.v1.engine.core:EngineCoreProc.process_input_sockets
        """),
    ),
    Group(
        name="encoder cache connector",
        purpose="embeddings are loaded from arenas instead of running the encoder, and saved there",
        module="seams.encoder_cache",
        processes=("worker",),
        without="every worker encodes every item itself (`--encode-cache off`)",
        instead="vLLM loads a connector by the name of its module, which is public; the connector's methods are not",
        tests=("tests/contract/test_vllm_engine_embeddings.py", "tests/contract/test_family_embeddings.py"),
        seams=_seams("""
            read vllm.config:ECTransferConfig with ec_connector_extra_config
            call vllm.distributed.ec_transfer.ec_connector.base:ECConnectorBase(vllm_config, role)
            read :ECConnectorRole with SCHEDULER, WORKER
            read :ECConnectorMetadata
            override :ECConnectorBase.ensure_cache_available(self, request, num_computed_tokens) in
                vllm.v1.core.sched.scheduler:Scheduler.schedule
            replace .has_cache_item(self, identifier) in
                vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs
            replace .update_state_after_alloc(self, request, index) in
                vllm.v1.core.sched.scheduler:Scheduler._allocate_encoder_inputs
            replace .build_connector_meta(self, scheduler_output) in vllm.v1.core.sched.scheduler:Scheduler.schedule
            override .update_connector_output(self, connector_output) in
                vllm.v1.core.sched.scheduler:Scheduler.update_from_output
            override .take_unavailable_requests(self) in vllm.v1.core.sched.scheduler:Scheduler.update_from_output
            override .request_finished(self, request) in vllm.v1.core.sched.scheduler:Scheduler._free_request
            override .bind_connector_metadata(self, connector_metadata) in
                vllm.v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin._get_ec_connector_output
            replace .start_load_caches(self, encoder_cache, kwargs) in
                vllm.v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin._get_ec_connector_output
            override .start_save_caches(self, kwargs) in
                vllm.v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin._get_ec_connector_output
            replace .save_caches(self, encoder_cache, mm_hash, kwargs) in
                vllm.v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin.maybe_save_ec_to_connector
            override .get_finished(self, finished_req_ids) in
                vllm.v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin._get_ec_connector_output
            override .build_connector_worker_meta(self) in
                vllm.v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin._get_ec_connector_output
            replace :ECConnectorWorkerMetadata.aggregate(self, other) in
                vllm.distributed.ec_transfer.ec_connector.utils:ECOutputAggregator.aggregate
            read vllm.v1.outputs:ECConnectorOutput with ec_connector_worker_meta
            read vllm.v1.core.sched.output:SchedulerOutput with free_encoder_mm_hashes, total_num_scheduled_tokens
            read vllm.v1.request:Request with request_id, mm_features, ec_transfer_params
            call vllm.distributed.parallel_state:get_tensor_model_parallel_rank()
            read vllm.v1.engine.core:EngineCore with scheduler, model_executor, vllm_config
            call vllm.v1.core.sched.interface:SchedulerInterface.get_ec_connector(self)
            call vllm.v1.executor.abstract:Executor.collective_rpc(self, method, args)
            read vllm.config.multimodal:ImageDummyOptions
            read :VideoDummyOptions
            read :AudioDummyOptions
            read :BaseDummyOptions
            read :MultiModalDummyOptions
            call vllm.multimodal.processing.processor:BaseMultiModalProcessor.get_dummy_inputs(self, seq_len, mm_counts,
                mm_options)
            call vllm.multimodal.processing.context:TimingContext(enabled)
            call vllm.multimodal.utils:group_and_batch_mm_kwargs(mm_kwargs, device, pin_memory)
            read vllm.multimodal.inputs:MultiModalFeatureSpec with data, identifier, mm_position
            read vllm.v1.worker.gpu_model_runner:GPUModelRunner with device, get_model
            read vllm.config.multimodal:MultiModalConfig with video_pruning_rate, language_model_only, mm_encoder_only,
                enable_mm_embeds, allow_missing_mm_embeddings
        """),
    ),
    _engine(
        name="engine front end",
        purpose="utility calls to every EngineCore, our encoder, unfinished requests by rank, silent shutdown",
        processes=("worker",),
        without="a worker does not know when EngineCore has released a request's memory",
        instead="`AsyncLLM.collective_rpc` reaches the model's processes, not EngineCore; none for the rest",
        tests=("tests/contract/test_vllm_engine_contract.py", "tests/contract/test_vllm_engine_load.py"),
        seams=_seams("""
            read vllm.v1.engine.async_llm:AsyncLLM with engine_core, input_processor, output_processor, output_handler
            read vllm.v1.engine.core_client:AsyncMPClient with core_engines, encoder, resources in
                AsyncMPClient._send_input as encoder
            call :AsyncMPClient.call_utility_all_async(self, method, args)
            read :BackgroundResources with engine_dead
            read :DPLBAsyncMPClient with reqs_in_flight
            read vllm.v1.engine.output_processor:OutputProcessor with request_states
            read vllm.v1.engine.input_processor:InputProcessor with mm_encoder_cache_size
        """),
    ),
    _engine(
        name="engine statistics",
        purpose="load of each rank for the router, timings of a request for its report",
        processes=("worker",),
        without="workers report no load",
        instead="the Prometheus metrics have the same values, without the rank's last step",
        tests=("tests/contract/test_vllm_engine_load.py",),
        seams=_seams("""
            read vllm.v1.metrics.stats:SchedulerStats with num_running_reqs, kv_cache_usage
            read :RequestStateStats with queued_ts, scheduled_ts, first_token_ts, last_token_ts
        """),
    ),
    _engine(
        name="KV transfer",
        purpose="a worker reports how many tokens of a prompt it has read from another one, and its blocks for others",
        processes=("worker",),
        without="a prompt that is computed twice is not noticed; blocks of a client that leaves are kept for a lease",
        instead="vLLM's metrics have the sum over all requests",
        tests=("tests/contract/test_vllm_kv_transfer.py",),
        seams=_seams("""
            replace vllm.v1.engine.output_processor:OutputProcessor.process_outputs(self, engine_core_outputs,
                engine_core_timestamp, iteration_stats, weight_version) in
                vllm.v1.engine.async_llm:AsyncLLM._run_output_handler
            read vllm.v1.engine:EngineCoreOutput with request_id, prefill_stats, kv_transfer_params
            read vllm.v1.metrics.stats:PrefillStats with num_external_cached_tokens
            read vllm.v1.engine.output_processor:RequestState with external_req_id
        """),
    ),
    Group(
        name="NIXL on a CPU",
        purpose="an engine with a NIXL connector keeps its cores, and does not poll on one of them",
        module="seams.kv_transfer",
        processes=("check",),  # a worker without a role must not import NIXL
        without="two idle engines cost two cores",
        instead="none",
        tests=("tests/contract/test_vllm_kv_transfer.py",),
        is_optional=True,
        seams=_seams("""
            replace vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.create_connector(config, role,
                kv_cache_config) in vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized
            call vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker:NixlBaseConnectorWorker(vllm_config,
                engine_id, kv_cache_config)
        """),
    ),
    Group(
        name="KV events",
        purpose="the worker decodes the KV events that EngineCore publishes",
        module="engine.kv_events",
        processes=("worker",),
        without="requests are routed without regard to KV caches",
        instead="vLLM documents the events and a subscriber, but not the replay socket or the endpoints of other ranks",
        tests=("tests/contract/test_vllm_kv_events.py", "tests/contract/test_vllm_kv_event_reader.py"),
        seams=_seams("""
            order vllm.distributed.kv_events:EventBatch(ts, events, data_parallel_rank)
            read :BlockStored with block_hashes, parent_block_hash, token_ids, block_size, medium, lora_name,
                extra_keys, group_idx, kv_cache_spec_kind, locality
            read :BlockRemoved with block_hashes, medium, group_idx, locality
            read :AllBlocksCleared
            read :ZmqEventPublisher with END_SEQ
            call :ZmqEventPublisher.offset_endpoint_port(endpoint, data_parallel_rank)
        """),
    ),
    _cpu(
        name="model on a CPU",
        purpose="a CPU model of one rank runs in EngineCore's process; others yield cores while they wait",
        without="vLLM's own processes busy-wait on every core (`--distributed-executor-backend mp` works)",
        instead="the executor's qualified name in `distributed_executor_backend` is public; its methods are not",
        tests=("tests/contract/test_vllm_cpu_executor.py", "tests/contract/test_vllm_cpu_waiting.py"),
        seams=_seams("""
            override vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor(self) in
                vllm.v1.executor.abstract:Executor.__init__
            call vllm.utils.ompmultiprocessing:OMPProcessManager(config) with cpu_lists
            replace vllm.distributed.device_communicators.shm_broadcast:SpinCondition with is_reader, last_read,
                busy_loop_s in MessageQueue.create_from_handle
            override :SpinCondition.wait(self, timeout_ms)
        """),
    ),
    _cpu(
        name="start of EngineCore",
        purpose="on a CPU, EngineCore is a fork of the worker's front end, from before that has threads",
        without="EngineCore imports vLLM itself and shares no pages with its front end",
        instead="VLLM_WORKER_MULTIPROC_METHOD, which vLLM overrides on a CPU",
        tests=("tests/contract/test_vllm_engine_start.py",),
        seams=_seams("""
            replace vllm.v1.engine.utils:get_mp_context() in CoreEngineProcManager.__init__
            call vllm.ray.lazy_utils:is_in_ray_actor()
        """),
    ),
    _engine_core(
        name="KV blocks that were not read",
        purpose="tokens whose blocks could not be read from another engine do not count as read",
        without="the report of a request may name more transferred tokens than there were",
        tests=("tests/contract/test_vllm_kv_transfer.py",),
        seams=_seams("""
            replace vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv(self, request) in
                Scheduler._handle_blocked_waiting_request
            read :Scheduler with failed_recving_kv_req_ids
            read vllm.v1.request:Request with num_computed_tokens, prefill_stats
            call vllm.v1.metrics.stats:PrefillStats.set(self, num_prompt_tokens, num_local_cached_tokens,
                num_external_cached_tokens)
        """),
    ),
    _engine_core(
        name="phases of a start",
        purpose="a worker that starts reports what its engine does",
        without="`medialane serve` shows `starting the engine` until the worker is ready",
        tests=("tests/contract/test_vllm_start_phases.py",),
        seams=_seams("""
            replace vllm.model_executor.model_loader.weight_utils:tqdm in safetensors_weights_iterator
            replace vllm.compilation.decorators:monitor_torch_compile(vllm_config, message, is_encoder, tag,
                announce_start) in _support_torch_compile
            read vllm.config:CompilationMode with VLLM_COMPILE
            replace vllm.v1.executor.abstract:Executor.determine_available_memory(self) in
                vllm.v1.engine.core:EngineCore._initialize_kv_caches
            replace .compile_or_warm_up_model(self) in vllm.v1.engine.core:EngineCore._initialize_kv_caches
            replace vllm.multimodal.encoder_budget:MultiModalBudget.get_dummy_encoder_profile_inputs(self, modality,
                max_items_per_batch) in vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_mm_dummy_batch
            call .get_modality_with_max_tokens(self)
        """),
    ),
    _engine_core(
        name="rendezvous",
        purpose="the file through which an engine's processes meet is in the folder of its sockets",
        without="each start of an engine leaves a file in the folder for temporary files",
        tests=("tests/contract/test_vllm_engine_rendezvous.py",),
        seams=_seams("""
            replace vllm.v1.executor.uniproc_executor:get_file_store_init_method() in UniProcExecutor._distributed_args
            replace vllm.v1.executor.multiproc_executor:get_file_store_init_method() in MultiprocExecutor._init_executor
            read vllm.envs with VLLM_RPC_BASE_PATH
        """),
    ),
)
