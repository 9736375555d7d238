"""Media types, from references in a request to decoded pixels, frames or samples; the table of modalities: everything
that distinguishes one from another, but for the code that decodes it; and the table of stages: the forms in which a
request's media are sent to a worker.

A new modality needs a name in `Modality` with the class of its decoded form; a row in the table, its members in
`gateway.intake.search`; its limits as settings (`max_NAME_bytes` and `NAME_fetch_timeout_s` in `media.config`,
`NAME_timeout_s` in `prepare.config`); its decoder with a row in `media.decoders`; and what vLLM's processor has to be
tried with and given. `tests/unit/types/test_types_modalities.py` lists the files, and fails for any other that names
one.

The transport of a stage is chosen separately (`gateway.request.handover_paths`). A new stage needs a row in `STAGES`,
code that provides what it sends (`gateway.request.media`), and, if the worker has to do more than run the engine, code
for that (`vllm_bridge.engine.unexpanded_prompt`).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.types.errors import InvalidAudio, InvalidImage, InvalidRequest, InvalidVideo, MedialaneError
from medialane.types.tensor import ArenaRange

Modality = Literal["image", "video", "audio"]

#: What encoded bytes are: an item of a modality, or a document, whose pages are images.
MediaSource = Literal[Modality, "document"]

PDF_TYPE = "application/pdf"
#: Of a text that is kept as a file: a document without pages.
TEXT_TYPE = "text/plain"


class Alias(msgspec.Struct, frozen=True):
    """A client's name for an item (vLLM's `uuid`), and the item options given with it. It never identifies content.

    `kind` is the modality under which the client sent it, `<modality>_embeds` for embeddings. `owner` is the owner of
    the reference: different owners have different names, whatever their salts.
    """

    uuid: str
    kind: str
    io: bytes = b"{}"
    options: bytes = b"{}"
    owner: str = ""


class MediaRef(msgspec.Struct, frozen=True):
    """One media item of a request: a URL, inline bytes, or an alias of an item sent earlier.

    `param` is the item's field in the request, for errors. `salt` separates tenants: the same content under another
    salt is another entry. `io` are the item's decoding options (frames, fps, ...): canonical JSON of vLLM's
    `media_io_kwargs` for its modality. Intake sets the item's own; the renderer's hook merges the options of model and
    request. `options` are processor options of this item alone, canonical JSON as well.

    `alias` is the client's name for the item. An item sent as an alias only has neither URL nor data, but `content`,
    its hash, once that is known. For the store, which never gets `data`, `content` replaces it. With `is_embeds`,
    `data` is an `Embeds` document, which is neither decoded nor processed. `owner` is
    who may use what the reference names: the tenant, or the digest of the client's API key.

    With `is_feature` the client has processed the item, or names it: `content` is the hash of a feature, `data` are its
    tensors in vLLM's encoding, if they were sent.

    With the `media_type` PDF_TYPE it refers to a document, modality image: the item is the page that `io` chooses, a
    `PageIo`. `content` is then known, `url` or `data` are for what is no longer cached.
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
    owner: str = ""
    is_feature: bool = False

    def __post_init__(self) -> None:
        if self.url is not None and self.data is not None:
            raise ValueError("a media reference has either a URL or data")
        if self.url is None and self.data is None and self.alias is None and self.content is None:
            raise ValueError("a media reference has a URL, data, a content hash or an alias")

    @property
    def source(self) -> MediaSource:
        return "document" if self.media_type in (PDF_TYPE, TEXT_TYPE) else self.modality

    @property
    def page(self) -> PageIo | None:
        """The page of a document that the item is; None if it is no page."""
        return _page_of(self.io) if self.source == "document" and self.io != b"{}" else None

    def identity(self, content: str) -> tuple[str, bytes]:
        """Return what the keys of the item are made of that has this content hash: content and decoding options. A page
        has the same ones in all documents, wherever it stands."""
        if (page := self.page) is None:
            return content, self.io
        return page.digest, msgspec.json.encode((page.renderer, page.width, page.height))

    @property
    def is_alias(self) -> bool:
        """Whether the client has sent only the item's alias."""
        return self.url is None and self.data is None

    @property
    def client_url(self) -> str:
        """The URL that the client has sent; for media in the body, a data: URL."""
        if self.data is None:
            return self.url or ""
        return f"data:{self.media_type or ''};base64,{b64encode(self.data).decode()}"

    def __repr__(self) -> str:
        what = "alias" if self.is_alias else f"url={self.url!r}"
        what = what if self.data is None else f"data={len(self.data)} bytes"
        return f"MediaRef({self.modality}, {self.param}, {what})"


