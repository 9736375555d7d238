"""Media of the check: parts of messages, the items whose tensors are compared, and how many of them plain vLLM accepts
in a prompt. They are generated: nothing is read from the network.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from medialane.testing.sample_media import sample_audio, sample_jpeg, sample_pdf, sample_pixels, sample_video
from medialane.tools.check.case import Answer, CaseRequest, EndpointKind, Limits, Part
from medialane.types.media import Modality


def text(words: str) -> Part:
    return {"type": "text", "text": words}


@cache
def image(seed: int, width: int = 512, height: int = 384) -> Part:
    """Return a JPEG of this size; different seeds give unrelated pictures."""
    return image_file(sample_jpeg(seed, width, height), "image/jpeg")


@cache
def image_in_mode(seed: int, mode: str, width: int = 320, height: int = 240) -> Part:
    """Return a PNG as `picture` makes it."""
    return image_file(picture(seed, mode, width, height), "image/png")


def picture(seed: int, mode: str, width: int = 320, height: int = 240) -> bytes:
    """Return a PNG with Pillow's `mode`: "RGBA" fades to transparent, "L" is grey, "P" has a palette."""
    made = Image.fromarray(sample_pixels(seed, width, height))
    if mode == "RGBA":
        fade = np.linspace(0, 255, width * height).reshape(height, width).astype(np.uint8)
        made.putalpha(Image.fromarray(fade))
    out = io.BytesIO()
    (made if made.mode == mode else made.convert(mode)).save(out, "PNG")
    return out.getvalue()


def image_file(data: bytes, media_type: str) -> Part:
    return {"type": "image_url", "image_url": {"url": data_url(data, media_type)}}


@cache
def video(seed: int, num_frames: int = 24, width: int = 224, height: int = 168, *, fps: int = 12) -> Part:
    data = sample_video(seed, num_frames, width, height, fps=fps)
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


@cache
def audio(pitch_hz: int, seconds: float = 1.5, **form: Any) -> Part:
    """Return a tone; `form` are sample_audio's options."""
    data = sample_audio(pitch_hz, seconds, **form)
    return {"type": "audio_url", "audio_url": {"url": data_url(data, f"audio/{form.get('container', 'wav').lower()}")}}


