import subprocess
import sys
from types import SimpleNamespace

import pytest

from medialane.media import MediaConfig, decoders, installed_kinds, sniff
from medialane.media.decoders import Kind, Kinds, find_kinds
from medialane.types.errors import UnsupportedMediaType

#: No decoder is run on this: sniffing reads its header.
AVIF = (
    bytes.fromhex("00000014667479706176696600000000")
    + b"avif"
    + bytes.fromhex("000000346d657461000000000000002869707270000000206970636f0000001469737065000000000000000800000008")
    + bytes(4)
)


def absent(name):
    return f"{name} is not installed"


def installed(**libraries):
    return lambda name: libraries.get(name, absent(name))


def av_with(*decoders):
    def open_codec(name, mode):
        if name not in decoders:
            raise ValueError(name)
        return SimpleNamespace(name=name)

    return SimpleNamespace(Codec=open_codec)


def soundfile_with(*formats):
    return SimpleNamespace(available_formats=lambda: dict.fromkeys(formats, ""))


@pytest.fixture
def only_images(monkeypatch):
    monkeypatch.setattr(decoders, "installed_kinds", lambda: find_kinds(absent))


def test_full_installation_supports_every_kind():
    assert installed_kinds().line() == (
        "media: image (jpeg png webp gif avif bmp), video (h264 hevc vp9 av1), audio (wav flac mp3 ogg m4a)"
    )
    assert installed_kinds().unavailable == ()


def test_missing_libraries_are_named_with_their_fix():
    found = find_kinds(absent)
    assert found.line().splitlines() == [
        "media: image (jpeg png webp gif avif bmp)",
        "media unavailable: video/h264 video/hevc video/vp9 video/av1: av is not installed (pip install av)",
        "media unavailable: audio/wav audio/flac audio/mp3 audio/ogg audio/m4a: soundfile is not installed "
        "(pip install soundfile)",
    ]
    assert found.supports("image")
    assert not found.supports("video")
    assert all(kind.fix for kind in found.unavailable)


def test_build_without_a_codec_supports_the_others():
    found = find_kinds(installed(av=av_with("h264", "vp9"), soundfile=soundfile_with("WAV")))
    assert [kind.name for kind in found.kinds if not kind.missing][6:] == ["h264", "vp9", "wav"]
    assert any(k.name == "hevc" and k.missing == "this av is built without hevc" and k.fix for k in found.unavailable)


def test_missing_pillow_format_is_detected(monkeypatch):
    monkeypatch.setattr(decoders.features, "check", lambda feature: feature != "avif")
    avif = find_kinds(absent).unavailable[0]
    assert (avif.modality, avif.name) == ("image", "avif")
    assert "pillow" in avif.missing


@pytest.mark.usefixtures("only_images")
@pytest.mark.parametrize("modality", ["video", "audio"])
def test_unavailable_modality_is_rejected_first(modality):
    with pytest.raises(UnsupportedMediaType, match=f"does not support {modality}"):
        sniff(b"", modality, MediaConfig())


def test_unavailable_image_format_is_rejected_by_name(monkeypatch):
    assert sniff(AVIF, "image", MediaConfig()) == "image/avif"
    without = Kinds((Kind("image", "jpeg"), Kind("image", "avif", "built without it", "build it")))
    monkeypatch.setattr(decoders, "installed_kinds", lambda: without)
    with pytest.raises(UnsupportedMediaType, match="AVIF image"):
        sniff(AVIF, "image", MediaConfig())


def test_unavailable_audio_is_rejected_by_name(monkeypatch):
    without_av = find_kinds(installed(soundfile=soundfile_with("WAV", "FLAC", "OGG", "MP3")))
    monkeypatch.setattr(decoders, "installed_kinds", lambda: without_av)
    config = MediaConfig()
    assert sniff(b"ID3".ljust(10), "audio", config) == "audio/mpeg"
    for m4a in (b"\0\0\0\x18ftypM4A ", b"\x1a\x45\xdf\xa3webm"):
        with pytest.raises(UnsupportedMediaType, match="M4A audio"):
            sniff(m4a, "audio", config)


def test_kinds_are_reported_and_the_package_imports_without_the_libraries():
    """Blocked as an installation without them is: `import av` raises ModuleNotFoundError."""
    program = """
import sys
sys.modules["av"] = sys.modules["soundfile"] = None
import medialane.media
from medialane.media import installed_kinds
print(installed_kinds().line())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15, check=True)
    assert done.stdout.startswith("media: image (jpeg png webp gif avif bmp)\nmedia unavailable: ")
