"""What an encoded video is, told from its bytes, before any decoder sees them.

Demuxers follow references to other files and streams (HLS, DASH, SDP, concat lists, external data references), and
allocate what a table's header claims. So only three containers are known here, a file that refers to another one is
refused, the claims of MP4's tables are held against their own size, and what a header says of size and length against
the limits: workers decode without them in stage `url`. The fourth form is vLLM's list of JPEG frames:
base64 texts joined by commas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pybase64

from medialane.core.errors import (
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
from medialane.media.config import MediaConfig
from medialane.media.image_header import Sniffed, sniff_image
from medialane.media.matroska_header import EBML, matroska_tracks, matroska_type
from medialane.media.mp4_header import check_mp4, mp4_tracks
from medialane.media.track import Track

VideoType = Literal["video/mp4", "video/webm", "video/x-matroska", "video/jpeg"]

#: Base64 of the first three bytes of every JPEG.
JPEG_LIST_START = b"/9j/"


def sniff_video(data: bytes | bytearray | memoryview, config: MediaConfig) -> VideoType:
    """Tell the container of an encoded video; reads headers only.

    Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType, InvalidVideo (a header that makes no sense), and of a list
    of JPEG frames also InvalidBase64, TooManyFrames, VideoTooLarge.
    """
    if not data:
        raise EmptyMedia("the media is empty")
    if len(data) > config.max_video_bytes:
        raise MediaTooLarge(f"the video has {len(data)} bytes, more than {config.max_video_bytes}")
    view = memoryview(data)
    if bytes(view[4:8]) == b"ftyp" and bytes(view[8:12]) not in _IMAGE_BRANDS:
        check_mp4(view)
        _check_claims(mp4_tracks(view), config)
        return "video/mp4"
    if bytes(view[:4]) == EBML:
        media_type = matroska_type(view)
        _check_claims(matroska_tracks(view), config)
        return media_type
    if bytes(view[:4]) == JPEG_LIST_START:
        split_jpeg_list(view, config)
        return "video/jpeg"
    raise UnsupportedMediaType("the media is not an MP4, WebM or Matroska video")


#: Still images and their sequences are in the same kind of file.
_IMAGE_BRANDS = {b"avif", b"avis", b"heic", b"heim", b"heis", b"heix", b"hevc", b"hevx", b"mif1", b"msf1", b"crx "}


def _check_claims(tracks: Iterator[Track], config: MediaConfig) -> None:
    """Raise VideoTooLarge or VideoTooLong unless the track that is decoded, the first with pictures, may be."""
    track = next((track for track in tracks if track.kind == "video"), None)
    if track is None:
        return
    if track.width * track.height > config.max_video_pixels:
        raise VideoTooLarge(f"the video's pictures have more than {config.max_video_pixels} pixels")
    if track.num_frames > config.max_video_frames:
        raise VideoTooLong(f"the video has {track.num_frames} frames, more than {config.max_video_frames}")
    if track.duration_s > config.max_video_duration_s:
        raise VideoTooLong(f"the video is longer than {config.max_video_duration_s:g} seconds")


# Lists of JPEG frames: vLLM's `data:video/jpeg;base64,` followed by base64 texts joined by commas.


def split_jpeg_list(view: memoryview, config: MediaConfig) -> list[bytes]:
    """The JPEG files of a list, within the limits: as many as a model may be given, each an image that may be decoded.

    Raises InvalidBase64, InvalidVideo, TooManyFrames, VideoTooLarge, UnsupportedMediaType.
    """
    parts = bytes(view).split(b",", config.max_sampled_frames)
    if len(parts) > config.max_sampled_frames:
        raise TooManyFrames(f"the video has more than {config.max_sampled_frames} frames")
    frames = [_from_base64(part) for part in parts]
    sizes = {(frame.width, frame.height) for frame in (_sniff_frame(data, config) for data in frames)}
    if len(sizes) > 1:
        raise InvalidVideo("the video's frames are not of one size")
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
