"""Learns from plain vLLM which media a model accepts, and how many of them in a prompt."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping

from medialane.tools.check import media
from medialane.tools.check.case import Answer, EndpointKind, Limits, Part, Request

#: More than vLLM's default limit for models that have none of their own, 999 (`MultiModalConfig.limit_per_prompt`).
_MANY = 1000
#: Above this, a request with one item more than the limit would be large for nothing.
MAX_REFUSED_ITEMS = 64
#: `MultiModalProcessingInfo.validate_num_items` of vLLM.
_LIMIT = re.compile(r"At most (\d+) (\w+)\(s\) may be provided")

#: The item that a model of each modality is tried with, and the smallest one.
_TRIALS: Mapping[str, tuple[Callable[[], Part], Callable[[], Part]]] = {
    "image": (lambda: media.image(90, 320, 240), lambda: media.image(91, 28, 28)),
    "video": (lambda: media.video(90, 16), lambda: media.video(91, 2, 32, 32)),
    "audio": (lambda: media.audio(200, 1), lambda: media.audio(210, 0.02)),
}
MODALITIES = tuple(_TRIALS)


async def learn_limits(post: Callable[[Request], Awaitable[Answer]], kind: EndpointKind) -> tuple[Limits, list[str]]:
    """Return the limits, and why modalities are missing."""
    limits, missing = dict[str, int](), list[str]()
    if kind.ask is None:
        return limits, missing
    for modality, (usual, small) in _TRIALS.items():
        item, least = await asyncio.to_thread(usual), await asyncio.to_thread(small)
        answer = await post(kind.ask([item, media.text("What is it?")]))
        if not answer.succeeded:  # some models take text or media, not both
            answer = await post(kind.ask([item]))
        if not answer.succeeded:
            missing.append(f"no {modality}: plain vLLM answers {answer.status}: {answer.error}")
            continue
        answer = await post(kind.ask([*[least] * _MANY, media.text("What are they?")]))
        limit = _LIMIT.search(answer.error)
        limits[modality] = int(limit[1]) if limit else _MANY
    return limits, missing
