"""A client's options of the model's processor: `mm_processor_kwargs` of a request, pixel limits of an item.

Options are part of cache keys, are sent to preparers and workers, and reach the model's processor. Those larger than
any processor needs are rejected, in one pass that stops at the first limit (`check_options`, also for
`media_io_kwargs`).

Some options a client may not set, even if the operator trusts requests with them: vLLM passes options to Hugging Face's
processor together with arguments of its own. Arguments that specify the input or the format of the results are not
processor options: another value breaks the call or the use of its results. All others are validated by the processor
(`preparation`).

Theory of operation, in a worker. A preparer may run the processor with any option: its memory and time are limited. A
worker has no such limits (stages `decoded` and `url`), so there an option must not make an item take more than the
operator's own options allow. Only the pixel limits of the families that have them are known to: they are counts, and
may be lowered. No other option is harmless because its value is small: a smaller tile, crop or hop makes more tiles
and frames, and an image that is not resized is as large as its file says.

vLLM's `media_io_kwargs` at three levels: the operator's (model), the request's, and the item's own.

An item's options take precedence over the request's, and these over the model's, by vLLM's own merge rules. The
operator may set what vLLM's loaders accept and our decoders support. A client may only set how frames are sampled: no
decoder, no device, no option that is not in this table. vLLM ignores unknown options; we reject them, since a later
vLLM might honour an option that is not part of the cache key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from vllm.config import ModelConfig
from vllm.multimodal.media.video import VideoMediaIO

from medialane.types.errors import InvalidRequest, StartupFailed
from medialane.types.hashing import canonical_options
from medialane.types.media import Modality

#: The longest list in practice is a video's `frames_indices`: 768 by default.
MAX_VALUES = 2048
MAX_BYTES = 64 * 1024
MAX_DEPTH = 8

#: Bounds of an integer that is valid in both JSON and msgpack.
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def check_options(options: object, param: str) -> None:
    """Raise InvalidRequest naming `param` for options that are too large, too deep, or not JSON."""
    num_values = num_bytes = 0
    todo = [(param, options, 1)]
    while todo:
        path, value, depth = todo.pop()
        num_values += 1
        num_bytes += _bytes_of(value, path)
        num_inside = len(value) if isinstance(value, Mapping | list | tuple) else 0
        if num_inside and depth > MAX_DEPTH:
            raise InvalidRequest(f"the options are nested deeper than {MAX_DEPTH} levels", param=param)
        if num_values + len(todo) + num_inside > MAX_VALUES:
            raise InvalidRequest(f"the options have more than {MAX_VALUES} values", param=param)
        if isinstance(value, Mapping):
            num_bytes += sum(len(key) for key in value if isinstance(key, str))
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(f"the options are larger than {MAX_BYTES} bytes", param=param)
        todo += [(name, inner, depth + 1) for name, inner in _inside(value, path)]


def _inside(value: object, path: str) -> list[tuple[str, object]]:
    """Return the members of an object or list, each with its path for error messages."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest("the names of options must be strings", param=path)
        return [(f"{path}.{key}", inner) for key, inner in value.items()]
    return [(f"{path}[{n}]", inner) for n, inner in enumerate(value)] if isinstance(value, list | tuple) else []


