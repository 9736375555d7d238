"""Decodes encoded video to frames: applies the limits, reads the requested frames, converts them to RGB.

`video_capture` locates a file's frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import av
import numpy as np
import pybase64
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from medialane.media.config import MediaConfig
from medialane.media.container import check_references
from medialane.media.image import decode_image
from medialane.media.image_header import Sniffed, sniff_image
from medialane.media.video_capture import UNOPENABLE, Capture, FrameTable, FrameTableMismatch, open_container
from medialane.types.errors import (
    EmptyMedia,
    ImageTooLarge,
    InvalidBase64,
    InvalidImage,
    InvalidVideo,
    MediaTooLarge,
    TooManyFrames,
    UnsupportedMediaType,
    VideoTooLarge,
    VideoTooLong,
)
from medialane.types.media import Video, VideoSource

_Pixels = NDArray[np.uint8]

#: FFmpeg's demuxer by media type. Naming it disables probing for others.
_DEMUXERS = {"video/mp4": "mp4", "video/webm": "matroska", "video/x-matroska": "matroska"}

#: Formats for which direct conversion to RGB gives the same values as OpenCV's conversion via BGR.
_DIRECT_FORMATS = {"yuv420p", "yuvj420p"}

#: Rotation in the file's metadata, in degrees, to OpenCV's number of quarter turns (counterclockwise).
_QUARTER_TURNS = {90: 1, 180: 2, -180: 2, -90: 3}


@contextmanager
def open_video(data: memoryview, media_type: str, config: MediaConfig, *, blank: bool = False) -> Iterator[Video]:
    """Open an encoded video of the type returned by `sniff_video`; it is closed at the end of the block. If it is
    `blank`, frames that are certain to exist are black and not decoded.

    Raises InvalidVideo, VideoTooLarge, VideoTooLong, UnsupportedMediaType; for a list of JPEG frames what
    `JpegList` raises.
    """
    if media_type == "video/jpeg":
        yield JpegList(data, config)
        return
    if media_type not in _DEMUXERS:
        raise UnsupportedMediaType("the media is not an MP4, WebM or Matroska video")
    if media_type == "video/mp4":
        check_references(data)
    with ExitStack() as stack:
        try:
            opened = BlankVideo if blank else EncodedVideo
            video = opened(data, config, demuxer=_DEMUXERS[media_type], stack=stack)
        except (ValueError, OverflowError) as error:  # PyAV's, about numbers that FFmpeg got from the file
            raise InvalidVideo(UNOPENABLE) from error
        yield video


class JpegList:
    """vLLM's list of JPEG frames, base64 strings joined by commas (a `Video`).

    It has no frame rate: vLLM takes it from the request's options.
    """

    def __init__(self, data: memoryview, config: MediaConfig) -> None:
        self._frames = _jpeg_frames(data, config)
        self._config = config
        self.data = data
        self.source = VideoSource(num_frames=len(self._frames), fps=0.0, duration_s=0.0)

    def read(self, indices: Sequence[int]) -> tuple[_Pixels, list[int]]:
        """Implement `Video.read`; every frame is readable."""
        requested = [index for index in indices if 0 <= index < len(self._frames)]
        if not requested:
            raise InvalidVideo("the video has none of the frames that the model samples")
        frames = [decode_image(memoryview(self._frames[index]), self._config).pixels for index in requested]
        if len({frame.shape for frame in frames}) > 1:
            raise InvalidVideo("the video's frames differ in size")
        return np.stack(frames), requested


def _jpeg_frames(view: memoryview, config: MediaConfig) -> list[bytes]:
    """Return the JPEG files of a list, after checking their number and headers against the limits.

    Raises InvalidBase64, InvalidVideo, TooManyFrames, VideoTooLarge, UnsupportedMediaType.
    """
    parts = bytes(view).split(b",", config.max_sampled_frames)
    if len(parts) > config.max_sampled_frames:
        raise TooManyFrames(f"the video has more than {config.max_sampled_frames} frames")
    frames = [_from_base64(part) for part in parts]
    sizes = {(frame.width, frame.height) for frame in (_sniff_frame(data, config) for data in frames)}
    if len(sizes) > 1:
        raise InvalidVideo("the video's frames differ in size")
    (width, height) = sizes.pop()
    if len(frames) * width * height * 3 > config.max_video_decoded_bytes:
        raise VideoTooLarge(f"{len(frames)} frames of {width}x{height} take too much memory")
    return frames


def _from_base64(text: bytes) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidBase64("a frame of the video is not base64") from error


def _sniff_frame(data: bytes, config: MediaConfig) -> Sniffed:
    try:
        sniffed = sniff_image(data, config)
    except (EmptyMedia, InvalidImage) as error:
        raise InvalidVideo("a frame of the video is not a valid JPEG") from error
    except (ImageTooLarge, MediaTooLarge) as error:
        raise VideoTooLarge("a frame of the video is too large") from error
    if sniffed.media_type != "image/jpeg":
        raise UnsupportedMediaType("a frame of the video is not a JPEG")
    if sniffed.width * sniffed.height > config.max_video_pixels:
        raise VideoTooLarge(f"a frame of the video has more than {config.max_video_pixels} pixels")
    return sniffed


class EncodedVideo:
    """A video in a container (a `Video`). `stack` owns what it opens."""

    def __init__(self, data: memoryview, config: MediaConfig, *, demuxer: str, stack: ExitStack) -> None:
        self.data = data
        self._config = config
        self._demuxer = demuxer
        self._stack = stack
        self._capture = self._open(strict=True)
        self._table: FrameTable | None = None
        self.source = self._find_source()

    def read(self, indices: Sequence[int]) -> tuple[_Pixels, list[int]]:
        """Implement `Video.read`. Frames that cannot be decoded are omitted."""
        requested = sorted({index for index in indices if index >= 0})
        self._check(requested)
        if self._table is not None:
            try:
                return self._jump(self._table, requested)
            except FrameTableMismatch:
                self._table = None
                self._as_opencv()
        return self._collect(requested, self._capture.walk(requested))

    def _jump(self, table: FrameTable, requested: list[int]) -> tuple[_Pixels, list[int]]:
        """Read frames of a plain file. Raises FrameTableMismatch."""
        return self._collect(requested, self._capture.jump(table, requested))

    def _open(self, *, strict: bool) -> Capture:
        container = self._stack.enter_context(open_container(self.data, self._demuxer, self._config))
        return Capture(container, self._config, strict=strict)

    def _find_source(self) -> VideoSource:
        """Return the same as vLLM's `get_video_metadata`."""
        num_frames, fps = self._capture.num_claimed_frames, self._capture.fps
        self._check_length(num_frames)
        self._table = self._capture.frame_table()
        if self._table is None:
            num_frames = self._as_opencv()
        return VideoSource(num_frames=num_frames, fps=fps, duration_s=num_frames / fps)

    def _as_opencv(self) -> int:
        """Reopen and count like OpenCV; on a damaged file, this affects the decoder state for later reads."""
        self._capture = self._open(strict=False)
        return self._capture.count_visible()

    def _check_length(self, num_frames: int) -> None:
        if num_frames > self._config.max_video_frames:
            raise VideoTooLong(f"the video has {num_frames} frames, more than {self._config.max_video_frames}")
        if self._capture.duration_s > self._config.max_video_duration_s:
            raise VideoTooLong(f"the video is longer than {self._config.max_video_duration_s:g} seconds")

    def _check(self, requested: list[int]) -> None:
        if len(requested) > self._config.max_sampled_frames:
            raise TooManyFrames(
                f"{len(requested)} frames of the video were requested, more than {self._config.max_sampled_frames}"
            )
        if requested and requested[-1] >= self._config.max_video_frames:
            raise VideoTooLong(f"the video has more than {self._config.max_video_frames} frames")
        width, height = self._capture.size
        if len(requested) * width * height * 3 > self._config.max_video_decoded_bytes:
            raise VideoTooLarge(f"{len(requested)} frames of {width}x{height} take too much memory")

    def _collect(self, requested: list[int], decoded: Iterator[tuple[int, av.VideoFrame]]) -> tuple[_Pixels, list[int]]:
        """Convert frames into one array as they are decoded."""
        frames: _Pixels | None = None
        converter = _Converter()
        read: list[int] = []
        for index, frame in decoded:
            if frames is None:
                frames = np.empty((len(requested), *converter.shape_of(frame)), np.uint8)
            try:
                converter.convert(frame, frames[len(read)])
            except av.FFmpegError as error:
                raise InvalidVideo("the video's frames cannot be converted") from error
            read.append(index)
        if frames is None:
            raise InvalidVideo("no frame of the video can be decoded")
        return frames[: len(read)], read


