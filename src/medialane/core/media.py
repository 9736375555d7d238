"""Media on their way from a reference in a request to decoded pixels, frames or samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.core.tensor import ArenaRange

Modality = Literal["image", "video", "audio"]


class Alias(msgspec.Struct, frozen=True):
    """What a client calls an item (vLLM's `uuid`), and the item options said with it. Never an identity of content.

    `kind` is the modality that the client gave it as, `<modality>_embeds` for embeddings.
    """

    uuid: str
    kind: str
    io: bytes = b"{}"
    options: bytes = b"{}"


class MediaRef(msgspec.Struct, frozen=True):
    """One media item as a request names it: a URL, bytes that came inside the request, or an alias of earlier ones.

    `param` is the item's field in the request, for errors. `salt` separates tenants: the same content under another
    salt is another entry. `io` says how to decode the item (frames, fps, ...): canonical JSON of what vLLM calls the
    `media_io_kwargs` of the item's modality. Intake writes the item's own; the renderer's hook puts those of model and
    request with them. `options` are processor options of this item alone, canonical JSON as well.

    `alias` is what the client calls it. Given by that alone, it has neither URL nor data, but `content`, once its hash
    is known. `is_embeds` says that `data` is an `Embeds` document: no decoder and no processor is for it.
    """

    modality: Modality
    param: str
    url: str | None = None
    data: bytes | None = None
    media_type: str | None = None
    salt: str = ""
    io: bytes = b"{}"
    options: bytes = b"{}"
    alias: Alias | None = None
    content: str | None = None
    is_embeds: bool = False

    def __post_init__(self) -> None:
        if self.url is not None and self.data is not None:
            raise ValueError("a media reference has either a URL or data")
        if self.url is None and self.data is None and self.alias is None:
            raise ValueError("a media reference has either a URL or data, or an alias alone")

    @property
    def is_alias(self) -> bool:
        """Whether the client has sent nothing but the item's alias."""
        return self.url is None and self.data is None

    def __repr__(self) -> str:
        what = "alias" if self.is_alias else f"url={self.url!r}"
        what = what if self.data is None else f"data={len(self.data)} bytes"
        return f"MediaRef({self.modality}, {self.param}, {what})"


class EncodedMedia(msgspec.Struct, frozen=True):
    """Encoded bytes in the arena. `media_type` is sniffed from the bytes, `content_hash` is their blake3-256 in hex.

    The bytes are [range.offset + data_offset, + num_bytes).
    """

    modality: Modality
    content_hash: str
    media_type: str
    range: ArenaRange
    data_offset: int
    num_bytes: int


class MediaSize(msgspec.Struct, frozen=True, omit_defaults=True):
    """The media's true size, which prompt assembly needs in place of the pixels. Zero where it does not apply.

    `num_samples` of a feature counts what the processor was given, resampled to the model's rate; of decoded sound the
    samples themselves, which are `sample_rate` a second. `metadata` of a video is the JSON object that vLLM's samplers
    tell of it (fps, duration, the frames taken, ...): some families write timestamps.
    """

    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_samples: int = 0
    sample_rate: int = 0
    metadata: bytes = b""


class Image:
    """Decoded pixels: uint8 of shape (height, width, 3), RGB, C-contiguous."""

    __slots__ = ("pixels",)

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(f"pixels must be uint8 of shape (height, width, 3), not {pixels.dtype} {pixels.shape}")
        self.pixels = pixels

    @property
    def size(self) -> MediaSize:
        return MediaSize(width=self.pixels.shape[1], height=self.pixels.shape[0])

    def __repr__(self) -> str:
        return f"Image({self.pixels.shape[1]}x{self.pixels.shape[0]})"


class FrameBatch:
    """Frames sampled from a video: uint8 of shape (frames, height, width, 3), RGB, C-contiguous.

    `metadata` is the JSON object that the model's sampler tells of the video, as in `MediaSize`.
    """

    __slots__ = ("frames", "metadata")

    def __init__(self, frames: NDArray[np.uint8], metadata: bytes) -> None:
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
            raise ValueError(f"frames must be uint8 of shape (n, height, width, 3), not {frames.dtype} {frames.shape}")
        self.frames = frames
        self.metadata = metadata

    @property
    def size(self) -> MediaSize:
        num_frames, height, width, _ = self.frames.shape
        return MediaSize(width=width, height=height, num_frames=num_frames, metadata=self.metadata)

    def __repr__(self) -> str:
        num_frames, height, width, _ = self.frames.shape
        return f"FrameBatch({num_frames} of {width}x{height})"


class AudioSamples:
    """Mono sound at the rate that it was recorded at: float32 of shape (samples,); `sample_rate` in Hz."""

    __slots__ = ("sample_rate", "samples")

    def __init__(self, samples: NDArray[np.float32], sample_rate: int) -> None:
        if samples.dtype != np.float32 or samples.ndim != 1:
            raise ValueError(f"samples must be float32 of one dimension, not {samples.dtype} {samples.shape}")
        if sample_rate <= 0:
            raise ValueError(f"sample_rate must be positive, not {sample_rate}")
        self.samples = samples
        self.sample_rate = sample_rate

    @property
    def size(self) -> MediaSize:
        return MediaSize(num_samples=self.samples.shape[0], sample_rate=self.sample_rate)

    def __repr__(self) -> str:
        return f"AudioSamples({self.samples.shape[0]} at {self.sample_rate} Hz)"


Decoded = Image | FrameBatch | AudioSamples


class VideoSource(msgspec.Struct, frozen=True):
    """What a video says of itself, as vLLM's decoder (OpenCV) reports it: samplers choose frames by these."""

    num_frames: int
    fps: float
    duration_s: float


class Video(Protocol):
    """An opened video, of which a sampler chooses frames.

    `data` are its encoded bytes, for samplers that decode themselves.
    """

    @property
    def source(self) -> VideoSource: ...

    @property
    def data(self) -> memoryview: ...

    def read(self, indices: Sequence[int]) -> tuple[NDArray[np.uint8], list[int]]:
        """Frames of these indices (ascending, in presentation order), and the indices of those that could be read.

        The frames are uint8 of shape (frames read, height, width, 3), RGB. Raises InvalidVideo, VideoTooLarge,
        VideoTooLong, TooManyFrames.
        """
        ...
