"""Encoded video to frames: the limits, the frames that are wanted, and their pixels.

What a file's frames are, and how they are found, is `video_capture`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from medialane.core.errors import InvalidVideo, TooManyFrames, UnsupportedMediaType, VideoTooLarge, VideoTooLong
from medialane.core.media import Video, VideoSource
from medialane.media.config import MediaConfig
from medialane.media.image import decode_image
from medialane.media.jpeg_list import split_jpeg_list
from medialane.media.mp4_references import check_references
from medialane.media.video_capture import UNOPENABLE, Capture, FrameTable, FrameTableMismatch, open_container

_Pixels = NDArray[np.uint8]

#: FFmpeg's name of the demuxer by media type. Naming it leaves no other one to be probed for.
_DEMUXERS = {"video/mp4": "mp4", "video/webm": "matroska", "video/x-matroska": "matroska"}

#: Formats that become the same RGB whether by BGR, which is OpenCV's way, or straight.
_DIRECT_FORMATS = {"yuv420p", "yuvj420p"}

#: Degrees that the file says to turn its pictures by, to the quarter turns (counterclockwise) that OpenCV makes.
_QUARTER_TURNS = {90: 1, 180: 2, -180: 2, -90: 3}


@contextmanager
def open_video(data: memoryview, media_type: str, config: MediaConfig) -> Iterator[Video]:
    """Open an encoded video of the type that `sniff_video` told. It is closed with the block.

    Raises InvalidVideo, VideoTooLarge, VideoTooLong, UnsupportedMediaType; for a list of JPEG frames what
    `split_jpeg_list` raises.
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
            video = EncodedVideo(data, config, demuxer=_DEMUXERS[media_type], stack=stack)
        except (ValueError, OverflowError) as error:  # PyAV's, about numbers that FFmpeg got from the file
            raise InvalidVideo(UNOPENABLE) from error
        yield video


class JpegList:
    """vLLM's list of JPEG frames (a `Video`). It tells no rate: vLLM takes it from the request's options."""

    def __init__(self, data: memoryview, config: MediaConfig) -> None:
        self._frames = split_jpeg_list(data, config)
        self._config = config
        self.data = data
        self.source = VideoSource(num_frames=len(self._frames), fps=0.0, duration_s=0.0)

    def read(self, indices: Sequence[int]) -> tuple[_Pixels, list[int]]:
        """As `Video.read`; there is no frame that cannot be read."""
        wanted = [index for index in indices if 0 <= index < len(self._frames)]
        if not wanted:
            raise InvalidVideo("the video has none of the frames that the model samples")
        pictures = [decode_image(memoryview(self._frames[index]), self._config).pixels for index in wanted]
        if len({picture.shape for picture in pictures}) > 1:
            raise InvalidVideo("the video's frames differ in size")
        return np.stack(pictures), wanted


class EncodedVideo:
    """A video in a container (a `Video`). What it opens is closed with `stack`."""

    def __init__(self, data: memoryview, config: MediaConfig, *, demuxer: str, stack: ExitStack) -> None:
        self.data = data
        self._config = config
        self._demuxer = demuxer
        self._stack = stack
        self._capture = self._open(strict=True)
        self._table: FrameTable | None = None
        self.source = self._find_source()

    def read(self, indices: Sequence[int]) -> tuple[_Pixels, list[int]]:
        """As `Video.read`. Frames that cannot be decoded are left out."""
        wanted = sorted({index for index in indices if index >= 0})
        self._check(wanted)
        if self._table is not None:
            try:
                return self._collect(wanted, self._capture.jump(self._table, wanted))
            except FrameTableMismatch:
                self._table = None
                self._as_opencv()
        return self._collect(wanted, self._capture.walk(wanted))

    def _open(self, *, strict: bool) -> Capture:
        container = self._stack.enter_context(open_container(self.data, self._demuxer, self._config))
        return Capture(container, self._config, strict=strict)

    def _find_source(self) -> VideoSource:
        """What vLLM's `get_video_metadata` finds."""
        num_frames, fps = self._capture.num_claimed_frames, self._capture.fps
        self._check_length(num_frames)
        self._table = self._capture.frame_table()
        if self._table is None:
            num_frames = self._as_opencv()
        return VideoSource(num_frames=num_frames, fps=fps, duration_s=num_frames / fps)

    def _as_opencv(self) -> int:
        """Begin anew and do what OpenCV does, which for a damaged file leaves its marks on what follows."""
        self._capture = self._open(strict=False)
        return self._capture.count_visible()

    def _check_length(self, num_frames: int) -> None:
        if num_frames > self._config.max_video_frames:
            raise VideoTooLong(f"the video has {num_frames} frames, more than {self._config.max_video_frames}")
        if self._capture.duration_s > self._config.max_video_duration_s:
            raise VideoTooLong(f"the video is longer than {self._config.max_video_duration_s:g} seconds")

    def _check(self, wanted: list[int]) -> None:
        if len(wanted) > self._config.max_sampled_frames:
            raise TooManyFrames(
                f"{len(wanted)} frames of the video were asked for, more than {self._config.max_sampled_frames}"
            )
        if wanted and wanted[-1] >= self._config.max_video_frames:
            raise VideoTooLong(f"the video has more than {self._config.max_video_frames} frames")
        width, height = self._capture.size
        if len(wanted) * width * height * 3 > self._config.max_video_decoded_bytes:
            raise VideoTooLarge(f"{len(wanted)} frames of {width}x{height} take too much memory")

    def _collect(self, wanted: list[int], found: Iterator[tuple[int, av.VideoFrame]]) -> tuple[_Pixels, list[int]]:
        """Convert frames into one array as they come."""
        frames: _Pixels | None = None
        converter = _Converter()
        read: list[int] = []
        for index, frame in found:
            if frames is None:
                frames = np.empty((len(wanted), *converter.shape_of(frame)), np.uint8)
            try:
                converter.convert(frame, frames[len(read)])
            except av.FFmpegError as error:
                raise InvalidVideo("the video's frames cannot be converted") from error
            read.append(index)
        if frames is None:
            raise InvalidVideo("no frame of the video can be decoded")
        return frames[: len(read)], read


class _Converter:
    """Frames to RGB as OpenCV makes it: by BGR, chroma interpolated by its cubic, turned as the file says."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()

    def shape_of(self, frame: av.VideoFrame) -> tuple[int, int, int]:
        turned = _QUARTER_TURNS.get(frame.rotation, 0) % 2
        return (frame.width, frame.height, 3) if turned else (frame.height, frame.width, 3)

    def convert(self, frame: av.VideoFrame, out: _Pixels) -> None:
        straight = frame.format.name in _DIRECT_FORMATS
        picture = self._reformatter.reformat(
            frame, format="rgb24" if straight else "bgr24", interpolation=Interpolation.BICUBIC, threads=1
        )
        pixels = picture.to_ndarray()
        out[:] = np.rot90(pixels if straight else pixels[..., ::-1], _QUARTER_TURNS.get(frame.rotation, 0))
