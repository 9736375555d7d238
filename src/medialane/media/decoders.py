"""The decoders, one row a modality: untrusted bytes from their first magic bytes to decoded media.

`sniff` runs on the event loop before bytes reach a preparer. It takes less than 10 ms for any input: it checks magic
bytes of every type, and image headers as far as they can be parsed in a bounded number of steps. The rest of a file's
metadata is read inside a preparer by the libraries that decode it: `decode`, `probe` and `measure` run there,
synchronously, in one thread, with a memory limit and a deadline.

OpenAI's clients have an exception class for 400, but none for 415, which is therefore reserved for intact files of
another type, recognised by their magic bytes. Everything else that no decoder here would open is invalid (400).

Decoders come with libraries whose builds differ: Pillow with or without AVIF, PyAV with or without a codec. So what an
installation can decode (its *kinds*) is found out by querying the libraries themselves, once per process; they are
imported only when queried.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
from PIL import features

from medialane.media.audio import check_audio, decode_audio, measure_audio
from medialane.media.config import MediaConfig
from medialane.media.container import sniff_audio, sniff_video
from medialane.media.data_url import PIXMAP_TYPE, decode_pixmap, pixmap_size
from medialane.media.document import check_document, is_pdf, render_page, sniff_document
from medialane.media.image import check_image, decode_image, measure_image
from medialane.media.image_header import sniff_image
from medialane.types.errors import UnsupportedMediaType
from medialane.types.media import (
    MODALITIES,
    PDF_TYPE,
    TEXT_TYPE,
    AudioIo,
    Decoded,
    FrameSampler,
    MediaSize,
    MediaSource,
    Modality,
    PageIo,
    modality_of,
)

#: A module, or the reason why it cannot be loaded.
Library = ModuleType | str
#: Returns a library by name.
Load = Callable[[str], Library]


class Kind(msgspec.Struct, frozen=True):
    """One kind of media: an image format, a video codec or an audio format.

    `missing` is the reason why this installation cannot decode it, `fix` the remedy; both are empty if it can.
    """

    modality: Modality
    name: str
    missing: str = ""
    fix: str = ""


class Kinds(msgspec.Struct, frozen=True):
    """All kinds, in display order."""

    kinds: tuple[Kind, ...]

    def supports(self, modality: Modality, name: str | None = None) -> bool:
        """Return whether a kind can be decoded; without a name, whether any kind of the modality can."""
        return any(not k.missing for k in self.kinds if k.modality == modality and name in (None, k.name))

    @property
    def unavailable(self) -> tuple[Kind, ...]:
        """The kinds that cannot be decoded here."""
        return tuple(kind for kind in self.kinds if kind.missing)

    def line(self) -> str:
        """Return the supported kinds in one line, and the unavailable ones in a further line per reason."""
        names: dict[str, list[str]] = {}
        reasons: dict[str, list[str]] = {}
        for kind in self.kinds:
            if kind.missing:
                reasons.setdefault(f"{kind.missing} ({kind.fix})", []).append(f"{kind.modality}/{kind.name}")
            else:
                names.setdefault(kind.modality, []).append(kind.name)
        supported = ", ".join(f"{modality} ({' '.join(names)})" for modality, names in names.items())
        unavailable = (f"media unavailable: {' '.join(kinds)}: {reason}" for reason, kinds in reasons.items())
        return "\n".join((f"media: {supported}", *unavailable))


#: Image format -> Pillow feature that decodes it, None if always built in.
_IMAGES = {"jpeg": "jpg", "png": "zlib", "webp": "webp", "gif": None, "avif": "avif", "bmp": None}

#: Audio media type -> kind, libsndfile's name in lower case; every other type is decoded by FFmpeg, like M4A.
_AUDIO_TYPES = {"audio/wav": "wav", "audio/flac": "flac", "audio/mpeg": "mp3", "audio/ogg": "ogg"}

#: Codec by its common name -> FFmpeg decoders; any of them suffices.
_VIDEOS = {"h264": ("h264",), "hevc": ("hevc",), "vp9": ("vp9", "libvpx-vp9"), "av1": ("libdav1d", "libaom-av1")}


def image_kinds(modality: Modality, load: Load) -> Iterator[Kind]:
    for name, feature in _IMAGES.items():
        yield _kind(modality, name, "pillow", features, has=feature is None or features.check(feature))
    yield _kind(modality, "pdf", "pypdfium2", load("pypdfium2_raw"), has=True)


def video_kinds(modality: Modality, load: Load) -> Iterator[Kind]:
    av = load("av")
    for name, decoders in _VIDEOS.items():
        yield _kind(modality, name, "av", av, has=any(_decodes(av, decoder) for decoder in decoders))


def audio_kinds(modality: Modality, load: Load) -> Iterator[Kind]:
    av, soundfile = load("av"), load("soundfile")
    formats = () if isinstance(soundfile, str) else soundfile.available_formats()
    for name in _AUDIO_TYPES.values():
        yield _kind(modality, name, "soundfile", soundfile, has=name.upper() in formats)
    # libsndfile is tried first for all audio, like in vLLM.
    name, library = ("soundfile", soundfile) if isinstance(soundfile, str) else ("av", av)
    yield _kind(modality, "m4a", name, library, has=_decodes(av, "aac"))


def audio_kind(media_type: str) -> str:
    """Return the kind of a media type."""
    return _AUDIO_TYPES.get(media_type, "m4a")


def load(name: str) -> Library:
    """Import a library; return why that is impossible if it is."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{name} is not installed" if error.name == name else f"{name} cannot be loaded"
    except (ImportError, OSError):  # a shared library that it needs is missing
        return f"{name} cannot be loaded"


