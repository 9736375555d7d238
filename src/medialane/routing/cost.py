"""The cost of a request at a worker: expected milliseconds until its first token; what requests evict
(`PrefixEvictions`); and the cost of encoding a new item at an encoder or at the worker.

Some parts depend on the worker alone (its queue, its sequences, its KV cache): `SlotTable` keeps their sum. The others
are the cost of the request at a worker that has none of it cached, minus the savings by each worker's caches:
`policies.py` computes them for all slots, with the rates defined here.

Where prompts can be computed by other workers, a request has the cost of reading its KV blocks instead of prefill and
encoder at the worker that generates (`CostModel.transferred`); what is best is decided once that is chosen
(`CostModel.prefers_split`).

`choose_encoder` sees queues only, as a gateway knows them. The gateway calls it for each item without embedding
(`--encode-at auto`), before the request is routed, and the simulation of `medialane bench encode_sim` calls it, too.

An encoder costs the item the wait for the encoder's queue, the encoding, and the load of the result at the worker. A
worker encodes within a step: that costs the item the encoding only, but delays each sequence that runs or waits there
by as much. Both costs are weighted sums over all requests that are delayed, in milliseconds.

    costs = EncodeCosts.of(config.routing)
    number = choose_encoder(item, encoders, router.mean_sequences, costs)
    if number is None:
        ...  # send pixels: the worker encodes
    else:
        ...  # send the item to encoder `number`, and count `costs.encode_ms(item)` in its queue until it has answered
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Self

import msgspec

from medialane.routing.config import RoutingConfig
from medialane.routing.slots import RoutingRequest, Slot
from medialane.types.feature import MediaSpan
from medialane.types.request import CostParts

_MIB: Final = 1 << 20
#: Embeddings of an item whose count is not known yet: about as many as of an image of 1024x768.
_UNKNOWN_EMBEDS: Final = 1024
#: Weight of a ms by which a sequence at the worker is delayed, relative to a ms until the item is encoded. In traces of
#: `medialane bench encode_sim`, items wait too long for busy encoders if it is larger, and sequences are delayed while
#: encoders are idle if it is smaller; from 0.2 to 0.3 there is little difference.
_DELAY_WEIGHT: Final = 0.25
#: Most sequences that count as delayed by a prompt. The workers that prefill are the bottleneck under load: their queue
#: grows until as much is computed elsewhere as they cannot, whatever the weight; a larger one only makes it longer. At
#: 70 % load in `medialane bench pd`: 36 at most, p99 of the time between tokens 0.58 and of that to the first 4.0 times
#: those without split; without a limit 0.43 and 7.6; 24 at most 0.65 and 3.6.
_MAX_DELAYED: Final = 36
#: Of `PrefixEvictions`: shared prefixes, and the many more that belong to one prompt each.
_MAX_PREFIXES: Final = 4096


class EncoderItem(msgspec.Struct, frozen=True):
    """A distinct item of a prompt. It is neither encoded nor loaded if the first `end` tokens are cached. With
    `embedding_bytes`, its embeddings are in the arena of the gateway's host: workers load them."""

    mm_hash: str
    num_embeds: int
    end: int
    embedding_bytes: int = 0


def encoder_items(media: Sequence[MediaSpan]) -> tuple[EncoderItem, ...]:
    """Return the distinct items, in the order in which a growing prefix covers them.

    vLLM encodes an item once, however often a prompt contains it, and not at all if all of its tokens are cached. A
    span without length is an item at an unknown position behind the known part of the prompt: no known prefix covers
    it.
    """
    if not media:
        return ()
    if len(media) == 1:
        return (_item(media[0]),)
    items: dict[str, EncoderItem] = {}
    for span in media:
        item = _item(span)
        known = items.get(item.mm_hash)
        if known is None or known.end < item.end:
            items[item.mm_hash] = item
    return tuple(sorted(items.values(), key=attrgetter("end")))


def _item(span: MediaSpan) -> EncoderItem:
    end = span.offset + (span.length or 1)
    num_embeds = span.num_embeds or span.length or _UNKNOWN_EMBEDS
    return EncoderItem(span.mm_hash, num_embeds, end, span.embedding_bytes)


class ScoringInput(msgspec.Struct, frozen=True, eq=False):
    """A request and its candidates: the input of a policy. `holders` are the slots that have each item in their encoder
    cache, `candidates` the slots that may be selected, as bit masks."""

    request: RoutingRequest
    items: tuple[EncoderItem, ...]
    holders: tuple[int, ...]
    candidates: int
    session_slot: int | None


