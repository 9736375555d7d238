"""vLLM's renderer, its multimodal processor and its video loaders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from PIL import Image as PILImage
from transformers.feature_extraction_utils import BatchFeature
from vllm.config import ModelConfig
from vllm.model_executor.layers.fusion.mm_input_norm import _load_norm_params
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaWithBytes, VideoMediaIO
from vllm.multimodal.parse import MultiModalDataItems, ProcessorBatchItems
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.processing.processor import BaseMultiModalProcessor, MultiModalProcessingResult
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader, get_video_loader_backend_for_processor
from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata, opencv
from vllm.renderers import BaseRenderer
from vllm.transformers_utils.processor import cached_get_processor, get_video_processor_cls_name
from vllm.utils.async_utils import make_async
from vllm.utils.mistral import is_mistral_tokenizer

from medialane.types.errors import TooManyFrames
from medialane.types.media import Modality, Video
from medialane.types.tensor import PixelNormalisation
from medialane.vllm_bridge.seams.vision_chunk import take_images

try:
    from vllm.renderers.chat_utils import _get_embeds_data as embeds_data
except ImportError:  # moved by vLLM 0.33, where chat_utils is a package
    from vllm.renderers.chat_utils.item_tracker import _get_embeds_data as embeds_data

# The renderer


def prepare_media_by(renderer: BaseRenderer, process: Callable[..., Any]) -> None:
    """Make this renderer call `process` for the media of a prompt."""
    renderer._process_multimodal_async = process


def submit_rendering_by(renderer: BaseRenderer, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `submit` of the executor of chat templates and tokenizer by `wrap(submit)`."""
    executor = renderer._executor
    executor.submit = wrap(executor.submit)


def tokenize_by(
    renderer: BaseRenderer, salt: Callable[[], str | None], token_ids: Callable[[str, str, bool, int | None], Any]
) -> None:
    """Have this renderer's thread call `token_ids(text, salt, adds_special_tokens, max_length)` for the ids of a
    prompt; None: it tokenizes itself, as where `salt`, called on the event loop, returns None, and prompts that are
    truncated or need the offsets of their tokens."""
    plain = renderer._tokenize_prompt

    def tokenized(prompt: Any, params: Any, salt: str | None) -> Any:
        ids = None
        if salt is not None and params.truncate_prompt_tokens is None and not renderer._wants_offsets(prompt, params):
            options = params.get_encode_kwargs()
            ids = token_ids(prompt["prompt"], salt, options["add_special_tokens"], options["max_length"])
        return plain(prompt, params) if ids is None else renderer._build_tokens_prompt(ids, prompt)

    in_thread = make_async(tokenized, executor=renderer._executor)
    renderer._tokenize_prompt_async = lambda prompt, params: in_thread(prompt, params, salt())


def without_media_warm_up(renderer: BaseRenderer) -> None:
    """Keep this renderer from processing the model's largest items when it is warmed up: a second of CPU time and
    hundreds of MB for a processor that it does not use."""
    renderer._mm_warmup_done = True


def is_mistral(tokenizer: Any) -> bool:
    """Return whether this is the tokenizer of mistral_common."""
    return bool(is_mistral_tokenizer(tokenizer))


# The multimodal processor


def processor_of(renderer: BaseRenderer) -> BaseMultiModalProcessor:
    """Return the renderer's processor; its modalities are ours."""
    return take_images(renderer.get_mm_processor())


def new_processor(model_config: ModelConfig) -> BaseMultiModalProcessor:
    """Return a new processor; its modalities are ours."""
    return take_images(MULTIMODAL_REGISTRY.create_processor(model_config))


def accepted_modalities(processor: BaseMultiModalProcessor) -> frozenset[str]:
    """Return the modalities that requests may have: the model supports them, and their limit is not 0
    (`--limit-mm-per-prompt`)."""
    return frozenset(modality for modality, limit in processor.info.allowed_mm_limits.items() if limit)


def unknown_modalities(processor: BaseMultiModalProcessor) -> list[str]:
    """Return the modalities of requests that we do not have."""
    return sorted(accepted_modalities(processor) - set(get_args(Modality)))


def run_hf_processor(
    processor: BaseMultiModalProcessor, items: MultiModalDataItems, options: Mapping[str, object]
) -> BatchFeature:
    # Functions that a processor decorates with `torch.compile` (Nemotron Nano VL) run as they are, with equal results:
    # preparers have no compiler, and the process that they fork from may not have its threads.
    with torch.compiler.set_stance("force_eager"):
        return processor._apply_hf_processor_main(mm_items=items, hf_kwargs=options)


#: Raised for a model whose family processes media by itself, without the files of a Hugging Face processor.
NO_HF_PROCESSOR = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError)


def hf_processor_of(processor: BaseMultiModalProcessor) -> Any | None:
    """Return its Hugging Face processor; None for a family that processes media without: the model has no files from
    which vLLM could load it."""
    try:
        return processor.info.get_hf_processor()
    except NO_HF_PROCESSOR:
        return None