def _kind(modality: Modality, name: str, library_name: str, library: Library, *, has: object) -> Kind:
    if isinstance(library, str):
        return Kind(modality, name, library, f"pip install {library_name}")
    if has:
        return Kind(modality, name)
    fix = f"pip install --force-reinstall {library_name}, which brings a build with it"
    return Kind(modality, name, f"this {library_name} is built without {name}", fix)


def _decodes(av: Any, decoder: str) -> bool:
    try:
        return not isinstance(av, str) and bool(av.Codec(decoder, "r"))
    except ValueError:  # av.codec.codec.UnknownCodecError
        return False


# PyAV is optional: images do not need it, and without it `sniff` rejects video. Imported here, before preparers are
# forked, so that all share its pages.
try:
    from medialane.media.video import open_video
except ImportError as missing:
    if (missing.name or "").partition(".")[0] != "av":
        raise

Bytes = bytes | bytearray | memoryview

#: How many of a file's first bytes the magic bytes below need.
_HEAD_BYTES = 64


class DecodeOptions(NamedTuple):
    """`io` are the item's, as in `MediaRef`; the model's `sampler` chooses the frames of a video."""

    io: bytes
    sampler: FrameSampler


class Decoder(NamedTuple):
    """One row. Its functions raise the modality's errors of `types.errors`.

    `sniff` returns the media type of encoded bytes after checking their header; `decode` and `check` get it with the
    bytes. `check` raises what `decode` would raise for the header; for types in `sniffed_whole` nothing that `sniff`
    does not.

    `measure` returns the size of what `decode` would return, without decoding it if that is certain.

    `magic` are magic bytes of its types, `riff` the form type of its RIFF files: a file with these that is rejected is
    damaged. `kinds` lists what libraries decode; `kind` returns the kind of a media type, None if only its decoder
    knows.
    """

    sniff: Callable[[Bytes, MediaConfig], str]
    check: Callable[[memoryview, str, MediaConfig], None]
    decode: Callable[[memoryview, str, MediaConfig, DecodeOptions], Decoded]
    kinds: Callable[[Modality, Load], Iterable[Kind]]
    kind: Callable[[str], str | None]
    measure: Callable[[memoryview, str, MediaConfig, DecodeOptions], MediaSize]
    magic: tuple[bytes, ...]
    riff: bytes = b""
    sniffed_whole: frozenset[str] = frozenset()


def _check_image(data: memoryview, media_type: str, config: MediaConfig) -> None:
    if media_type == PDF_TYPE:
        check_document(data)
    else:
        check_image(data, config)


