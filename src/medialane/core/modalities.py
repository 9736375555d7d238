"""The table of modalities: everything that distinguishes one from another, but for the code that decodes it.

A new modality needs a name in `core.media.Modality` with the class of its decoded form; a row here, its members in
`gateway.intake.request_body`; its limits as settings (`max_NAME_bytes` and `NAME_fetch_timeout_s` in `media.config`,
`NAME_timeout_s` in `prepare.config`); its decoder with a row in `media.decoders`; and what vLLM's processor has to be
tried with and given. `tests/unit/core/test_core_modalities.py` lists the files, and fails for any other that names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from medialane.core.errors import InvalidAudio, InvalidImage, InvalidRequest, InvalidVideo
from medialane.core.media import Modality

#: What the member of a content part contains: a URL or an object with one; an object with base64 and its format;
#: embeddings instead of media.
PartContent = Literal["url", "base64", "embeds"]


class ModalityTraits(NamedTuple):
    """One row.

    `parts` are the members of content parts with such an item, `url_list` is the member of a body that is a list of
    URLs of such items. `invalid` is the error for damaged items. Options of an item may choose its pixels with
    `has_pixels`, its frames with `has_frames` (`gateway.intake.item_options`).
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
