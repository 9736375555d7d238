"""Which kinds of media this installation can decode, and what is missing for the others.

Decoders come with libraries whose builds differ: Pillow with or without AVIF, PyAV with or without a codec. So the
libraries themselves are queried, once per process; they are imported only when queried.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import msgspec
from PIL import features

from medialane.core.errors import UnsupportedMediaType
from medialane.core.media import Modality

_PILLOW_FIX = "pip install --force-reinstall pillow, which brings a build with it"
_AV_FIX = "pip install --force-reinstall av, which brings a build with it"
_INSTALL_AV = "pip install av"
_INSTALL_SOUNDFILE = "pip install soundfile"


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
        on = {m: [k.name for k in self.kinds if k.modality == m and not k.missing] for m in _MODALITIES}
        lines = ["media: " + ", ".join(f"{m} ({' '.join(names)})" for m, names in on.items() if names)]
        for (missing, fix), kinds in self._reasons().items():
            names = " ".join(f"{kind.modality}/{kind.name}" for kind in kinds)
            lines.append(f"media unavailable: {names}: {missing} ({fix})")
        return "\n".join(lines)

    def _reasons(self) -> dict[tuple[str, str], list[Kind]]:
        found: dict[tuple[str, str], list[Kind]] = {}
        for kind in self.unavailable:
            found.setdefault((kind.missing, kind.fix), []).append(kind)
        return found


@functools.cache
def installed_kinds() -> Kinds:
    """Return what this process can decode. The first call imports the libraries (about 0.1 s)."""
    return find_kinds(_load)


def find_kinds(load: Callable[[str], ModuleType | str]) -> Kinds:
    """Return the kinds as `installed_kinds` does; `load` returns a library by name, or the reason why it is missing."""
    av, soundfile = load("av"), load("soundfile")
    return Kinds((*_images(features.check), *_videos(av), *_audio_kinds(av, soundfile)))


def check_modality(modality: Modality) -> None:
    """Raise UnsupportedMediaType if this server has no decoder for a modality."""
    if modality != "image" and not installed_kinds().supports(modality):
        raise UnsupportedMediaType(f"this server does not support {modality}: it has no decoder for it")


def check_type(modality: Modality, media_type: str) -> None:
    """Raise UnsupportedMediaType if this server cannot decode a sniffed type.

    Videos always pass: their type is the container's, and the codec is checked when the video is opened.
    """
    name = {"image": media_type.removeprefix("image/"), "audio": _AUDIO_TYPES.get(media_type, "m4a")}.get(modality)
    if name is not None and not installed_kinds().supports(modality, name):
        raise UnsupportedMediaType(f"this server does not support {name.upper()} {modality}: it has no decoder for it")


_MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")

#: Image format -> Pillow feature that decodes it, None if always built in.
_IMAGES = {"jpeg": "jpg", "png": "zlib", "webp": "webp", "gif": None, "avif": "avif", "bmp": None}

#: Audio media type -> kind; every other type is decoded by FFmpeg, like M4A.
_AUDIO_TYPES = {"audio/wav": "wav", "audio/flac": "flac", "audio/mpeg": "mp3", "audio/ogg": "ogg"}

#: Codec by its common name -> FFmpeg decoders, any of which suffices.
_VIDEOS = {"h264": ("h264",), "hevc": ("hevc",), "vp9": ("vp9", "libvpx-vp9"), "av1": ("libdav1d", "libaom-av1")}

#: Format -> libsndfile's name for it.
_SOUNDFILE = {"wav": "WAV", "flac": "FLAC", "mp3": "MP3", "ogg": "OGG"}


def _load(name: str) -> ModuleType | str:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{name} is not installed" if error.name == name else f"{name} cannot be loaded"
    except (ImportError, OSError):  # a shared library that it needs is missing
        return f"{name} cannot be loaded"


def _images(has: Callable[[str], bool | None]) -> list[Kind]:
    return [
        Kind("image", name)
        if feature is None or has(feature)
        else Kind("image", name, f"this Pillow is built without {name}", _PILLOW_FIX)
        for name, feature in _IMAGES.items()
    ]


def _videos(av: ModuleType | str) -> list[Kind]:
    if isinstance(av, str):
        return [Kind("video", name, av, _INSTALL_AV) for name in _VIDEOS]
    return [
        Kind("video", name)
        if any(_decodes(av, decoder) for decoder in decoders)
        else Kind("video", name, f"this av is built without {name}", _AV_FIX)
        for name, decoders in _VIDEOS.items()
    ]


def _audio_kinds(av: ModuleType | str, soundfile: Any) -> list[Kind]:
    known: Collection[str] = () if isinstance(soundfile, str) else soundfile.available_formats()
    return [*(_by_soundfile(name, soundfile, known) for name in _SOUNDFILE), _m4a(av, soundfile)]


def _by_soundfile(name: str, soundfile: ModuleType | str, known: Collection[str]) -> Kind:
    if isinstance(soundfile, str):
        return Kind("audio", name, soundfile, _INSTALL_SOUNDFILE)
    if _SOUNDFILE[name] not in known:
        return Kind("audio", name, f"this soundfile is built without {name}", _INSTALL_SOUNDFILE)
    return Kind("audio", name)


def _m4a(av: ModuleType | str, soundfile: ModuleType | str) -> Kind:
    if isinstance(soundfile, str):  # libsndfile is tried first for all audio, like in vLLM
        return Kind("audio", "m4a", soundfile, _INSTALL_SOUNDFILE)
    if isinstance(av, str):
        return Kind("audio", "m4a", av, _INSTALL_AV)
    return (
        Kind("audio", "m4a") if _decodes(av, "aac") else Kind("audio", "m4a", "this av is built without aac", _AV_FIX)
    )


def _decodes(av: Any, decoder: str) -> bool:
    try:
        av.Codec(decoder, "r")
    except ValueError:  # av.codec.codec.UnknownCodecError
        return False
    return True