def input_audio(pitch_hz: int, seconds: float = 1.5) -> Part:
    """Return a tone in OpenAI's form."""
    data = base64.b64encode(sample_audio(pitch_hz, seconds)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


#: Points of a page, A6, and the resolution at which it is rendered: few tokens for any model.
_PAGE, _DPI, _POINTS_PER_INCH = (298, 420), 96, 72


@cache
def document(seed: int, num_pages: int, **options: Any) -> Part:
    """Return a PDF; `options` are medialane's."""
    pages = [f"Page {number + 1} of document {seed}\nIt has (two) lines." for number in range(num_pages)]
    data = sample_pdf(pages, width=_PAGE[0], height=_PAGE[1])
    return {"type": "file", "file": {"file_data": data_url(data, "application/pdf"), "dpi": _DPI, **options}}


def without_documents(request: CaseRequest) -> CaseRequest:
    """Return a request for plain vLLM, which takes no documents: it is sent the text and the image of each page."""
    return replace(request, body=as_images(request.body))


def as_images(sent: Any) -> Any:
    """Return JSON with the texts and images of their pages in place of documents, which are parts in lists."""
    if isinstance(sent, Mapping):
        return {name: as_images(value) for name, value in sent.items()}
    if not isinstance(sent, list):
        return sent
    return [each for part in sent for each in _without_document(part)]


def _without_document(part: Any) -> Iterator[Any]:
    if isinstance(part, Mapping) and part.get("type") == "file":
        yield from _pages(part["file"])
    else:
        yield as_images(part)


def _pages(file: Mapping[str, Any]) -> Iterator[Part]:
    """Yield what pypdfium2 itself makes of the pages."""
    import pypdfium2

    with pypdfium2.PdfDocument(base64.b64decode(file["file_data"].partition(",")[2])) as opened:
        for number in [int(file["pages"])] if "pages" in file else range(1, len(opened) + 1):
            page = opened[number - 1]
            if file.get("text") != "none":
                with contextlib.closing(page.get_textpage()) as found:
                    yield text(found.get_text_bounded().replace("\r\n", "\n").strip() + "\n")
            out = io.BytesIO()
            page.render(scale=file["dpi"] / _POINTS_PER_INCH, rev_byteorder=True).to_pil().save(out, "PNG")
            yield image_file(out.getvalue(), "image/png")
            page.close()


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


#: One item of each modality, and another one.
ONE: Mapping[str, Callable[[], Part]] = {
    "image": partial(image, 0),
    "video": partial(video, 0),
    "audio": partial(audio, 440),
}
OTHER: Mapping[str, Callable[[], Part]] = {
    "image": partial(image, 1, 301, 422),
    "video": partial(video, 1, 40, 192, 168),
    "audio": partial(audio, 900, 3.1),
}


def small(modality: str) -> Part:
    """Return an item that is small in bytes."""
    return {
        "image": partial(image, 2, 57, 31),
        "video": partial(video, 2, 4, 64, 48),
        "audio": partial(audio, 300, 0.3),
    }[modality]()


def damaged(modality: str) -> Part:
    """Return an item that is cut off after its beginning."""
    part = {"image": partial(image, 3, 200, 150), "video": partial(video, 3, 8), "audio": partial(audio, 350)}[
        modality
    ]()
    key = f"{modality}_url"
    head, _, data = part[key]["url"].partition(",")
    return {"type": key, key: {"url": f"{head},{data[:40]}"}}


#: EXIF's number of the tag, and a quarter turn.
_ORIENTATION, _TURNED = 0x0112, 6


def _turned(seed: int, width: int, height: int) -> bytes:
    """Return a JPEG whose EXIF data say that it is to be shown turned, as phones write them."""
    out, exif = io.BytesIO(), Image.Exif()
    exif[_ORIENTATION] = _TURNED
    Image.fromarray(sample_pixels(seed, width, height)).save(out, "JPEG", exif=exif)
    return out.getvalue()


TURNED, TRANSPARENT = "image turned by EXIF", "image with transparency"

#: What a trainer does about an item for which Hugging Face's processor makes other tensors, by the item's name.
ADVICE: Mapping[str, str] = {
    TURNED: "vLLM turns images as their EXIF data say: pass Hugging Face's processor ImageOps.exif_transpose(image)",
    TRANSPARENT: "vLLM lays transparent images over white: flatten them for Hugging Face's processor",
}

#: How each item is made, by modality and name. Shapes include the ones of the trial at start.
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


#: More than vLLM's default limit for models that have none of their own, 999 (`MultiModalConfig.limit_per_prompt`).
_MANY = 1000
#: Above this, a request with one item more than the limit would be large for nothing.
MAX_REFUSED_ITEMS = 64
#: `MultiModalProcessingInfo.validate_num_items` of vLLM.
_LIMIT = re.compile(r"At most (\d+) (\w+)\(s\) may be provided")

#: The item that a model of each modality is tried with, and the smallest one.
_TRIALS: Mapping[str, tuple[Callable[[], Part], Callable[[], Part]]] = {
    "image": (lambda: image(90, 320, 240), lambda: image(91, 28, 28)),
    "video": (lambda: video(90, 16), lambda: video(91, 2, 32, 32)),
    "audio": (lambda: audio(200, 1), lambda: audio(210, 0.02)),
}
MODALITIES = tuple(_TRIALS)


async def learn_limits(
    post: Callable[[CaseRequest], Awaitable[Answer]], kind: EndpointKind
) -> tuple[Limits, list[str]]:
    """Return the limits, and why modalities are missing."""
    limits, missing = dict[str, int](), list[str]()
    if kind.ask is None:
        return limits, missing
    for modality, (usual, least_of) in _TRIALS.items():
        item, least = await asyncio.to_thread(usual), await asyncio.to_thread(least_of)
        answer = await post(kind.ask([item, text("What is it?")]))
        if not answer.succeeded:  # some models take text or media, not both
            answer = await post(kind.ask([item]))
        if not answer.succeeded:
            missing.append(f"no {modality}: plain vLLM answers {answer.status}: {answer.error}")
            continue
        answer = await post(kind.ask([*[least] * _MANY, text("What are they?")]))
        limit = _LIMIT.search(answer.error)
        limits[modality] = int(limit[1]) if limit else _MANY
    return limits, missing