def _bytes_of(value: object, param: str) -> int:
    """Return the approximate encoded size. Raises InvalidRequest for values that JSON or msgpack cannot represent."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise InvalidRequest("the options have an integer of more than 64 bits", param=param)
    if isinstance(value, float) and value - value != 0:  # infinite, or not a number
        raise InvalidRequest("the options have a number that JSON cannot represent", param=param)
    if value is None or isinstance(value, bool | int | float | Mapping | list | tuple):
        return 8
    raise InvalidRequest("the options have a value that JSON cannot represent", param=param)


#: Arguments of `ProcessorMixin.__call__` and of its processors that vLLM 0.32 sets itself or relies on.
_RESERVED = frozenset(
    (
        "text", "images", "image", "videos", "video", "audio", "audios", "data", "conversation", "prompt",
        "return_tensors", "return_dict", "return_row_col_info", "return_metadata", "return_offsets_mapping",
        "return_overflowing_tokens", "return_special_tokens_mask", "input_data_format", "tokenize", "device",
    )
)  # fmt: skip


def check_processor_options(options: Mapping[str, object] | None) -> None:
    """Raise InvalidRequest naming an option that a request may not set, of the processor or one of its components
    (`images_kwargs`)."""
    _check(options or {}, "mm_processor_kwargs")


def _check(options: Mapping[str, object], param: str) -> None:
    for key, value in options.items():
        name = f"{param}.{str(key)[:64]}"
        if key in _RESERVED:
            raise InvalidRequest(f"{key} cannot be set by a request", param=name)
        if isinstance(value, Mapping) and str(key).endswith("_kwargs"):
            _check(value, name)


#: Neither changes the size of an item; vLLM reads the first itself.
_FLAGS = frozenset(("use_audio_in_video", "do_sample_frames"))

#: `size` has these names in families with pixel limits, and counts pixels.
_EDGES = frozenset(("shortest_edge", "longest_edge"))


def check_worker_options(
    options: Mapping[str, object], max_pixels: Mapping[Modality, int], modalities: Iterable[Modality]
) -> None:
    """Raise InvalidRequest naming an option with which items of these modalities may not be processed in a worker.

    `max_pixels` are the operator's limits (`ModelProfile.max_pixels`).
    """
    limits = [max_pixels[modality] for modality in modalities if modality in max_pixels]
    most = min(limits, default=0)
    for key, value in options.items():
        if key in _FLAGS and isinstance(value, bool):
            continue
        numbers = _pixel_counts(key, value)
        if not numbers or not limits:
            message = "a worker may not process media with this option; a preparer may (--stage features)"
            raise InvalidRequest(message, param=f"mm_processor_kwargs.{key[:64]}")
        for name, number in numbers.items():
            if type(number) is not int or not 1 <= number <= most:
                message = f"a worker may process media with 1 to {most} pixels only"
                raise InvalidRequest(message, param=f"mm_processor_kwargs.{name}")


def _pixel_counts(key: str, value: object) -> Mapping[str, object]:
    """Return the numbers of pixels in an option, by name; empty for another option."""
    if key in ("min_pixels", "max_pixels"):
        return {key: value}
    if key == "size" and isinstance(value, Mapping) and _EDGES.issuperset(value):
        return {f"{key}.{name}": number for name, number in value.items()}
    return {}


def item_options(item: bytes, max_pixels: int | None, param: str) -> bytes:
    """Return an item's processor options (`MediaRef.options`), as far as the model has them and within `max_pixels`.

    Raises InvalidRequest naming the option.
    """
    if max_pixels is None or item == b"{}":
        return b"{}"
    options = msgspec.json.decode(item, type=dict[str, int])
    if "max_pixels" in options:
        options["max_pixels"] = max_pixels = min(options["max_pixels"], max_pixels)
    if options.get("min_pixels", 0) > max_pixels:
        raise InvalidRequest(f"min_pixels must be at most {max_pixels} for this model", param=f"{param}.min_pixels")
    return canonical_options(options)


IoOptions = Mapping[str, Mapping[str, object]]

#: Default of vLLM's `VideoMediaIO`.
DEFAULT_NUM_FRAMES = 32

#: As in `gateway.intake.places`: the run time of some samplers is proportional to it.
_MAX_FPS = 240
_MAX_DURATION_S = 86_400
_MAX_COUNT = 1 << 31

_Fps = Annotated[float, msgspec.Meta(gt=0, le=_MAX_FPS)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=_MAX_DURATION_S)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MAX_COUNT)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]

#: Value of -1 for all frames, or the sampler's own rate.
_AllFrames = Annotated[int, msgspec.Meta(ge=-1, le=-1)]
_AnyRate = Annotated[float, msgspec.Meta(ge=-1, le=-1)]

#: The types of an option's value: it must have one of them.
_Types = tuple[Any, ...]

#: Video options that clients may set, of all loaders of vLLM 0.32 (`multimodal/video.py`, `multimodal/media/video.py`).
_VIDEO: Mapping[str, _Types] = {
    "num_frames": (_Count, _AllFrames),
    "fps": (_Fps, _AnyRate),
    "max_duration": (_Duration,),
    "frame_recovery": (bool,),
    # Qwen, GLM, EmbeddingGemma
    "min_frames": (_Count,),
    "max_frames": (_Count,),
    "temporal_patch_size": (Annotated[int, msgspec.Meta(ge=1, le=16)],),
    "overflow_strategy": (Literal["truncate", "uniform"],),
    # Molmo 2
    "frame_sample_mode": (Literal["uniform_last_frame", "fps"],),
    "max_fps": (_Fps,),
    "sampling_fps": (_Fps,),
    # video/jpeg: frames that the client has sampled itself
    "frames_indices": (list[_Index],),
    "total_num_frames": (_Count,),
    "duration": (_Duration,),
    "do_sample_frames": (bool,),
}

#: The fixed behaviour of our image decoder. A client may set these values, without effect.
_IMAGE: Mapping[str, _Types] = {
    "image_mode": (Literal["RGB"],),
    "rgba_background_color": (tuple[Literal[255], Literal[255], Literal[255]],),
}

_ALLOWED: Mapping[str, Mapping[str, _Types]] = {"image": _IMAGE, "video": _VIDEO, "audio": {}}

#: Image and audio options that the operator may set: the fixed behaviour of our decoders.
_SUPPORTED: Mapping[str, Mapping[str, _Types]] = {
    "image": _IMAGE,
    "audio": {"audio_backend": (Literal["auto"], None)},
}

#: Options of video decoders other than OpenCV's, which ours replaces.
_DECODERS = ("hw_decoders", "pool_size", "timeout_sec", "device", "num_ffmpeg_threads", "seek_mode")


def model_io(model_config: ModelConfig) -> IoOptions:
    """Return the operator's options (`--media-io-kwargs`), by modality."""
    config = model_config.multimodal_config
    return {} if config is None else config.media_io_kwargs or {}