@contextmanager
def naming(ref: MediaRef) -> Iterator[None]:
    """Add the request field of `ref` to errors."""
    try:
        yield
    except MedialaneError as error:
        raise error.at(ref.param) from error


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class AudioIo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decoding options of audio (`MediaRef.io`), which no client sets: the rate to resample to, 0 for the file's."""

    sample_rate: int = 0


def audio_io(sample_rate: int) -> bytes:
    """Return the decoding options of audio that is resampled."""
    return msgspec.json.encode(AudioIo(sample_rate))


def modality_of(source: MediaSource) -> Modality:
    """Return the modality of the items that encoded bytes are, or have."""
    return "image" if source == "document" else source


class PageIo(msgspec.Struct, frozen=True):
    """Decoding options of a page of a document (`MediaRef.io`): its number, from 1, and its pixels once it is rendered.

    `digest` covers all of the document that the page's pixels depend on, `renderer` is the version of the library that
    renders it. These and the pixels identify the item: the same page of another document has the same features.
    """

    digest: str
    height: _Count
    page: Annotated[int, msgspec.Meta(ge=1)]
    renderer: str
    width: _Count


@lru_cache(1024)
def _page_of(io: bytes) -> PageIo:
    """Read for each use of a page: several times a request."""
    return msgspec.json.decode(io, type=PageIo)


class DocumentOptions(msgspec.Struct, frozen=True):
    """What a request wants of a document; empty or 0 means the operator's default.

    `pages` are numbers and ranges, from 1 and inclusive: "1-3,7"; empty: all. More than `max_pages`, or than the
    operator's limit, are refused. A page is rendered at `dpi`, or at the highest resolution at which it has at most
    `max_pixels` and the operator's limits of an image, if that is lower.
    """

    pages: str = ""
    dpi: _Count = 0
    max_pixels: _Count = 0
    text: bool = True
    max_pages: _Count = 0


class DocumentPage(msgspec.Struct, frozen=True):
    """A page: the decoding options of its item, and its text, empty if that is not wanted."""

    io: PageIo
    text: str


class OpenedDocument(msgspec.Struct, frozen=True):
    """A document of `num_pages` pages, and the pages that a request wants of it, each once, in ascending order; or a
    file that is a `text`."""

    content_hash: str
    num_pages: int
    pages: tuple[DocumentPage, ...]
    text: str = ""

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return 512 + sum(512 + 4 * len(page.text) for page in self.pages)


#: Bytes of opened documents that a process keeps, mostly the text of their pages.
MAX_DOCUMENTS_BYTES = 32 * 1024 * 1024


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


def source_of(encoded: EncodedMedia) -> MediaSource:
    return "document" if encoded.media_type in (PDF_TYPE, TEXT_TYPE) else encoded.modality


#: Of the metadata of a video; with 768 sampled frames there are 6 kB.
MAX_METADATA_BYTES = 256 * 1024


class MediaSize(msgspec.Struct, frozen=True, omit_defaults=True):
    """The media's true size, which prompt assembly needs instead of the pixels. Zero where it does not apply.

    For a feature, `num_samples` counts the processor's input, resampled to the model's rate; for decoded audio, the
    samples at `sample_rate` Hz. `metadata` of a video is the JSON object of vLLM's samplers (fps, duration, indices of
    the sampled frames, ...), from which some model families derive timestamps.
    """

    width: _Count = 0
    height: _Count = 0
    num_frames: _Count = 0
    num_samples: _Count = 0
    sample_rate: _Count = 0
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)] = b""


