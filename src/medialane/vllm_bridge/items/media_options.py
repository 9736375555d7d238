"""vLLM's `media_io_kwargs` at three levels: the operator's (model), the request's, and the item's own.

An item's options take precedence over the request's, and these over the model's, by vLLM's own merge rules. The
operator may set what vLLM's loaders accept and our decoders support. A client may only set how frames are sampled: no
decoder, no device, no option that is not in this table. vLLM ignores unknown options; we reject them, since a later
vLLM might honour an option that is not part of the cache key.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from vllm.config import ModelConfig
from vllm.multimodal.media.video import VideoMediaIO

from medialane.types.errors import InvalidRequest, StartupFailed
from medialane.types.hashing import canonical_options
from medialane.types.media import Modality
from medialane.vllm_bridge.items.processor_options import check_options

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

#: The types of an option's value, one of which it must have.
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
    return {} if config is None else config.media_io_kwargs


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
    # Other values of `video_backend` are samplers; those that decode on a GPU are named after their decoder.
    return key not in _DECODERS and (key not in ("backend", "video_backend") or value not in _OTHER_DECODERS)


_OTHER_DECODERS = ("torchcodec", "pynvvideocodec", "deepstream")


def final_io(modality: Modality, model: IoOptions, request: IoOptions | None, item: bytes) -> bytes:
    """Return the decode options of one item as canonical JSON, for `MediaRef.io`.

    `request` are the client's options, or already merged with the model's by vLLM: those equal to the model's are
    accepted. `item` are the item's own (`MediaRef.io` from intake). An item's `max_frames` caps the number of frames,
    however it was chosen, and with `fps` alone it is that number; a request's is left to the sampler, as in vLLM.
    Images and audio have no options. Raises InvalidRequest naming an option that a client may not set, or not to this
    value.
    """
    request = request or {}
    check_options(request, "media_io_kwargs")
    for name, options in request.items():
        _check(name, options, model.get(name, {}))
    if modality != "video":
        return b"{}"
    merge = VideoMediaIO.merge_kwargs
    own = msgspec.json.decode(item, type=dict[str, Any])
    merged = merge(merge(dict(model.get("video", {})), dict(request.get("video", {}))), own)
    return canonical_options(_capped(merged, own["max_frames"]) if "max_frames" in own else merged)


def _capped(options: Mapping[str, Any], max_frames: int) -> dict[str, Any]:
    """Return the options with at most `max_frames` frames, for samplers with a frame count and those with a cap.

    `num_frames` is always set: if not given, from vLLM's default, or from `max_frames` if `fps` is given.
    """
    chosen = options.get("num_frames", max_frames if "fps" in options else DEFAULT_NUM_FRAMES)
    return {**options, "num_frames": min(chosen, max_frames) if chosen > 0 else max_frames}


def _check(modality: str, options: object, model: Mapping[str, object]) -> None:
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