def _decode_image(data: memoryview, media_type: str, config: MediaConfig, options: DecodeOptions) -> Decoded:
    if media_type == PDF_TYPE:
        return render_page(data, _page(options), config)
    return decode_pixmap(data) if media_type == PIXMAP_TYPE else decode_image(data, config)


def _measure_image(data: memoryview, media_type: str, config: MediaConfig, options: DecodeOptions) -> MediaSize:
    if media_type == PDF_TYPE:
        page = _page(options)
        return MediaSize(width=page.width, height=page.height)
    if media_type == PIXMAP_TYPE:
        width, height = pixmap_size(data)
        return MediaSize(width=width, height=height)
    return measure_image(data, config)


def _page(options: DecodeOptions) -> PageIo:
    """Return the page that is to be decoded. Raises UnsupportedMediaType for a document that was sent as an image."""
    try:
        return msgspec.json.decode(options.io, type=PageIo)
    except msgspec.ValidationError as error:
        raise UnsupportedMediaType(_NO_IMAGE) from error


def _measure_audio(data: memoryview, _media_type: str, config: MediaConfig, options: DecodeOptions) -> MediaSize:
    return measure_audio(data, config, sample_rate=_sample_rate(options))


def _decode_audio(data: memoryview, _media_type: str, config: MediaConfig, options: DecodeOptions) -> Decoded:
    return decode_audio(data, config, sample_rate=_sample_rate(options))


def _sample_rate(options: DecodeOptions) -> int:
    return msgspec.json.decode(options.io, type=AudioIo).sample_rate


def _decode_video(data: memoryview, media_type: str, config: MediaConfig, options: DecodeOptions) -> Decoded:
    with open_video(data, media_type, config) as video:
        return options.sampler.sample(video, options.io)


def _measure_video(data: memoryview, media_type: str, config: MediaConfig, options: DecodeOptions) -> MediaSize:
    with open_video(data, media_type, config, blank=True) as video:
        return options.sampler.sample(video, options.io).size


def _check_video(data: memoryview, media_type: str, config: MediaConfig) -> None:
    with open_video(data, media_type, config):
        pass