class Image:
    """Decoded pixels: uint8 of shape (height, width, 3), RGB, C-contiguous."""

    __slots__ = ("pixels",)
    modality: ClassVar[Modality] = "image"

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(f"pixels must be uint8 of shape (height, width, 3), not {pixels.dtype} {pixels.shape}")
        self.pixels = pixels

    @property
    def array(self) -> NDArray[np.uint8]:
        return self.pixels

    @classmethod
    def over(cls, data: memoryview, size: MediaSize) -> Self:
        """Return the image over the bytes of its array, without a copy. Raises ValueError if they are not of `size`."""
        return cls(np.frombuffer(data, np.uint8).reshape(size.height, size.width, 3))

    @property
    def size(self) -> MediaSize:
        return MediaSize(width=self.pixels.shape[1], height=self.pixels.shape[0])

    def __repr__(self) -> str:
        return f"Image({self.pixels.shape[1]}x{self.pixels.shape[0]})"


class FrameBatch:
    """Frames sampled from a video: uint8 of shape (frames, height, width, 3), RGB, C-contiguous.

    `metadata` is the JSON object of the model's sampler, as in `MediaSize`.
    """

    __slots__ = ("frames", "metadata")
    modality: ClassVar[Modality] = "video"

    def __init__(self, frames: NDArray[np.uint8], metadata: bytes) -> None:
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
            raise ValueError(f"frames must be uint8 of shape (n, height, width, 3), not {frames.dtype} {frames.shape}")
        self.frames = frames
        self.metadata = metadata

    @property
    def array(self) -> NDArray[np.uint8]:
        return self.frames

    @classmethod
    def over(cls, data: memoryview, size: MediaSize) -> Self:
        """As `Image.over`."""
        frames = np.frombuffer(data, np.uint8).reshape(size.num_frames, size.height, size.width, 3)
        return cls(frames, size.metadata)

    @property
    def size(self) -> MediaSize:
        num_frames, height, width, _ = self.frames.shape
        return MediaSize(width=width, height=height, num_frames=num_frames, metadata=self.metadata)

    def __repr__(self) -> str:
        num_frames, height, width, _ = self.frames.shape
        return f"FrameBatch({num_frames} of {width}x{height})"


class AudioSamples:
    """Mono audio, at its original rate unless it was resampled: float32 of shape (samples,); `sample_rate` in Hz."""

    __slots__ = ("sample_rate", "samples")
    modality: ClassVar[Modality] = "audio"

    def __init__(self, samples: NDArray[np.float32], sample_rate: int) -> None:
        if samples.dtype != np.float32 or samples.ndim != 1:
            raise ValueError(f"samples must be float32 of one dimension, not {samples.dtype} {samples.shape}")
        if sample_rate <= 0:
            raise ValueError(f"sample_rate must be positive, not {sample_rate}")
        self.samples = samples
        self.sample_rate = sample_rate

    @property
    def array(self) -> NDArray[np.float32]:
        return self.samples

    @classmethod
    def over(cls, data: memoryview, size: MediaSize) -> Self:
        """As `Image.over`."""
        return cls(np.frombuffer(data, np.float32).reshape(size.num_samples), size.sample_rate)

    @property
    def size(self) -> MediaSize:
        return MediaSize(num_samples=self.samples.shape[0], sample_rate=self.sample_rate)

    def __repr__(self) -> str:
        return f"AudioSamples({self.samples.shape[0]} at {self.sample_rate} Hz)"


Decoded = Image | FrameBatch | AudioSamples

#: The class of each modality's decoded media.
DECODED: Mapping[Modality, type[Decoded]] = {form.modality: form for form in (Image, FrameBatch, AudioSamples)}


class VideoSource(msgspec.Struct, frozen=True):
    """Properties of a video as reported by vLLM's decoder (OpenCV); samplers choose frames by them."""

    num_frames: int
    fps: float
    duration_s: float


