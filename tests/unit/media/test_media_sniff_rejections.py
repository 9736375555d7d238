"""415 is for unsupported file types; anything else, and damaged files, are bad requests."""

import pytest

from medialane.media import MediaConfig, sniff
from medialane.types.errors import InvalidAudio, InvalidImage, InvalidVideo, UnsupportedMediaType

INVALID = {"image": InvalidImage, "video": InvalidVideo, "audio": InvalidAudio}

OF_ANOTHER_TYPE = {
    "TIFF": ("image", b"II*\0\x08\0\0\0"),
    "PDF": ("image", b"%PDF-1.7\n"),
    "HEIC": ("image", b"\0\0\0\x18ftypheic\0\0\0\0"),
    "page": ("image", b"\xef\xbb\xbf\n <!doctype html>"),
    "audio as an image": ("image", b"RIFF\x24\0\0\0WAVEfmt "),
    "video as an image": ("image", b"\x1a\x45\xdf\xa3"),
    "image as a video": ("video", b"\x89PNG\r\n\x1a\n"),
    "playlist": ("video", b"#EXTM3U\n"),
    "AVI": ("video", b"RIFF\0\0\0\0AVI LIST"),
    "image as audio": ("audio", b"\xff\xd8\xff\xe0"),
    "AIFF": ("audio", b"FORM\0\0\0\0AIFF"),
}


@pytest.mark.parametrize("name", OF_ANOTHER_TYPE)
def test_file_of_another_type_is_unsupported(name):
    modality, data = OF_ANOTHER_TYPE[name]
    with pytest.raises(UnsupportedMediaType):
        sniff(data + bytes(100), modality, MediaConfig())


@pytest.mark.parametrize("modality", INVALID)
@pytest.mark.parametrize("data", [b"not a picture", bytes(100), b"\1\2\3\4" * 20, b"{}"], ids=repr)
def test_bytes_of_unknown_type_are_a_bad_request(modality, data):
    with pytest.raises(INVALID[modality], match="damaged"):
        sniff(data, modality, MediaConfig())


DAMAGED = {
    "JPEG": ("image", b"\xff\xd8\xff"),
    "PNG": ("image", b"\x89PNG\r\n" + bytes(50)),
    "WebP": ("image", b"RIFF\x24\0\0\0WEBX" + bytes(50)),
    "WebM without its type": ("video", b"\x1a\x45\xdf\xa3" + bytes(50)),
    "MP3": ("audio", b"ID3"),
    "WAV": ("audio", b"RIFF\x24\0\0\0WAVX"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_of_an_accepted_type_is_a_bad_request(name):
    modality, data = DAMAGED[name]
    with pytest.raises(INVALID[modality]):
        sniff(data, modality, MediaConfig())
