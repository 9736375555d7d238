"""Encoded video to frames.

Theory of operation. vLLM decodes with OpenCV, and its samplers compute from what OpenCV says of a file, so `Capture`
does step by step what OpenCV's `CvCapture_FFMPEG` does (modules/videoio/src/cap_ffmpeg_impl.hpp) with the same FFmpeg:
the same count and rate, seeks and numbers for frames. Where a file is plain (`FrameTable`: constant rate,
every packet one frame, nothing hidden by an edit list) the outcome of all that is known from the packets' times alone.
Then the count needs no decoding, and a wanted frame is found by its time after a seek to the keyframe before it. The
frames that come out are checked against the table one by one; the first that does not fit ends the shortcut, and the
video is read again from its start as OpenCV would.

It differs from OpenCV on purpose in two cases in which OpenCV's wheel gives no frame at all: videos of one frame (its
seeks leave it at the end of the file), and AV1 (the wheel has no software decoder).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import RawIOBase
from typing import Protocol

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from medialane.core.errors import InvalidVideo, TooManyFrames, UnsupportedMediaType, VideoTooLarge, VideoTooLong
from medialane.core.media import Video, VideoSource
from medialane.media.config import MediaConfig
from medialane.media.image import decode_image
from medialane.media.jpeg_list import split_jpeg_list
from medialane.media.mp4_references import check_references

_Pixels = NDArray[np.uint8]

#: FFmpeg's name of the demuxer by media type. Naming it leaves no other one to be probed for.
_DEMUXERS = {"video/mp4": "mp4", "video/webm": "matroska", "video/x-matroska": "matroska"}

#: Codecs of whose packets each is one frame. (VP8's may be a frame that is never shown.)
_ONE_FRAME_PER_PACKET = {"h264", "hevc", "vp9", "av1"}

_UNOPENABLE = "the video cannot be opened"

#: FFmpeg's number for a time that is not known.
_NO_TIME = -(1 << 63)

#: FFmpeg asks for this many bytes at a time: few calls into Python, little read for nothing after a seek.
_READ_BYTES = 1 << 17

#: OpenCV's zero, of seconds and of rates (`eps_zero`).
_NO_LESS = 0.000025

#: How many frames before the wanted one OpenCV seeks first.
_FIRST_SEEK_BACK = 16


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

        def capture(*, strict: bool) -> Capture:
            return Capture(stack.enter_context(_open(data, _DEMUXERS[media_type], config)), config, strict=strict)

        try:
            video = EncodedVideo(data, capture, config)
        except (ValueError, OverflowError) as error:  # PyAV's, about numbers that FFmpeg got from the file
            raise InvalidVideo(_UNOPENABLE) from error
        yield video


def _open(data: memoryview, name: str, config: MediaConfig) -> InputContainer:
    options = {
        "max_pixels": str(config.max_video_pixels),  # for the decoders that look at the first packets, too
        "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2" if name == "mp4" else "matroska,webm",
        "protocol_whitelist": "none",
    }
    try:
        return av.open(
            _File(data),
            "r",
            format=name,
            options=options,
            buffer_size=_READ_BYTES,
            io_open=_refuse,
            metadata_errors="ignore",  # tags are in any encoding, and nothing to us
        )
    except av.FFmpegError as error:
        raise InvalidVideo(_UNOPENABLE) from error


def _refuse(_url: str, _flags: int, _options: dict[str, str]) -> None:
    raise PermissionError("a video may not open anything")


class _File(RawIOBase):
    """Encoded bytes as a file, read in place."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else self._at + size
        part = bytes(self._data[self._at : end])
        self._at += len(part)
        return part

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def tell(self) -> int:
        return self._at


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
            raise InvalidVideo("the video has none of the frames that the model takes")
        pictures = [decode_image(memoryview(self._frames[index]), self._config).pixels for index in wanted]
        if len({picture.shape for picture in pictures}) > 1:
            raise InvalidVideo("the video's frames are not of one size")
        return np.stack(pictures), wanted


class _OpenCapture(Protocol):
    def __call__(self, *, strict: bool) -> Capture: ...


class EncodedVideo:
    """A video in a container (a `Video`)."""

    def __init__(self, data: memoryview, open_capture: _OpenCapture, config: MediaConfig) -> None:
        self._config = config
        self._open_capture = open_capture
        self._capture = open_capture(strict=True)
        self._table: FrameTable | None = None
        self.data = data
        self.source = self._find_source()

    def read(self, indices: Sequence[int]) -> tuple[_Pixels, list[int]]:
        """As `Video.read`. Frames that cannot be decoded are left out."""
        wanted = sorted({index for index in indices if index >= 0})
        self._check(wanted)
        if self._table is not None:
            try:
                return self._collect(wanted, self._capture.jump(self._table, wanted))
            except Unsure:
                self._table = None
                self._as_opencv()
        return self._collect(wanted, self._capture.walk(wanted))

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
        self._capture = self._open_capture(strict=False)
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
                raise InvalidVideo("the video's pictures cannot be converted") from error
            read.append(index)
        if frames is None:
            raise InvalidVideo("no frame of the video can be decoded")
        return frames[: len(read)], read