def load_hf_processor(processor: BaseMultiModalProcessor) -> Any:
    """Return a Hugging Face processor like `processor`'s, loaded anew: no use has changed it."""
    context = processor.info.ctx
    cached_get_processor.cache_clear()
    return MULTIMODAL_REGISTRY.create_processor(
        context.model_config, tokenizer=context.tokenizer
    ).info.get_hf_processor()


def fields_config(
    processor: BaseMultiModalProcessor, data: BatchFeature, options: Mapping[str, object]
) -> Mapping[str, Any]:
    """Return how each field of the results is split into items."""
    return processor._get_mm_fields_config(data, options)


def prompt_updates(
    processor: BaseMultiModalProcessor,
    items: MultiModalDataItems,
    options: Mapping[str, object],
    kwargs: MultiModalKwargsItems,
) -> Mapping[str, Sequence[Sequence[Any]]]:
    """Return the placeholder tokens of each item: by modality, then by item, the updates; one of them applies."""
    return processor._get_mm_prompt_updates(items, options, kwargs)


def find_placeholders(
    processor: BaseMultiModalProcessor, token_ids: list[int], updates: Any
) -> Mapping[str, Sequence[Any]]:
    return processor._find_mm_placeholders(token_ids, updates)


def expand_before_updates(
    processor: BaseMultiModalProcessor, expand: Callable[[list[int], Mapping[str, Sequence[Sequence[Any]]]], list[int]]
) -> None:
    """Have `expand` replace a prompt's tokens, given its prompt updates, before the processor applies those."""
    apply = processor._maybe_apply_prompt_updates

    def applied(mm_items: MultiModalDataItems, mm_res: MultiModalProcessingResult) -> Any:
        expanded = MultiModalProcessingResult(
            prompt_ids=expand(mm_res.prompt_ids, mm_res.prompt_updates),
            kwargs=mm_res.kwargs,
            hashes=mm_res.hashes,
            prompt_updates=mm_res.prompt_updates,
        )
        return apply(mm_items, expanded)

    processor._maybe_apply_prompt_updates = applied


def expands_before_updates(processor: BaseMultiModalProcessor) -> bool:
    """Return whether `expand_before_updates` was called for this processor."""
    return "_maybe_apply_prompt_updates" in vars(processor)


def processes_items_apart(processor: BaseMultiModalProcessor) -> bool:
    """Return whether the family does not override the step that `expand_prompt` replaces."""
    return type(processor)._cached_apply_hf_processor is BaseMultiModalProcessor._cached_apply_hf_processor


def process_whole(processor: BaseMultiModalProcessor, token_ids: list[int], media: Mapping[str, Any]) -> Any:
    """Process a request as plain vLLM does, without a cache."""
    data = processor.info.parse_mm_data(media)
    inputs = ProcessorInputs(prompt=token_ids, mm_data_items=data, hf_processor_mm_kwargs={})
    with torch.compiler.set_stance("force_eager"):
        return processor.apply(inputs, TimingContext(enabled=False))


def expand_prompt(
    processor: BaseMultiModalProcessor,
    token_ids: list[int],
    *,
    data: MultiModalDataItems,
    options: Mapping[str, object],
    kwargs: MultiModalKwargsItems,
    hashes: Mapping[str, list[str]],
    updates: Mapping[str, list[list[Any]]],
) -> Any:
    """Run the family's own `apply` over items that have been processed already."""
    own = copy.copy(processor)

    def already_processed(inputs: ProcessorInputs, _timing: TimingContext) -> MultiModalProcessingResult:
        return MultiModalProcessingResult(
            prompt_ids=own._postprocess_prompt(inputs.prompt), kwargs=kwargs, hashes=hashes, prompt_updates=updates
        )

    own._cached_apply_hf_processor = already_processed
    inputs = ProcessorInputs(prompt=token_ids, mm_data_items=data, hf_processor_mm_kwargs=options)
    return own.apply(inputs, TimingContext(enabled=False))


# Video loaders

#: vLLM's own decoder: (loader, the file's bytes, target, sampling options, frame_recovery=) -> frames, source,
#: requested and decoded indices.
vllm_decode: Callable[..., tuple[Any, VideoSourceMetadata, list[int], list[int]]] = opencv.decode_opencv

#: Base of OpenCV's exceptions.
OpenCVError: type[Exception] = opencv.cv2.error


