"""The frames that vLLM would take of a video (fills `media.FrameSampler`).

Theory of operation. Each family has its own sampler in vLLM, a loader class that computes frame numbers from what the
decoder says of the file, has them read, and tells of them in metadata. So the loader that vLLM would choose does all of
that here too, with one step replaced: the function that decodes, which every loader looks up for each call, is for that
call one over our `Video`. Loaders that walk OpenCV's capture in a way of their own (GLM-5) keep vLLM's
decoder, as do frames to be recovered from a damaged file. A preparer is one thread, so nobody else meets the
replacement; `tests/contract/test_video_exactness.py` pins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

from medialane.core.errors import InvalidRequest, InvalidVideo, TooManyFrames
from medialane.core.media import FrameBatch, Video
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

#: What samplers raise for videos and numbers that they cannot do with.
_REFUSALS = (ValueError, AssertionError, ArithmeticError, LookupError, TypeError, NotImplementedError, OpenCVError)

#: vLLM's samplers make lists of so many numbers before they cut them to what the video has.
_MOST = 1_000_000

_JPEG_LIST_START = b"/9j/"


class VllmFrameSampler:
    """Samples as the vLLM of `model_config` does. Not thread-safe.

    What a client may ask for is judged before (`media_options`): options are taken here as they come.
    `max_sampled_frames` bounds what vLLM's own decoder is asked for; a `Video` has its own bound.
    """

    def __init__(self, model_config: Any, *, max_sampled_frames: int = 768) -> None:
        given = (model_config.multimodal_config and model_config.multimodal_config.media_io_kwargs) or {}
        self._own: dict[str, Any] = dict(given.get("video") or {})
        self._image: dict[str, Any] = dict(given.get("image") or {})
        self._backend = video_backend(model_config)
        self._max_sampled_frames = max_sampled_frames

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """As `FrameSampler.sample`. Raises InvalidRequest, InvalidVideo, and what `Video.read` raises."""
        asked = msgspec.json.decode(io, type=dict[str, Any])
        media_io = self._media_io(VideoMediaIO.merge_kwargs(self._own, asked))
        try:
            frames, metadata = self._load(video, media_io)
        except _REFUSALS as error:
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
        """vLLM's reader of videos, as `MediaConnector.fetch_video_async` makes it."""
        if "video_backend" not in options and self._backend:
            options["video_backend"] = self._backend
        backend = options.get("backend", "opencv")
        if backend != "opencv" or decodes_on_gpu(options.get("video_backend", "")):
            raise InvalidRequest("videos are decoded by OpenCV's rules here, not by another backend of vLLM")
        return VideoMediaIO(ImageMediaIO(**({"image_mode": "RGB"} | self._image)), **options)


def _encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """JSON of what a processor needs to know; the encoded video itself, which Nemotron's loader adds, stays behind."""
    told = {key: value for key, value in metadata.items() if key != "original_video_bytes"}
    return msgspec.json.encode(told, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a sampler's metadata has a {type(value).__name__}")


# vLLM's decoder, replaced


def _decoding_with(video: Video, most: int) -> AbstractContextManager[None]:
    """While this lasts, vLLM's loaders read `video`, whatever bytes they are given."""

    def decode(
        loader: type[VideoLoader],
        _data: bytes,
        target: VideoTargetMetadata,
        sampling: dict[str, Any],
        *,
        frame_recovery: bool = False,
    ) -> tuple[Any, VideoSourceMetadata, list[int], list[int]]:
        told = video.source
        source = source_for(loader, told.num_frames, told.fps, told.duration_s)
        indices = loader.compute_frames_index_to_sample(source=source, target=target, **sampling)
        if len(set(indices)) > most:
            raise TooManyFrames(f"{len(set(indices))} frames of the video were asked for, more than {most}")
        if not has_own_reader(loader):
            frames, valid = video.read(indices)
            if len(valid) == len(set(indices)) or not frame_recovery:
                return frames, source, indices, valid
        return vllm_decode(loader, bytes(video.data), target, sampling, frame_recovery=frame_recovery)

    return decoding_by(decode)