class Rates(NamedTuple):
    """Rates of a slot's score besides its initial score, in its unit: per request, per token that is not cached, per
    evicted token that would have been used again, per byte handed over; on another host additionally per hand-over and
    per byte; a bonus for the session's last slot; per embedding of an item that a slot has in neither cache, or per
    byte of embeddings in the arena. With a temperature a slot is sampled with weight exp(-score / temperature)."""

    request: float = 0.0
    token: float = 0.0
    evicted: float = 0.0
    byte: float = 0.0
    remote: float = 0.0
    remote_byte: float = 0.0
    session: float = 0.0
    temperature: float = 0.0
    embed: float = 0.0
    embedding_byte: float = 0.0

    def item(self, item: EncoderItem) -> float:
        """Return the cost of an item at a slot that has it in neither cache."""
        if item.embedding_bytes:
            return item.embedding_bytes * self.embedding_byte
        return item.num_embeds * self.embed


class SlotCost(NamedTuple):
    """The cost of a request at one slot, and the part of the prompt that is cached there."""

    cached_tokens: int
    needed: list[EncoderItem]
    num_to_encode: int
    num_to_load: int
    parts: CostParts

    @property
    def work_ms(self) -> float:
        """The engine's time."""
        return self.parts.prefill + self.parts.encoder + self.parts.load


class CostModel:
    """Expected milliseconds: the rates by which all slots are compared, and the breakdown for one slot."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        weight = 1 + config.contention_weight
        self.rates = Rates(
            request=config.request_ms * weight,
            token=config.prefill_ms_per_token * weight,
            evicted=config.prefill_ms_per_token * weight,
            byte=config.local_ms_per_mib / _MIB,
            remote=config.remote_ms,
            remote_byte=(config.remote_ms_per_mib - config.local_ms_per_mib) / _MIB,
            session=config.session_ms,
            temperature=config.temperature_ms,
            embed=config.encoder_ms_per_token * weight,
            embedding_byte=config.load_ms_per_mib / _MIB * weight,
        )
        #: Of a request whose prompt another worker computes: what is evicted can be transferred again, too.
        token = config.transfer_ms_per_token
        self.transferred = self.rates._replace(token=token, evicted=token, embed=0.0, embedding_byte=0.0)

    def rates_of(self, request: RoutingRequest) -> Rates:
        return self.transferred if request.is_transferred else self.rates

    def prefers_split(
        self, whole: SlotCost, slot: Slot, prefill: SlotCost, prefill_slot: Slot, *, num_transferred: int
    ) -> bool:
        """Return whether a prompt is best computed at another slot, behind its queue, and these tokens transferred to
        `slot`, which generates: there it would wait for others, too, and delay the tokens of the sequences that run, as
        encoding does. Those that wait for their own prompts are not delayed: a queue is no reason for its growth."""
        transfer_ms = self._config.request_ms + num_transferred * self._config.transfer_ms_per_token
        num_delayed = min(slot.num_running, _MAX_DELAYED)
        whole_ms = slot.parts[0] + whole.work_ms * (1 + _DELAY_WEIGHT * num_delayed)
        return prefill_slot.parts[0] + prefill.work_ms + transfer_ms <= whole_ms

    def terms(
        self, scoring_input: ScoringInput, slot: Slot, cached_tokens: int, *, eviction_ms: float = 0.0
    ) -> SlotCost:
        """Return the cost breakdown of one slot, which has the first `cached_tokens` of the prompt."""
        config, request = self._config, scoring_input.request
        queue, running, kv_pressure = slot.parts
        needed, num_embeds, num_to_encode, load_bytes, num_to_load = [], 0, 0, 0, 0
        for item, holders in zip(scoring_input.items, scoring_input.holders, strict=True):
            if item.end > cached_tokens and not request.is_transferred:
                needed.append(item)
                if holders >> slot.number & 1:
                    continue
                if item.embedding_bytes:
                    load_bytes += item.embedding_bytes
                    num_to_load += 1
                else:
                    num_embeds += item.num_embeds
                    num_to_encode += 1
        computed_tokens = request.num_tokens - cached_tokens
        token_ms = config.transfer_ms_per_token if request.is_transferred else config.prefill_ms_per_token
        prefill = config.request_ms + computed_tokens * token_ms
        encoder = num_embeds * config.encoder_ms_per_token
        load = load_bytes / _MIB * config.load_ms_per_mib
        handover = request.handover_bytes / _MIB * config.local_ms_per_mib
        if not slot.same_host and request.handover_bytes:
            handover += self.rates.remote + request.handover_bytes * self.rates.remote_byte
        parts = CostParts(
            prefill=prefill,
            encoder=encoder,
            load=load,
            queue=queue,
            running=running,
            kv_pressure=kv_pressure,
            handover=handover,
            contention=(prefill + encoder + load) * config.contention_weight,
            eviction=eviction_ms,
            session=-config.session_ms if scoring_input.session_slot == slot.number else 0.0,
        )
        return SlotCost(cached_tokens, needed, num_to_encode, num_to_load, parts)


class PrefixEvictions:
    """By prefix, what requests have evicted (ms) because only some workers have it, beyond what they would have evicted
    at others. It is added to the cost of these workers: once it is as much as the cost of computing the prefix, the
    next request is sent elsewhere, and the prefix has one copy more. So either costs at most what the other does.

    A prefix is identified by its last block. One that belongs to a single prompt grows with each turn, so it is another
    one each time. `token_ms` is the cost of computing a token."""

    def __init__(self, token_ms: float) -> None:
        self._token_ms = token_ms
        self._evicted_ms: OrderedDict[int, float] = OrderedDict()

    def evicted_ms(self, request: RoutingRequest, num_tokens: int) -> float:
        """Return the sum for the request's first `num_tokens`, at most the cost of computing them."""
        block = _last_block(request, num_tokens)
        return self._evicted_ms.get(block, 0.0) if block is not None else 0.0

    def add(self, request: RoutingRequest, num_tokens: int, evicted_ms: float) -> float:
        """Add what a request has evicted because of its first `num_tokens`; return the sum before."""
        block = _last_block(request, num_tokens)
        if block is None or evicted_ms <= 0:
            return self.evicted_ms(request, num_tokens)
        before_ms = self._evicted_ms.pop(block, 0.0)
        self._evicted_ms[block] = min(before_ms + evicted_ms, num_tokens * self._token_ms)
        if len(self._evicted_ms) > _MAX_PREFIXES:
            self._evicted_ms.popitem(last=False)
        return before_ms

    def copied(self, request: RoutingRequest, num_tokens: int) -> None:
        """Begin anew: the request's first `num_tokens` are computed by one worker more."""
        block = _last_block(request, num_tokens)
        if block is not None:
            self._evicted_ms.pop(block, None)