def load_frames(media_io: VideoMediaIO, video: Video, max_frames: int) -> tuple[Any, dict[str, Any]]:
    """Return frames and metadata of a video as the loader of `media_io` samples them with its options, read from
    `video`. Loaders that read OpenCV's capture themselves keep vLLM's decoder, as do frames to be recovered from a
    damaged file. Raises TooManyFrames, and what the loader and `Video.read` raise. Not for several threads."""

    def decode(
        loader: type[VideoLoader],
        _data: bytes,
        target: VideoTargetMetadata,
        sampling: dict[str, Any],
        *,
        frame_recovery: bool = False,
    ) -> tuple[Any, VideoSourceMetadata, list[int], list[int]]:
        opened = video.source
        source = loader._prepare_source(VideoSourceMetadata(opened.num_frames, opened.fps, opened.duration_s))
        indices = loader.compute_frames_index_to_sample(source=source, target=target, **sampling)
        _check_number(indices, max_frames)
        if loader.read_frames.__func__ is VideoLoader.read_frames.__func__:
            frames, valid = video.read(indices)
            if len(valid) == len(set(indices)) or not frame_recovery:
                return frames, source, indices, valid
        return vllm_decode(loader, bytes(video.data), target, sampling, frame_recovery=frame_recovery)

    before = opencv.decode_opencv
    opencv.decode_opencv = decode
    try:
        frames, metadata = media_io.video_loader.load_bytes(b"", num_frames=media_io.num_frames, **media_io.kwargs)
    finally:
        opencv.decode_opencv = before
    return frames, metadata


def limit_sampled_frames(max_frames: int) -> None:
    """Make vLLM's video loaders, in every thread of this process, raise TooManyFrames before they decode more frames.

    The number depends on a request's options and on the file.
    """

    def decode(loader: type[VideoLoader], *args: Any, **kwargs: Any) -> Any:
        class Limited(loader):  # type: ignore[misc]  # vllm is not typed
            @classmethod
            def compute_frames_index_to_sample(cls, *args: Any, **kwargs: Any) -> Any:
                indices = super().compute_frames_index_to_sample(*args, **kwargs)
                _check_number(indices, max_frames)
                return indices

        return vllm_decode(Limited, *args, **kwargs)

    opencv.decode_opencv = decode


def _check_number(indices: Sequence[int], max_frames: int) -> None:
    if (number := len(set(indices))) > max_frames:
        raise TooManyFrames(f"{number} frames of the video were requested, more than {max_frames}")


def video_backend(model_config: Any) -> str | None:
    """Return the name of the loader that vLLM chooses for a model; None if it has no preference."""
    return get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config))


def decodes_on_gpu(backend: str) -> bool:
    return bool(VIDEO_LOADER_REGISTRY.backend_requires_gpu(backend))


# vLLM's hashes of media items (`mm_hash`), computed by vLLM over stand-ins for what it would have decoded


def mm_hashes(
    processor: BaseMultiModalProcessor,
    items: Mapping[str, Sequence[Any]],
    uuids: Mapping[str, Sequence[str | None]],
    *,
    options: Mapping[str, object],
    io: Mapping[str, Mapping[str, object]],
) -> Mapping[str, list[str]]:
    """Return the hashes of all items of a prompt, by modality; items with a uuid are not read."""
    inputs = ProcessorInputs(
        prompt=[],
        mm_data_items=MultiModalDataItems({name: ProcessorBatchItems(each, name) for name, each in items.items()}),
        mm_uuid_items=dict(uuids),
        hf_processor_mm_kwargs=options,
        media_io_kwargs=io,
    )
    hashes: Mapping[str, list[str]] = processor._get_mm_hashes(inputs)
    return hashes


def encoded_image(data: bytes | memoryview, *, io_config: Mapping[str, object] | None) -> Any:
    """Return an image of vLLM's loader, whose pixels are not hashed. Nor is its EXIF: an ImageID counts only if it is a
    Python UUID, which no file has."""
    return MediaWithBytes(PILImage.new("RGB", (1, 1)), data, io_config)


def hashed_video(data: bytes | memoryview, frames: Any, metadata: Mapping[str, object]) -> Any:
    """Return a video of vLLM's loader, which hashes the frames only if they have fewer bytes than the file."""
    return MediaWithBytes(frames, data), metadata


# Comparisons with plain vLLM, and with what its engine does on the device


def load_as_plain(model_config: ModelConfig, modality: Modality, url: str) -> Any:
    """Return an item as plain vLLM's connector loads it: with its own decoders, and the operator's options."""
    connector = MEDIA_CONNECTOR_REGISTRY.load("http", media_io_kwargs=model_config.multimodal_config.media_io_kwargs)
    if modality == "video":
        return connector.fetch_video(url, video_processor=get_video_processor_cls_name(model_config))
    return connector.fetch_audio(url) if modality == "audio" else connector.fetch_image(url)


def device_normalisation(model_config: ModelConfig) -> PixelNormalisation | None:
    """Return what the engine does to pixels on its device; None if items have them normalised. Reads the
    model's files, of the hub, too."""
    if not model_config.multimodal_config.mm_device_do_normalize:
        return None
    params = _load_norm_params(model_config)
    return PixelNormalisation(params.rescale_factor, tuple(params.image_mean), tuple(params.image_std))
