"""Which kinds of media this installation can decode, and what is missing for the others.

Decoders come with libraries whose builds differ: Pillow with or without AVIF, PyAV with or without a codec. So the
libraries themselves are queried, once per process; they are imported only when queried.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec
from PIL import features

from medialane.types.media import Modality

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

#: Codec by its common name -> FFmpeg decoders, any of which suffices.
_VIDEOS = {"h264": ("h264",), "hevc": ("hevc",), "vp9": ("vp9", "libvpx-vp9"), "av1": ("libdav1d", "libaom-av1")}


def image_kinds(modality: Modality, _load: Load) -> Iterator[Kind]:
    for name, feature in _IMAGES.items():
        yield _kind(modality, name, "pillow", features, has=feature is None or features.check(feature))


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
