"""What a request costs a worker: expected milliseconds until its first token.

Some parts depend on the worker alone (its queue, its sequences, its KV cache): `SlotTable` keeps their sum. The others
are worked out here for all slots at once: what the request costs a worker that knows nothing of it, less what each one
holds of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from medialane.core.media_span import MediaSpan
from medialane.core.request import CostParts
from medialane.routing.config import RoutingConfig
from medialane.routing.prefix_match import Prefixes
from medialane.routing.request import RoutingRequest
from medialane.routing.slots import Scores, Slot, SlotTable

_MIB: Final = 1 << 20
#: Embeddings of an item of which nobody knows yet how many it has: those of a picture of 1024x768, about.
_UNKNOWN_EMBEDS: Final = 1024
#: So few slots of a mask are visited one by one (0.7 us each); for more, numpy is faster (5 us for a thousand).
_FEW: Final = 8
#: So few items are compared with the prefixes one by one (3 us each); more are looked up at once (20 us).
_FEW_ITEMS: Final = 4


class EncoderItem(NamedTuple):
    """A distinct item of a prompt. It need not be encoded where the first `num_blocks` blocks are cached."""

    mm_hash: str
    num_embeds: int
    num_blocks: int


def encoder_items(media: Sequence[MediaSpan], block_size: int) -> tuple[EncoderItem, ...]:
    """The distinct items, in the order in which a growing prefix covers them.

    vLLM encodes an item once however often a prompt has it, and not at all if no token of it has to be computed.
    A span without length stands for an item somewhere behind what is known of the prompt: no known prefix covers it.
    """
    if not media:
        return ()
    found: dict[str, EncoderItem] = {}
    for span in media:
        num_blocks = -(-max(span.end, span.offset + 1) // block_size)
        known = found.get(span.mm_hash)
        if known is None or known.num_blocks < num_blocks:
            found[span.mm_hash] = EncoderItem(span.mm_hash, _num_embeds(span), num_blocks)
    return tuple(sorted(found.values(), key=lambda item: item.num_blocks))


def _num_embeds(span: MediaSpan) -> int:
    return span.num_embeds or span.length or _UNKNOWN_EMBEDS


class Offer(NamedTuple):
    """A request and who may take it: what a policy chooses by. `prefixes` are in blocks by slot, and as long as the
    highest candidate needs, `longest` is the greatest of them; `told` are those that workers told of. `holders` are the
    slots that have each item in their encoder cache."""

    request: RoutingRequest
    items: tuple[EncoderItem, ...]
    holders: tuple[int, ...]
    candidates: int
    prefixes: Prefixes
    longest: int
    told: Prefixes
    session_slot: int | None


class Terms(NamedTuple):
    """An offer as one slot sees it: what its engine has of the prompt, and what choosing it costs."""

    cached_blocks: int
    needed: list[EncoderItem]
    num_to_encode: int
    parts: CostParts


class CostModel:
    """Expected milliseconds, of one slot by parts or of all slots as an array."""

    def __init__(self, config: RoutingConfig, slots: SlotTable) -> None:
        self._config = config
        self._slots = slots
        self._work_weight = 1 + config.others_weight

    def costs(self, offer: Offer, out: Scores) -> None:
        """Write the cost of the slots that `offer.prefixes` has to `out`. Those that take no requests are infinite,
        whether the others are candidates does not matter."""
        config, request = self._config, offer.request
        work = config.request_ms + request.num_tokens * config.prefill_ms_per_token
        work += sum(item.num_embeds for item in offer.items) * config.encoder_ms_per_token
        alone = work * self._work_weight + request.handover_bytes / _MIB * config.local_ms_per_mib
        np.add(self._slots.standing_ms[: len(out)], alone, out=out)
        if offer.longest:
            out -= offer.prefixes * (request.block_size * config.prefill_ms_per_token * self._work_weight)
        if offer.items:
            self._take_off_items(offer, out)
        if request.handover_bytes and self._slots.num_remote:
            out += self._slots.is_remote[: len(out)] * self._remote_extra_ms(request.handover_bytes)
        if offer.session_slot is not None:
            out[offer.session_slot] -= config.session_ms

    def terms(self, offer: Offer, slot: Slot) -> Terms:
        """The same for one slot, told apart."""
        config, request, slots = self._config, offer.request, self._slots
        cached_blocks = offer.prefixes.item(slot.number)
        needed, num_embeds, num_to_encode = [], 0, 0
        for item, holders in zip(offer.items, offer.holders, strict=True):
            if item.num_blocks > cached_blocks:
                needed.append(item)
                if not holders >> slot.number & 1:
                    num_embeds += item.num_embeds
                    num_to_encode += 1
        computed_tokens = request.num_tokens - cached_blocks * request.block_size
        prefill = config.request_ms + computed_tokens * config.prefill_ms_per_token
        encoder = num_embeds * config.encoder_ms_per_token
        handover = request.handover_bytes / _MIB * config.local_ms_per_mib
        if not slot.same_host and request.handover_bytes:
            handover += self._remote_extra_ms(request.handover_bytes)
        parts = CostParts(
            prefill=prefill,
            encoder=encoder,
            queue=slots.queue_ms(slot),
            running=slots.running_ms(slot),
            kv_pressure=slots.kv_pressure_ms(slot.load),
            handover=handover,
            others=(prefill + encoder) * config.others_weight,
            session=-config.session_ms if offer.session_slot == slot.number else 0.0,
        )
        return Terms(cached_blocks, needed, num_to_encode, parts)

    def _take_off_items(self, offer: Offer, out: Scores) -> None:
        """No encoder run for an item that the prefix covers, nor for one in the encoder cache."""
        per_token = self._config.encoder_ms_per_token * self._work_weight
        covered = [item for item in offer.items if item.num_blocks <= offer.longest]
        if len(covered) <= _FEW_ITEMS:
            for item in covered:
                out -= (offer.prefixes >= item.num_blocks) * (item.num_embeds * per_token)
        else:
            covers = np.array([item.num_blocks for item in covered])
            saved = np.array(list(accumulate((item.num_embeds * per_token for item in covered), initial=0.0)))
            out -= saved[covers.searchsorted(offer.prefixes, side="right")]
        for item, holders in zip(offer.items, offer.holders, strict=True):
            asked = holders & offer.candidates
            if asked:
                _take_off(out, asked, item.num_embeds * per_token, offer.prefixes, item.num_blocks)

    def _remote_extra_ms(self, nbytes: int) -> float:
        config = self._config
        return config.remote_ms + nbytes / _MIB * (config.remote_ms_per_mib - config.local_ms_per_mib)


def _take_off(out: Scores, holders: int, saved_ms: float, prefixes: Prefixes, num_blocks: int) -> None:
    """Take `saved_ms` off the holders whose prefix is shorter than `num_blocks`."""
    if holders.bit_count() <= _FEW:
        for number in numbers(holders):
            if prefixes[number] < num_blocks:
                out[number] -= saved_ms
    else:
        out -= (flags(holders, len(out)) & (prefixes < num_blocks)) * saved_ms


def numbers(mask: int) -> Iterator[int]:
    """The slots of a bit mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def flags(mask: int, length: int) -> npt.NDArray[np.bool_]:
    """A bit mask as an array: whether each of `length` slots is in it."""
    packed = np.frombuffer(mask.to_bytes((length + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=length, bitorder="little").view(np.bool_)