def _last_block(request: RoutingRequest, num_tokens: int) -> int | None:
    """Return the id of the last full block of the first tokens, by the first block size; None if there is none."""
    size, ids = next(iter(request.block_ids.items()))
    return ids.item(num_tokens // size - 1) if size <= num_tokens <= len(ids) * size else None


# Where a new item is encoded


class NewItem(NamedTuple):
    """An item without embedding: the number of its embeddings, and their size (0: not known)."""

    num_embeds: int
    embedding_bytes: int = 0


class EncodeCosts(NamedTuple):
    """Rates, in milliseconds: `request_ms` is the cost of an encode request besides its embeddings."""

    embed_ms: float
    request_ms: float
    load_ms_per_mib: float

    @classmethod
    def of(cls, config: RoutingConfig) -> Self:
        return cls(config.encoder_ms_per_token, config.request_ms, config.load_ms_per_mib)

    def encode_ms(self, item: NewItem) -> float:
        return item.num_embeds * self.embed_ms

    def encoder_ms(self, item: NewItem, queue_ms: float) -> float:
        """Return the cost of an item at an encoder where work of `queue_ms` waits: `encode_ms` of each item that was
        sent there and is not encoded."""
        load_ms = item.embedding_bytes / _MIB * self.load_ms_per_mib
        return self.request_ms + queue_ms + self.encode_ms(item) + load_ms

    def worker_ms(self, item: NewItem, num_sequences: float) -> float:
        """Return the cost of an item at a worker, including the sequences that it delays there."""
        return self.encode_ms(item) * (1 + _DELAY_WEIGHT * num_sequences)


def choose_encoder(item: NewItem, queues_ms: Sequence[float], num_sequences: float, costs: EncodeCosts) -> int | None:
    """Return the number of the encoder that encodes the item at the lowest cost, by their queues, or None: the worker
    encodes it.

    `num_sequences` are those at the worker, running or waiting, of all gateways; since the worker is chosen after that,
    the mean over all of them (`Router.mean_sequences`).
    """
    number = least_loaded(queues_ms)
    if number is None or costs.encoder_ms(item, queues_ms[number]) > costs.worker_ms(item, num_sequences):
        return None
    return number


def least_loaded(queues_ms: Sequence[float]) -> int | None:
    """Return the number of the encoder with the shortest queue, whatever the worker costs; None if there is none."""
    return min(range(len(queues_ms)), key=queues_ms.__getitem__, default=None)
