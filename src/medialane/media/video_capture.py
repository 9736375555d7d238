"""Reads the frames of an encoded video exactly like OpenCV.

Theory of operation. vLLM decodes with OpenCV, and its samplers use the metadata that OpenCV reports, so `Capture`
reproduces OpenCV's `CvCapture_FFMPEG` step by step (modules/videoio/src/cap_ffmpeg_impl.hpp) with the same FFmpeg: the
same frame count, frame rate, seeks and frame numbers. For a plain file (`FrameTable`: constant rate, one frame per
packet, nothing hidden by an edit list) the result follows from the packets' timestamps alone. Then counting needs no
decoding, and a requested frame is found by its timestamp after a seek to the preceding keyframe. Each decoded frame is
checked against the table; on the first mismatch, the video is read again from the start like OpenCV would.

It deliberately differs from OpenCV in two cases in which OpenCV's wheel returns no frame: videos of a single frame (its
seeks leave it at the end of the file), and AV1 (the wheel has no software decoder).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream

from medialane.media.config import MediaConfig
from medialane.media.container import MemoryFile
from medialane.types.errors import InvalidVideo, VideoTooLarge, VideoTooLong

UNOPENABLE = "the video cannot be opened"

#: Codecs with one displayed frame per packet. (VP8 packets may hold a frame that is never shown.)
_ONE_FRAME_PER_PACKET = {"h264", "hevc", "vp9", "av1"}

#: FFmpeg's AV_NOPTS_VALUE: unknown timestamp.
_NO_TIME = -(1 << 63)

#: FFmpeg's read size: few calls into Python, few bytes wasted after a seek.
_READ_BYTES = 1 << 17

#: OpenCV's `eps_zero`, for seconds and rates.
_EPS_ZERO = 0.000025

#: OpenCV's first seek goes this many frames before the target.
_FIRST_SEEK_BACK = 16


def open_container(data: memoryview, demuxer: str, config: MediaConfig) -> InputContainer:
    """Open the container with the limits that FFmpeg can enforce. Raises InvalidVideo."""
    options = {
        "max_pixels": str(config.max_video_pixels),  # also for the decoders that probe the first packets
        "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2" if demuxer == "mp4" else "matroska,webm",
        "protocol_whitelist": "none",
    }
    try:
        return av.open(
            MemoryFile(data),
            "r",
            format=demuxer,
            options=options,
            buffer_size=_READ_BYTES,
            io_open=_refuse,
            metadata_errors="ignore",  # tags may be in any encoding, and are not used
        )
    except av.FFmpegError as error:
        raise InvalidVideo(UNOPENABLE) from error


def _refuse(_url: str, _flags: int, _options: dict[str, str]) -> None:
    raise PermissionError("a video must not reference other files")


class FrameTableMismatch(Exception):
    """The decoded frames differ from the frame table."""


@dataclass(frozen=True, slots=True)
class FrameTable:
    """A plain video's frame timestamps in the stream's time base, and the numbers of its keyframes; both ascending."""

    times: list[int]
    keys: list[int]


class Capture:
    """OpenCV's capture implemented with PyAV: frames in the same order and with the same numbers as OpenCV's."""

    def __init__(self, container: InputContainer, config: MediaConfig, *, strict: bool) -> None:
        if not container.streams.video:
            raise InvalidVideo("the video has no frames")
        self._container = container
        self._config = config
        self._stream: VideoStream = container.streams.video[0]
        self._open_decoder(strict=strict)
        self._packets = container.demux(self._stream)
        self._ready: deque[av.VideoFrame] = deque()
        self._position = 0
        self._first_number = -1
        self._frame_time = _NO_TIME
        self._moved = False
        self._num_decoded = 0
        self.fps = self._find_rate()
        self.num_claimed_frames = self._stream.frames or self._estimate_frames()

    def _open_decoder(self, *, strict: bool) -> None:
        context = self._stream.codec_context
        if context is None:
            raise InvalidVideo("the video codec is unknown")
        self._context = context
        context.thread_count = 1  # parallelism comes from multiple preparers
        context.options = {"max_pixels": str(self._config.max_video_pixels)}
        if strict:  # fail on damaged data instead of concealing errors
            context.options |= {"err_detect": "explode"}
        self.size = context.width, context.height
        if not all(self.size):
            raise InvalidVideo("the video has no frames")
        if self.size[0] * self.size[1] > self._config.max_video_pixels:
            raise VideoTooLarge(f"the video's frames have more than {self._config.max_video_pixels} pixels")

    @property
    def duration_s(self) -> float:
        """The longest duration that the file's metadata implies."""
        return max(self._reported_duration_s(), self.num_claimed_frames / self.fps)

    def _reported_duration_s(self) -> float:
        """`get_duration_sec`: the container's duration, or else the stream's, which may be AV_NOPTS_VALUE."""
        duration = self._container.duration
        if duration is not None and duration / av.time_base >= _EPS_ZERO:
            return duration / av.time_base
        reported = self._stream.duration
        return float(_NO_TIME if reported is None else reported) * self._tick_s()

    def _find_rate(self) -> float:
        """`get_fps`."""
        rate, tick_s = self._stream.average_rate, self._tick_s()
        if rate is not None and (fps := rate.numerator / rate.denominator) >= _EPS_ZERO:
            return fps
        if not tick_s:
            raise InvalidVideo("the video has no time base")
        return 1.0 / tick_s

    def _estimate_frames(self) -> int:
        return math.floor(self._reported_duration_s() * self.fps + 0.5)

    def _tick_s(self) -> float:
        time_base = self._stream.time_base
        return 0.0 if time_base is None else time_base.numerator / time_base.denominator

    def _number_of(self, time: int) -> int:
        """`dts_to_frame_number`."""
        ticks = time - (self._stream.start_time or 0)
        if ticks < _NO_TIME:  # wraps around in 64 bits
            ticks += 1 << 64
        return int(self.fps * (ticks * self._tick_s()) + 0.5)

    # Frame by frame

    def grab(self) -> av.VideoFrame | None:
        """Return the next frame; None at the end, or if the next packet cannot be decoded."""
        if 0 < self._stream.frames < self._position:
            return None
        self._frame_time = _NO_TIME
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
            self._frame_time = time
        if self._first_number < 0:
            self._first_number = self._number_of(self._frame_time)
        if (frame.width, frame.height) != self.size:
            raise InvalidVideo("the video's frames differ in size")
        return frame

    def _count_decoded(self) -> None:
        """Limit the decoding work: counting, jumping and re-reading decode a frame at most three times."""
        self._num_decoded += 1
        if self._num_decoded > 3 * self._config.max_video_frames:
            raise VideoTooLong(f"the video has more than {self._config.max_video_frames} frames")

    def _rewind(self) -> None:
        """`seek(0)`. Does nothing if no frame was read, like OpenCV."""
        if self._moved:
            self._jump_to(self._stream.start_time or 0)
            self._position = 0

    def _jump_to(self, time: int) -> None:
        with suppress(av.FFmpegError):  # OpenCV continues from the current position
            self._container.seek(time, stream=self._stream)
        self._context.flush_buffers()
        self._ready.clear()
        self._packets = self._container.demux(self._stream)
        self._moved = True

    def count_visible(self) -> int:
        """vLLM's cross-check of the claimed count: seek to the end and return the last frame's number."""
        num_claimed = self.num_claimed_frames
        if num_claimed < 2:
            return num_claimed
        self._seek_to_end(num_claimed)
        visible = self._position
        at_end = self.grab() is None
        return visible if at_end and 0 < visible < num_claimed - 1 else num_claimed

    def _seek_to_end(self, number: int) -> None:
        """`seek(number)` to the frame count, which is over 1, on a capture that has not read any frame."""
        self.grab()
        back = _FIRST_SEEK_BACK
        while True:
            target = max(number - back, 0)
            self._jump_to((self._stream.start_time or 0) + int(target / self.fps / self._tick_s() + 0.5))
            self.grab()
            self._position = self._number_of(self._frame_time) - self._first_number
            if 0 <= self._position <= number - 1:
                break
            if target == 0:
                return
            back = back * 3 // 2
        while self._position < number - 1 and self.grab() is not None:
            pass
        self._position += 1

    def walk(self, indices: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the frames with these numbers, counted from the start; like in OpenCV, failed grabs count as well."""
        self._rewind()
        selected = frozenset(indices)
        for index in range(indices[-1] + 1 if indices else 0):
            frame = self.grab()
            if frame is not None and index in selected:
                yield index, frame

    # By the frame table

    def frame_table(self) -> FrameTable | None:
        """Return the table of all frames, found without decoding; None if not plain. Raises VideoTooLong."""
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
        """Return timestamp and keyframe flag of each packet; nothing if some are hidden or corrupt."""
        packets: list[tuple[int, bool]] = []
        try:
            for packet in self._packets:
                if not packet.size:  # the last one is empty: it flushes the decoder
                    break
                if packet.pts is None or packet.is_discard or packet.is_corrupt:
                    return iter(())
                packets.append((packet.pts, packet.is_keyframe))
                if len(packets) > self._config.max_video_frames:
                    raise VideoTooLong(f"the video has more than {self._config.max_video_frames} frames")
        except av.FFmpegError:
            return iter(())
        return iter(packets)

    def _is_constant(self, times: list[int]) -> bool:
        """Return whether OpenCV would number these timestamps 0, 1, 2, ..."""
        seconds = (np.array(times) - (self._stream.start_time or 0)) * self._tick_s()
        numbers = np.floor(self.fps * seconds + 0.5)
        return bool(np.array_equal(numbers, np.arange(len(times))))

    def jump(self, table: FrameTable, indices: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the frames with these numbers, seeking if there is a keyframe before the next one.

        Raises FrameTableMismatch if a decoded frame differs from the table.
        """
        frames: Iterator[tuple[int, av.VideoFrame]] = iter(())
        at = -1
        for index in indices:
            if index >= len(table.times):
                raise FrameTableMismatch
            key = table.keys[bisect_right(table.keys, index) - 1]
            if key > at:
                frames = self._frames_from(key, table.times)
            for at, frame in frames:
                if at == index:
                    yield at, frame
                    break
            else:
                raise FrameTableMismatch

    def _frames_from(self, key: int, times: list[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the frames from a keyframe on, each checked against the table."""
        self._jump_to(times[key])
        self._position = 0
        number = key
        while (frame := self.grab()) is not None:
            if number == key and frame.pts is not None and frame.pts < times[key]:
                continue  # displayed before the keyframe it follows in the file; its references were not decoded
            if number == len(times) or frame.pts != times[number] or frame.is_corrupt:
                raise FrameTableMismatch
            yield number, frame
            number += 1