class Video(Protocol):
    """An opened video from which a sampler chooses frames.

    `data` are its encoded bytes, for samplers with their own decoder.
    """

    @property
    def source(self) -> VideoSource: ...

    @property
    def data(self) -> memoryview: ...

    def read(self, indices: Sequence[int]) -> tuple[NDArray[np.uint8], list[int]]:
        """Return the frames at these indices (ascending, in presentation order), and the indices that could be read.

        The frames are uint8 of shape (frames read, height, width, 3), RGB. Raises InvalidVideo, VideoTooLarge,
        VideoTooLong, TooManyFrames.
        """
        ...


class FrameSampler(Protocol):
    """The model's sampler, the only decision about decoding that depends on the model; `vllm_bridge` implements it."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """Sample the same frames of a video as the engine. `io` is as in `MediaRef`.

        Raises InvalidRequest for options that the sampler does not support, and what `Video.read` raises.
        """
        ...


#: What the member of a content part contains: a URL or an object with one; an object with base64 and its format;
#: embeddings instead of media.
PartContent = Literal["url", "base64", "embeds"]


class ModalityTraits(NamedTuple):
    """One row.

    `parts` are the members of content parts with such an item, `url_list` is the member of a body that is a list of
    URLs of such items. `invalid` is the error for damaged items. Options of an item may choose its pixels with
    `has_pixels`, its frames with `has_frames` (`gateway.intake.places`).
    """

    parts: Mapping[str, PartContent]
    url_list: str
    invalid: type[InvalidRequest]
    has_pixels: bool = False
    has_frames: bool = False


MODALITIES: Mapping[Modality, ModalityTraits] = {
    "image": ModalityTraits(
        {"image_url": "url", "image_embeds": "embeds"}, url_list="images", invalid=InvalidImage, has_pixels=True
    ),
    "video": ModalityTraits(
        {"video_url": "url", "video_embeds": "embeds"},
        url_list="videos",
        invalid=InvalidVideo,
        has_pixels=True,
        has_frames=True,
    ),
    "audio": ModalityTraits(
        {"audio_url": "url", "input_audio": "base64", "audio_embeds": "embeds"}, url_list="audio", invalid=InvalidAudio
    ),
}


# Stages

StageName = Literal["features", "decoded", "url"]
StageChoice = Literal["auto", StageName]

#: Remaining steps before the language model. The encoder runs inside the engine.
WorkerStep = Literal["decode", "process", "encode"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One form of a request's media.

    `sends` is the kind of arena entry that is sent, `worker_steps` are the steps left to the worker. What `is_small` is
    sent in messages rather than not at all if the operator's choice of a transport is impossible for a worker.
    `same_processor` requires a worker whose processor settings equal ours. With `--stage auto`, `if_unsupported` is
    used for a worker that does not support this stage, `after_failure` after a failed hand-over.
    """

    name: StageName
    sends: Literal["processed", "decoded", "encoded"]
    worker_steps: tuple[WorkerStep, ...]
    is_small: bool = False
    same_processor: bool = False
    if_unsupported: StageName | None = None
    after_failure: StageName | None = None

    @property
    def is_processed(self) -> bool:
        """Whether items are processed by the store; the gateway then expands the prompt."""
        return "process" not in self.worker_steps

    @property
    def is_decoded(self) -> bool:
        """Whether items are decoded by the store."""
        return "decode" not in self.worker_steps


STAGES: Mapping[StageName, Stage] = {
    stage.name: stage
    for stage in (
        # Decoded media do not depend on processor settings: the next best where features cannot be used.
        Stage("features", "processed", ("encode",), same_processor=True, if_unsupported="decoded", after_failure="url"),
        Stage("decoded", "decoded", ("process", "encode"), after_failure="url"),
        Stage("url", "encoded", ("decode", "process", "encode"), is_small=True),
    )
}

#: The first stage that `auto` tries.
BEST_STAGE: StageName = "features"

#: Leaves everything to the worker: for embeddings sent by a client, and for a model without media support.
RAW_STAGE: StageName = "url"


def prepared_stage(choice: StageChoice) -> Stage:
    """Return the stage for which a request's media are prepared before its worker is known."""
    return STAGES[BEST_STAGE if choice == "auto" else choice]