class Unsure(Exception):
    """The frames that come out are not those that the table told."""


@dataclass(frozen=True, slots=True)
class FrameTable:
    """A plain video's frames: their times in the stream's time base, and the numbers of its keyframes, ascending."""

    times: list[int]
    keys: list[int]


class Capture:
    """OpenCV's capture over PyAV: frames in the order and with the numbers that OpenCV gives them."""

    def __init__(self, container: InputContainer, config: MediaConfig, *, strict: bool) -> None:
        if not container.streams.video:
            raise InvalidVideo("the video has no pictures")
        self._container = container
        self._config = config
        self._stream: VideoStream = container.streams.video[0]
        self._open_decoder(strict=strict)
        self._packets = container.demux(self._stream)
        self._ready: deque[av.VideoFrame] = deque()
        self._position = 0
        self._first_number = -1
        self._picture_time = _NO_TIME
        self._moved = False
        self._num_decoded = 0
        self.fps = self._find_rate()
        self.num_claimed_frames = self._stream.frames or self._estimate_frames()

    def _open_decoder(self, *, strict: bool) -> None:
        context = self._stream.codec_context
        if context is None:
            raise InvalidVideo("the video has a codec that is not known")
        self._context = context
        context.thread_count = 1  # one job, one thread: preparers are the parallelism
        context.options = {"max_pixels": str(self._config.max_video_pixels)}
        if strict:  # a damaged file ends in an error, not in a guess
            context.options |= {"err_detect": "explode"}
        self.size = context.width, context.height
        if not all(self.size):
            raise InvalidVideo("the video has no pictures")
        if self.size[0] * self.size[1] > self._config.max_video_pixels:
            raise VideoTooLarge(f"the video's pictures have more than {self._config.max_video_pixels} pixels")

    @property
    def duration_s(self) -> float:
        """The longest that the file tells of itself."""
        return max(self._told_duration_s(), self.num_claimed_frames / self.fps)

    def _told_duration_s(self) -> float:
        """`get_duration_sec`: the file's duration, or else the stream's, which may be the number for "not known"."""
        duration = self._container.duration
        if duration is not None and duration / av.time_base >= _NO_LESS:
            return duration / av.time_base
        told = self._stream.duration
        return float(_NO_TIME if told is None else told) * self._tick_s()

    def _find_rate(self) -> float:
        """`get_fps`."""
        rate, tick_s = self._stream.average_rate, self._tick_s()
        if rate is not None and (fps := rate.numerator / rate.denominator) >= _NO_LESS:
            return fps
        if not tick_s:
            raise InvalidVideo("the video has no time base")
        return 1.0 / tick_s

    def _estimate_frames(self) -> int:
        return math.floor(self._told_duration_s() * self.fps + 0.5)

    def _tick_s(self) -> float:
        time_base = self._stream.time_base
        return 0.0 if time_base is None else time_base.numerator / time_base.denominator

    def _number_of(self, time: int) -> int:
        """`dts_to_frame_number`."""
        ticks = time - (self._stream.start_time or 0)
        if ticks < _NO_TIME:  # as 64 bits have it
            ticks += 1 << 64
        return int(self.fps * (ticks * self._tick_s()) + 0.5)

    # Frame by frame

    def grab(self) -> av.VideoFrame | None:
        """The next frame; None if there is none, or if the next packet cannot be decoded."""
        if 0 < self._stream.frames < self._position:
            return None
        self._picture_time = _NO_TIME
        while not self._ready:
            try:
                self._ready.extend(self._context.decode(next(self._packets)))
            except (StopIteration, av.FFmpegError):
                return None
        self._count_decoded()
        frame = self._ready.popleft()
        self._moved = True
        self._position += 1
        if (time := frame.pts or frame.dts) is not None:
            self._picture_time = time
        if self._first_number < 0:
            self._first_number = self._number_of(self._picture_time)
        if (frame.width, frame.height) != self.size:
            raise InvalidVideo("the video's pictures are not of one size")
        return frame

    def _count_decoded(self) -> None:
        """Finding the count, reading with jumps and reading again go over a frame three times at most."""
        self._num_decoded += 1
        if self._num_decoded > 3 * self._config.max_video_frames:
            raise VideoTooLong(f"the video has more than {self._config.max_video_frames} frames")

    def _rewind(self) -> None:
        """`seek(0)`. Not where nothing was read: OpenCV has not moved then either."""
        if self._moved:
            self._jump_to(self._stream.start_time or 0)
            self._position = 0

    def _jump_to(self, time: int) -> None:
        with suppress(av.FFmpegError):  # OpenCV goes on from where it is
            self._container.seek(time, stream=self._stream)
        self._context.flush_buffers()
        self._ready.clear()
        self._packets = self._container.demux(self._stream)
        self._moved = True

    def count_visible(self) -> int:
        """vLLM's cross-check of the claimed count: go to the end, and see what number the last frame has."""
        num_claimed = self.num_claimed_frames
        if num_claimed < 2:
            return num_claimed
        self._seek_to_end(num_claimed)
        visible = self._position
        at_end = self.grab() is None
        return visible if at_end and 0 < visible < num_claimed - 1 else num_claimed

    def _seek_to_end(self, number: int) -> None:
        """`seek(number)` of a number over 1, which is the number of frames, from a capture that has read nothing."""
        self.grab()
        back = _FIRST_SEEK_BACK
        while True:
            target = max(number - back, 0)
            self._jump_to((self._stream.start_time or 0) + int(target / self.fps / self._tick_s() + 0.5))
            self.grab()
            self._position = self._number_of(self._picture_time) - self._first_number
            if 0 <= self._position <= number - 1:
                break
            if target == 0:
                return
            back = back * 3 // 2
        while self._position < number - 1 and self.grab() is not None:
            pass
        self._position += 1

    def walk(self, wanted: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Frames of these numbers, counted from the start, as OpenCV's callers do: a failed grab counts as well."""
        self._rewind()
        takes = frozenset(wanted)
        for index in range(wanted[-1] + 1 if wanted else 0):
            frame = self.grab()
            if frame is not None and index in takes:
                yield index, frame

    # By the table

    def frame_table(self) -> FrameTable | None:
        """The table of all frames if the video is plain, found without decoding. Raises VideoTooLong."""
        if self._context.codec.canonical_name not in _ONE_FRAME_PER_PACKET or self.num_claimed_frames < 2:
            return None
        self._moved = True
        packets = list(self._whole_packets())
        times = sorted(time for time, _ in packets)
        if not packets or packets[0] != (times[0], True) or not self._is_constant(times):
            return None
        if abs(len(times) - self.num_claimed_frames) > 1:  # vLLM's cross-check may correct the claim
            return None
        number_of = {time: number for number, time in enumerate(times)}
        return FrameTable(times, sorted(number_of[time] for time, is_key in packets if is_key))

    def _whole_packets(self) -> Iterator[tuple[int, bool]]:
        """Time of each packet, and whether a decoder may begin with it; nothing if some are hidden or broken."""
        found: list[tuple[int, bool]] = []
        try:
            for packet in self._packets:
                if not packet.size:  # the last one has nothing: it flushes the decoder
                    break
                if packet.pts is None or packet.is_discard or packet.is_corrupt:
                    return iter(())
                found.append((packet.pts, packet.is_keyframe))
                if len(found) > self._config.max_video_frames:
                    raise VideoTooLong(f"the video has more than {self._config.max_video_frames} frames")
        except av.FFmpegError:
            return iter(())
        return iter(found)

    def _is_constant(self, times: list[int]) -> bool:
        """Whether OpenCV's numbers of these times are 0, 1, 2 and so on."""
        seconds = (np.array(times) - (self._stream.start_time or 0)) * self._tick_s()
        numbers = np.floor(self.fps * seconds + 0.5)
        return bool(np.array_equal(numbers, np.arange(len(times))))

    def jump(self, table: FrameTable, wanted: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Frames of these numbers, with a seek where the next one lies behind a later keyframe.

        Raises Unsure when something comes out that the table does not tell.
        """
        frames: Iterator[tuple[int, av.VideoFrame]] = iter(())
        at = -1
        for index in wanted:
            if index >= len(table.times):
                raise Unsure
            key = table.keys[bisect_right(table.keys, index) - 1]
            if key > at:
                frames = self._frames_from(key, table.times)
            for at, frame in frames:
                if at == index:
                    yield at, frame
                    break
            else:
                raise Unsure

    def _frames_from(self, key: int, times: list[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Frames from a keyframe on, each one where the table has it."""
        self._jump_to(times[key])
        self._position = 0
        number = key
        while (frame := self.grab()) is not None:
            if number == key and frame.pts is not None and frame.pts < times[key]:
                continue  # shown before the keyframe that it follows in the file, and built on what was not decoded
            if number == len(times) or frame.pts != times[number] or frame.is_corrupt:
                raise Unsure
            yield number, frame
            number += 1


# Pixels

#: Formats that become the same RGB whether by BGR, which is OpenCV's way, or straight.
_STRAIGHT = {"yuv420p", "yuvj420p"}

#: Degrees that the file says to turn its pictures by, to the quarter turns (counterclockwise) that OpenCV makes.
_QUARTER_TURNS = {90: 1, 180: 2, -180: 2, -90: 3}


class _Converter:
    """Frames to RGB as OpenCV makes it: by BGR, chroma interpolated by its cubic, turned as the file says."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()

    def shape_of(self, frame: av.VideoFrame) -> tuple[int, int, int]:
        turned = _QUARTER_TURNS.get(frame.rotation, 0) % 2
        return (frame.width, frame.height, 3) if turned else (frame.height, frame.width, 3)

    def convert(self, frame: av.VideoFrame, out: _Pixels) -> None:
        straight = frame.format.name in _STRAIGHT
        picture = self._reformatter.reformat(
            frame, format="rgb24" if straight else "bgr24", interpolation=Interpolation.BICUBIC, threads=1
        )
        pixels = picture.to_ndarray()
        out[:] = np.rot90(pixels if straight else pixels[..., ::-1], _QUARTER_TURNS.get(frame.rotation, 0))
