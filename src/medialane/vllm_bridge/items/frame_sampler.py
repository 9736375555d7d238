"""Samples the same frames of a video as vLLM (implements `media.FrameSampler`).

Theory of operation. Each family has its own sampler in vLLM, a loader class that computes frame numbers from the
decoder's metadata of the file, has them read, and describes them in its own metadata. The loader that vLLM would choose
does all of that here too, with one step replaced: the decode function, which loaders look up at each call, is replaced
for the duration of the call by one over our `Video`. Loaders that read OpenCV's capture themselves (GLM-5) keep
vLLM's decoder, as do frames to be recovered from a damaged file. A preparer has one thread, so no other code sees the
replacement; `tests/contract/test_video_exactness.py` pins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

from medialane.types.errors import InvalidRequest, InvalidVideo, TooManyFrames
from medialane.types.media import FrameBatch, Video
from medialane.vllm_bridge.engine_errors import engine_fault
from medialane.vllm_bridge.seams.multimodal import (
    OpenCVError,
    VideoLoader,
    VideoSourceMetadata,
    VideoTargetMetadata,
    decodes_on_gpu,
    decoding_by,
    has_own_reader,
    load_video,
    source_for,
    video_backend,
    vllm_decode,
)

#: Raised by samplers for unsupported videos and numbers.
_REFUSALS = (ValueError, AssertionError, ArithmeticError, LookupError, TypeError, NotImplementedError, OpenCVError)

_JPEG_LIST_START = b"/9j/"


class VllmFrameSampler:
    """Samples like vLLM does for `model_config`. Not thread-safe.

    Options are not validated here: `options` restricts those of clients. `max_sampled_frames` limits the frames
    requested of vLLM's own decoder; a `Video` has its own limit.
    """

    def __init__(self, model_config: Any, *, max_sampled_frames: int = 768) -> None:
        given = (model_config.multimodal_config and model_config.multimodal_config.media_io_kwargs) or {}
        self._own: dict[str, Any] = dict(given.get("video") or {})
        self._image: dict[str, Any] = dict(given.get("image") or {})
        self._backend = video_backend(model_config)
        self._max_sampled_frames = max_sampled_frames

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """See `FrameSampler.sample`. Raises InvalidRequest, InvalidVideo, and what `Video.read` raises."""
        requested = msgspec.json.decode(io, type=dict[str, Any])
        media_io = self._media_io(VideoMediaIO.merge_kwargs(self._own, requested))
        try:
            frames, metadata = self._load(video, media_io)
        except _REFUSALS as error:
            if (fault := engine_fault(error)) is not None:
                raise fault from error
            raise InvalidVideo("the model's sampler does not support this video with these options") from error
        if not len(frames):
            raise InvalidVideo("no frame of the video can be decoded")
        return FrameBatch(np.ascontiguousarray(frames), _encode_metadata(metadata))

    def _load(self, video: Video, media_io: Any) -> tuple[Any, dict[str, Any]]:
        if bytes(video.data[:4]) == _JPEG_LIST_START:
            frames, metadata = media_io.load_base64("video/jpeg", str(video.data, "ascii")).media
        else:
            with _decoding_with(video, self._max_sampled_frames):
                frames, metadata = load_video(media_io, b"")
        return frames, metadata

    def _media_io(self, options: dict[str, Any]) -> Any:
        """Return vLLM's video reader, made as in `MediaConnector.fetch_video_async`."""
        if "video_backend" not in options and self._backend:
            options["video_backend"] = self._backend
        backend = options.get("backend", "opencv")
        if backend != "opencv" or decodes_on_gpu(options.get("video_backend", "")):
            raise InvalidRequest("only vLLM's video backend opencv is supported")
        return VideoMediaIO(ImageMediaIO(**({"image_mode": "RGB"} | self._image)), **options)


def _encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Return the metadata for the processor as JSON, without the encoded video, which Nemotron's loader adds."""
    kept = {key: value for key, value in metadata.items() if key != "original_video_bytes"}
    return msgspec.json.encode(kept, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a sampler's metadata has a {type(value).__name__}")


# vLLM's decoder, replaced


def _decoding_with(video: Video, max_frames: int) -> AbstractContextManager[None]:
    """Make vLLM's loaders read `video` within this context, ignoring the bytes passed to them."""

    def decode(
        loader: type[VideoLoader],
        _data: bytes,
        target: VideoTargetMetadata,
        sampling: dict[str, Any],
        *,
        frame_recovery: bool = False,
    ) -> tuple[Any, VideoSourceMetadata, list[int], list[int]]:
        opened = video.source
        source = source_for(loader, opened.num_frames, opened.fps, opened.duration_s)
        indices = loader.compute_frames_index_to_sample(source=source, target=target, **sampling)
        if len(set(indices)) > max_frames:
            raise TooManyFrames(f"{len(set(indices))} frames of the video were requested, more than {max_frames}")
        if not has_own_reader(loader):
            frames, valid = video.read(indices)
            if len(valid) == len(set(indices)) or not frame_recovery:
                return frames, source, indices, valid
        return vllm_decode(loader, bytes(video.data), target, sampling, frame_recovery=frame_recovery)

    return decoding_by(decode)