class BlankVideo(EncodedVideo):
    """A video to be measured: of a plain file, one frame is decoded, for the size of all."""

    def _jump(self, table: FrameTable, requested: list[int]) -> tuple[_Pixels, list[int]]:
        if not requested or requested[-1] >= len(table.times):
            raise FrameTableMismatch
        frame, _ = super()._jump(table, table.keys[:1])
        return np.zeros((len(requested), *frame.shape[1:]), np.uint8), requested


class _Converter:
    """Converts frames to RGB like OpenCV: via BGR, bicubic chroma, rotated according to the metadata."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()

    def shape_of(self, frame: av.VideoFrame) -> tuple[int, int, int]:
        turned = _QUARTER_TURNS.get(frame.rotation, 0) % 2
        return (frame.width, frame.height, 3) if turned else (frame.height, frame.width, 3)

    def convert(self, frame: av.VideoFrame, out: _Pixels) -> None:
        direct = frame.format.name in _DIRECT_FORMATS
        converted = self._reformatter.reformat(
            frame, format="rgb24" if direct else "bgr24", interpolation=Interpolation.BICUBIC, threads=1
        )
        pixels = converted.to_ndarray()
        out[:] = np.rot90(pixels if direct else pixels[..., ::-1], _QUARTER_TURNS.get(frame.rotation, 0))
