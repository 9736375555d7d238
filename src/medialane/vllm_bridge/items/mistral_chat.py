"""Chats of models with a Mistral tokenizer, tokenized without their media.

Theory of operation. mistral_common tokenizes a chat together with its media: it fetches and decodes each item, since it
writes the item's placeholder tokens itself, whose number depends on the item's size. In the gateway that would bypass
the URL guard, the cache and the preparers. So it gets a *blank* for each item: the smallest image or clip, made here.
A blank's placeholder, the *mark*, is replaced by the client's item's where the prompt is expanded: in the
gateway, or in stages `decoded` and `url` in the worker. Chats of these models are thus tokenized before their media are
prepared, like other models' items.

mistral_common keeps the order of a chat's items (`tests/contract/test_mistral_chat.py`), so marks need no number.
"""

from __future__ import annotations

import base64
import copy
import io
import logging
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, cast

import numpy as np
from PIL import Image as PILImage
from vllm.multimodal.processing.processor import BaseMultiModalProcessor
from vllm.renderers import BaseRenderer

from medialane.types.feature import Feature
from medialane.types.media import AudioSamples, Decoded, Image, Modality
from medialane.vllm_bridge.items.header_values import PlaceholderLayouts
from medialane.vllm_bridge.items.preparation import VllmProcessor
from medialane.vllm_bridge.seams.multimodal import (
    accepted_modalities,
    expand_before_updates,
    expands_before_updates,
    find_placeholders,
    is_mistral,
)

logger = logging.getLogger(__name__)

_SAMPLE_RATE = 16000

#: Blanks as a preparer decodes them.
_SMALLEST: Mapping[Modality, Decoded] = {
    "image": Image(np.zeros((1, 1, 3), np.uint8)),
    "audio": AudioSamples(np.zeros(1, np.float32), _SAMPLE_RATE),
}

#: The parts that mistral_common opens, in the API of chat completions.
_MEDIA_PARTS: Mapping[str, Modality] = {"image_url": "image", "input_audio": "audio", "audio_url": "audio"}

_TEXT_PARTS = frozenset(("text", "thinking"))

#: By modality, then by item, the updates; one of them applies.
Updates = Mapping[str, Sequence[Sequence[Any]]]


def tokenizes_blanks(renderer: BaseRenderer) -> bool:
    """Return whether chats of this renderer are tokenized with blanks for their media."""
    return renderer.mm_processor is not None and is_mistral(renderer.tokenizer)


def tokenize_without_media(renderer: BaseRenderer) -> None:
    """Make the renderer tokenize chats with blanks for media, if its tokenizer is Mistral's.

    Also for a model that takes no media: the tokenizer opens some that vLLM regards as text.
    """
    if not is_mistral(renderer.tokenizer):
        return
    own = copy.copy(renderer.tokenizer)  # vLLM caches the tokenizer for the whole process
    apply = own.apply_chat_template

    def applied(messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return apply(with_blanks(messages), *args, **kwargs)

    own.apply_chat_template = applied
    renderer.tokenizer = own


def expand_marks(processor: BaseMultiModalProcessor) -> None:
    """Make the processor of a model with a Mistral tokenizer accept prompts with marks instead of placeholders. Does
    nothing the second time."""
    tokenizer = processor.info.ctx.tokenizer
    if not is_mistral(tokenizer) or expands_before_updates(processor):
        return
    by_modality = {m: _mark(processor, tokenizer, m) for m in _SMALLEST if m in accepted_modalities(processor)}
    marks = {modality: mark for modality, mark in by_modality.items() if mark}
    if marks:
        expand_before_updates(processor, partial(_expanded, processor, marks))
    if missing := sorted(by_modality.keys() - marks):
        logger.warning("the placeholders of %s in this model's chats are not known: they are left as they are", missing)


def _expanded(
    processor: BaseMultiModalProcessor, marks: Mapping[Any, list[int]], token_ids: list[int], updates: Updates
) -> list[int]:
    """Return the prompt with the placeholders of its items instead of `marks`, the blanks' by modality;
    unchanged if it has them already.

    Raises ValueError if the prompt has not as many marks as items.
    """
    expanded_already = find_placeholders(processor, token_ids, updates)
    if all(len(expanded_already.get(modality, ())) == len(items) for modality, items in updates.items()):
        return token_ids
    wanted = {modality: items for modality, items in updates.items() if modality in marks}
    places = {modality: list(_places(token_ids, marks[modality])) for modality in wanted}
    for modality, items in wanted.items():
        if len(places[modality]) != len(items):
            raise ValueError(f"the prompt has {len(places[modality])} placeholders for {len(items)} {modality} items")
    contents = {modality: iter([item[0].content.full for item in items]) for modality, items in wanted.items()}
    expanded: list[int] = []
    done = 0
    for place, modality in sorted((place, modality) for modality, starts in places.items() for place in starts):
        expanded += token_ids[done:place]
        expanded += next(contents[modality])
        done = place + len(marks[modality])
    return expanded + token_ids[done:]


def with_blanks(messages: Sequence[Any]) -> list[Any]:
    """Return the messages of a chat without anything that mistral_common could open but our blanks."""
    return [_message(message) for message in messages]


def _message(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if not isinstance(kind, str):
        return {"type": None}  # ignored, as with its content
    if kind in _TEXT_PARTS:
        return part
    modality = _MEDIA_PARTS.get(kind)
    return {"type": kind} if modality is None else blank_part(modality)  # what is not known is refused by its type


def chat_of_blanks(tokenizer: Any, modality: Modality, count: int) -> list[int]:
    """Return the prompt of a chat of that many blanks; empty if the tokenizer is not Mistral's."""
    if not is_mistral(tokenizer):
        return []
    return list(tokenizer.apply_chat_template([{"role": "user", "content": [blank_part(modality)] * count}]))


@cache
def blank_part(modality: Modality) -> dict[str, Any]:
    """Return the part of a chat that is the smallest item of this modality."""
    data = io.BytesIO()
    smallest = _SMALLEST[modality]
    if isinstance(smallest, Image):
        PILImage.fromarray(smallest.pixels).save(data, "PNG")
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(data)}"}}
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, _SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes(cast("AudioSamples", smallest).samples.astype(np.int16).tobytes())
    return {"type": "input_audio", "input_audio": {"data": _base64(data), "format": "wav"}}


def _base64(data: io.BytesIO) -> str:
    return base64.b64encode(data.getvalue()).decode()


def _mark(processor: BaseMultiModalProcessor, tokenizer: Any, modality: Modality) -> list[int]:
    """Return the placeholder of a blank, by the model's processor; empty if the tokenizer writes another."""
    made = VllmProcessor(processor).process(_SMALLEST[modality], b"{}")
    feature = Feature(modality, "", made.header, (), made.size)
    mark = list(PlaceholderLayouts(processor).find([feature], b"{}").updates[modality][0][0].content.full)
    prompt = chat_of_blanks(tokenizer, modality, 1)
    return mark if len(list(_places(prompt, mark))) == 1 else []


def _places(token_ids: list[int], mark: list[int]) -> Iterator[int]:
    """Yield where the mark stands in the prompt."""
    start = 0
    with suppress(ValueError):  # there is no more of its first token
        while True:
            place = token_ids.index(mark[0], start)
            is_mark = token_ids[place : place + len(mark)] == mark
            if is_mark:
                yield place
            start = place + (len(mark) if is_mark else 1)
