import subprocess
import sys
from types import SimpleNamespace

import pytest
from PIL import features

from medialane.media import MediaConfig, installed_kinds, sniff
from medialane.media.decoders import find_kinds
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
def _without_avif(monkeypatch):
    """As with a build of Pillow without it."""
    monkeypatch.setattr(features, "check", lambda feature: feature != "avif")
    installed_kinds.cache_clear()
    yield
    installed_kinds.cache_clear()


def test_full_installation_supports_every_kind():
    assert installed_kinds().line() == (
        "media: image (jpeg png webp gif avif bmp pdf), video (h264 hevc vp9 av1), audio (wav flac mp3 ogg m4a)"
    )
    assert installed_kinds().unavailable == ()


def test_missing_libraries_are_named_with_their_fix():
    found = find_kinds(absent)
    assert found.line().splitlines() == [
        "media: image (jpeg png webp gif avif bmp)",
        "media unavailable: image/pdf: pypdfium2_raw is not installed (pip install pypdfium2)",
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


@pytest.mark.usefixtures("_without_avif")
def test_missing_pillow_format_is_detected():
    avif = find_kinds(absent).unavailable[0]
    assert (avif.modality, avif.name) == ("image", "avif")
    assert "pillow" in avif.missing


def test_available_image_format_is_accepted():
    assert sniff(AVIF, "image", MediaConfig()) == "image/avif"


@pytest.mark.usefixtures("_without_avif")
def test_unavailable_image_format_is_rejected_by_name():
    with pytest.raises(UnsupportedMediaType, match="AVIF image"):
        sniff(AVIF, "image", MediaConfig())


SNIFF = """
import sys
for library in sys.argv[1].split():
    sys.modules[library] = None
import medialane.media
from medialane.media import MediaConfig, installed_kinds, sniff
from medialane.types.errors import UnsupportedMediaType
print(installed_kinds().line())
for modality in sys.argv[2:]:
    data = sys.stdin.buffer.readline().rstrip()
    try:
        print(sniff(data, modality, MediaConfig()))
    except UnsupportedMediaType as error:
        print(error.message)
"""


def sniffed_without(libraries, *media):
    """What an installation without these libraries says of its kinds, and of each of the media, pairs of modality and
    bytes. Blocked as there: `import av` raises ModuleNotFoundError."""
    modalities, data = [modality for modality, _ in media], b"\n".join(each for _, each in media)
    command = [sys.executable, "-c", SNIFF, libraries, *modalities]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=True)
    return done.stdout.decode().splitlines()


def test_kinds_are_reported_and_unavailable_modalities_rejected_first_without_the_libraries():
    *kinds, video, audio = sniffed_without("av soundfile", ("video", b""), ("audio", b""))
    assert kinds[0] == "media: image (jpeg png webp gif avif bmp pdf)"
    assert kinds[1].startswith("media unavailable: ")
    assert "does not support video" in video
    assert "does not support audio" in audio


def test_document_without_its_library_is_rejected():
    message, image = sniffed_without("pypdfium2_raw", ("document", b"%PDF-1.7"), ("image", b"%PDF-1.7"))[-2:]
    assert "does not support document" in message
    assert "send it as a document" in image


def test_unavailable_audio_is_rejected_by_name():
    m4a, webm = b"\0\0\0\x18ftypM4A x", b"\x1a\x45\xdf\xa3webm"
    *_, mp3, first, second = sniffed_without("av", *(("audio", data) for data in (b"ID3".ljust(10, b"."), m4a, webm)))
    assert mp3 == "audio/mpeg"
    assert "M4A audio" in first
    assert "M4A audio" in second
