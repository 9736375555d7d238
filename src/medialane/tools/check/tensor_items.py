"""The items whose tensors are compared: images of several shapes and modes, videos, audio. All are generated."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from PIL import Image

from medialane.testing.sample_audio import sample_audio
from medialane.testing.sample_images import sample_jpeg, sample_pixels
from medialane.testing.sample_video import sample_video
from medialane.tools.check.media import picture
from medialane.types.media import Modality

#: EXIF's number of the tag, and a quarter turn.
_ORIENTATION, _TURNED = 0x0112, 6


def _turned(seed: int, width: int, height: int) -> bytes:
    """Return a JPEG whose EXIF data say that it is to be shown turned, as phones write them."""
    out, exif = io.BytesIO(), Image.Exif()
    exif[_ORIENTATION] = _TURNED
    Image.fromarray(sample_pixels(seed, width, height)).save(out, "JPEG", exif=exif)
    return out.getvalue()


TURNED, TRANSPARENT = "image turned by EXIF", "image with transparency"

#: What a trainer does about an item of which Hugging Face's processor makes other tensors, by the item's name.
ADVICE: Mapping[str, str] = {
    TURNED: "vLLM turns images as their EXIF data say: pass Hugging Face's processor ImageOps.exif_transpose(image)",
    TRANSPARENT: "vLLM lays transparent images over white: flatten them for Hugging Face's processor",
}

#: How each item is made, by modality and name. Shapes include those of the trial at start.
ITEMS: Mapping[Modality, Mapping[str, Callable[[], bytes]]] = {
    "image": {
        "image 512x384": partial(sample_jpeg, 0, 512, 384),
        "image 301x422": partial(sample_jpeg, 1, 301, 422),
        "image 64x64": partial(sample_jpeg, 2, 64, 64),
        "image 57x31": partial(sample_jpeg, 3, 57, 31),
        "image 60x660": partial(sample_jpeg, 4, 60, 660),
        "image 280x700": partial(sample_jpeg, 5, 280, 700),
        "image 1600x1200": partial(sample_jpeg, 6, 1600, 1200),
        TURNED: partial(_turned, 7, 320, 240),
        TRANSPARENT: partial(picture, 8, "RGBA"),
        "image in grey": partial(picture, 9, "L"),
        "image with a palette": partial(picture, 10, "P"),
    },
    "video": {
        "video 24 frames 224x168": partial(sample_video, 0, 24, 224, 168, fps=12),
        "video 7 frames 168x252": partial(sample_video, 1, 7, 168, 252, fps=4),
        "video 4 frames 64x48": partial(sample_video, 2, 4, 64, 48, fps=12),
        "video 150 frames 160x120": partial(sample_video, 3, 150, 160, 120, fps=25),
    },
    "audio": {
        "audio 1.5 s": partial(sample_audio, 440, 1.5),
        "audio 0.4 s": partial(sample_audio, 700, 0.4),
        "audio 34 s": partial(sample_audio, 330, 34),
        "audio 44.1 kHz stereo": partial(sample_audio, 620, 2.3, rate=44100, channels=2),
    },
}


def items_named(words: Collection[str]) -> Iterator[tuple[Modality, str, Callable[[], bytes]]]:
    """Yield modality, name and maker of the items whose names contain one of the words; of all without words."""
    for modality, items in ITEMS.items():
        for name, make in items.items():
            if not words or any(word in name for word in words):
                yield modality, name, make