def check_model_io(model_config: ModelConfig) -> None:
    """Raise StartupFailed for an option of the operator that our decoders do not support.

    Not needed for stage `url`, in which the worker's vLLM decodes: it supports all of them.
    """
    for modality, options in model_io(model_config).items():
        for key, value in options.items():
            if not _is_supported(modality, key, value):
                name = f"{modality}.{key}"
                raise StartupFailed(f"--media-io-kwargs: {name} is not supported by the gateway; use --stage url")


def _is_supported(modality: str, key: str, value: object) -> bool:
    if modality != "video":
        return _has_type(value, _SUPPORTED.get(modality, {}).get(key, ()))
    # Other values of `video_backend` are samplers; samplers that decode on a GPU are named after their decoder.
    return key not in _DECODERS and (key not in ("backend", "video_backend") or value not in _OTHER_DECODERS)


_OTHER_DECODERS = ("torchcodec", "pynvvideocodec", "deepstream")


def final_io(modality: Modality, model: IoOptions, request: IoOptions | None, item: bytes) -> bytes:
    """Return the decode options of one item as canonical JSON, for `MediaRef.io`.

    `request` are the client's options, or already merged with the model's by vLLM: those equal to the model's are
    accepted. `item` are the item's own (`MediaRef.io` from intake). An item's `max_frames` caps the number of frames,
    however it was chosen, and with `fps` alone it is that number; a request's is left to the sampler, as in vLLM.
    Images and audio have none but what intake sets. Raises InvalidRequest naming an option that a client may not set,
    or not to this value.
    """
    request = request or {}
    check_options(request, "media_io_kwargs")
    for name, options in request.items():
        _check_modality(name, options, model.get(name, {}))
    if modality != "video":
        return item
    merge = VideoMediaIO.merge_kwargs
    own = msgspec.json.decode(item, type=dict[str, Any])
    merged = merge(merge(dict(model.get("video", {})), dict(request.get("video", {}))), own)
    return canonical_options(_capped(merged, own["max_frames"]) if "max_frames" in own else merged)


def _capped(options: Mapping[str, Any], max_frames: int) -> dict[str, Any]:
    """Return the options with at most `max_frames` frames, for samplers with a frame count and samplers with a cap.

    `num_frames` is always set: if not given, from vLLM's default, or from `max_frames` if `fps` is given.
    """
    chosen = options.get("num_frames", max_frames if "fps" in options else DEFAULT_NUM_FRAMES)
    return {**options, "num_frames": min(chosen, max_frames) if chosen > 0 else max_frames}


def _check_modality(modality: str, options: object, model: Mapping[str, object]) -> None:
    allowed = _ALLOWED.get(modality)
    if allowed is None:
        message = f"media_io_kwargs only supports {', '.join(sorted(_ALLOWED))}"
        raise InvalidRequest(message, param=f"media_io_kwargs.{modality[:64]}")
    if not isinstance(options, Mapping):
        raise InvalidRequest("the options must be an object", param=f"media_io_kwargs.{modality}")
    for key, value in options.items():
        if key in model and model[key] == value:
            continue
        param = f"media_io_kwargs.{modality}.{key[:64]}"
        if key not in allowed:
            raise InvalidRequest("this option cannot be set by a request", param=param)
        if not _has_type(value, allowed[key]):
            raise InvalidRequest("invalid value of this option", param=param)


def _has_type(value: object, types: _Types) -> bool:
    for allowed in types:
        with suppress(msgspec.ValidationError):
            msgspec.convert(value, allowed)
            return True
    return False