DECODERS: Mapping[Modality, Decoder] = {
    "image": Decoder(
        sniff=lambda data, config: sniff_image(data, config).media_type,
        check=_check_image,
        decode=_decode_image,
        kinds=image_kinds,
        kind=lambda media_type: media_type.removeprefix("image/"),
        measure=_measure_image,
        magic=(b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM"),
        riff=b"WEBP",
        sniffed_whole=frozenset({"image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", PIXMAP_TYPE})
        | {TEXT_TYPE},
    ),
    "video": Decoder(
        sniff=sniff_video,
        check=_check_video,
        decode=_decode_video,
        kinds=video_kinds,
        kind=lambda _media_type: None,  # the type is the container's; the codec is checked when the video is opened
        measure=_measure_video,
        magic=(b"\x1a\x45\xdf\xa3",),
    ),
    "audio": Decoder(
        sniff=sniff_audio,
        check=lambda data, _media_type, config: check_audio(data, config),
        decode=_decode_audio,
        kinds=audio_kinds,
        kind=audio_kind,
        measure=_measure_audio,
        magic=(b"fLaC", b"OggS", b"ID3", b"\x1a\x45\xdf\xa3"),
        riff=b"WAVE",
    ),
}

#: Magic bytes of unsupported types: other images, documents, archives, audio, videos, playlists, web pages.
_OTHERS = (
    b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"DDS ", b"\xd7\xcd\xc6\x9a", b"P4\n", b"P5\n", b"P6",
    b"\x89HDF", b"\x80\4\x95", b"8BPS", b"SIMPLE  =", b"\0\0\0\x0cjP", b"\0\0\0\x0cJXL", b"\xff\x0a", b"\0\0\1\0",
    b"\0\0\2\0", b"%PDF", b"%!PS", b"\x93NUMPY", b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!",
    b"FORM", b"#!AMR", b"caff", b"MThd", b".snd", b"FLV\1", b"\0\0\1\xba", b"\0\0\1\xb3", b"\x30\x26\xb2\x75",
    b"G\x40\0\x10", b"G\x40\x11\x10",  # the first packet of an MPEG transport stream
    b"#EXTM3U", b"ffconcat", b"v=0\r\n", b"v=0\n", b"<",
)  # fmt: skip


_NO_IMAGE = "a PDF is not an image: send it as a document (a content part of type `file`, `input_file` or `document`)"


def sniff(data: Bytes, source: MediaSource, config: MediaConfig) -> str:
    """Return the media type of one item, or of a document, and check its header against the limits; no decoder is run.

    Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType, the modality's Invalid* error (damaged or unrecognised), and
    for images ImageTooLarge, ImageTooComplex.
    """
    modality = modality_of(source)
    decoder, kinds = DECODERS[modality], installed_kinds()
    if source == "document" and kinds.supports(modality, "pdf"):
        return sniff_document(data, config)
    if source == "document" or not kinds.supports(modality):
        raise UnsupportedMediaType(f"this server does not support {source}: it has no decoder for it")
    try:
        media_type = decoder.sniff(data, config)
    except UnsupportedMediaType as error:
        if modality == "image" and is_pdf(data):
            raise UnsupportedMediaType(_NO_IMAGE) from error
        if _is_other_file_type(bytes(data[:_HEAD_BYTES]), modality):
            raise
        raise MODALITIES[modality].invalid(f"{error.message}, or it is damaged") from error
    kind = decoder.kind(media_type)
    if kind is not None and not kinds.supports(modality, kind):
        raise UnsupportedMediaType(f"this server does not support {kind.upper()} {modality}: it has no decoder for it")
    return media_type


def needs_probe(media_type: str) -> bool:
    """Return whether `probe` checks more of a file of this type than `sniff`."""
    return not any(media_type in decoder.sniffed_whole for decoder in DECODERS.values())


def probe(data: memoryview, modality: Modality, media_type: str, config: MediaConfig) -> None:
    """Raise what `decode` would raise for the item's header, without decoding it.

    In stage `url` the worker's vLLM decodes, with different limits or none, so a preparer opens the item first.
    `decode` includes these checks.
    """
    DECODERS[modality].check(data, media_type, config)


def decode(
    data: memoryview, modality: Modality, *, media_type: str, io: bytes, config: MediaConfig, sampler: FrameSampler
) -> Decoded:
    """Decode one item; `media_type` is the result of `sniff`. Raises what the modality's decoder raises."""
    return DECODERS[modality].decode(data, media_type, config, DecodeOptions(io, sampler))


def measure(
    data: memoryview, modality: Modality, *, media_type: str, io: bytes, config: MediaConfig, sampler: FrameSampler
) -> MediaSize:
    """Return the size that `decode` would give one item. Most items are only opened for that, and damage of their
    pixels or frames is not noticed; others (GIF, compressed audio, videos with frames at irregular times) are decoded.
    Raises what `decode` raises."""
    return DECODERS[modality].measure(data, media_type, config, DecodeOptions(io, sampler))


@functools.cache
def installed_kinds() -> Kinds:
    """Return what this process can decode. The first call imports the libraries (about 0.1 s)."""
    return find_kinds(load)


def find_kinds(load: Load) -> Kinds:
    """Return the kinds as `installed_kinds` does; `load` returns a library by name, or the reason why it is missing."""
    return Kinds(tuple(kind for modality, decoder in DECODERS.items() for kind in decoder.kinds(modality, load)))


def _is_other_file_type(head: bytes, modality: Modality) -> bool:
    """Return whether bytes rejected as `modality` have the magic bytes of another file type."""
    if head[4:8] == b"ftyp":  # rejected ones have another brand: HEIC, or audio sent as an image
        return True
    own = DECODERS[modality]
    if head.startswith(b"RIFF"):
        return head[8:12] in (b"AVI ", b"WEBP", b"WAVE") and head[8:12] != own.riff
    if head.startswith(own.magic):
        return False
    others = tuple(start for decoder in DECODERS.values() for start in decoder.magic)
    return head.startswith(others) or head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(_OTHERS)
