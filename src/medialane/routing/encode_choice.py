"""The choice of where a new item is encoded: by an encoder, or by the worker that gets the request.

Pure: it sees queues only, as a gateway knows them. The gateway calls it for each item without embedding
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

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from medialane.routing.config import RoutingConfig

_MIB: Final = 1 << 20
#: Weight of a ms by which a sequence at the worker is delayed, relative to a ms until the item is encoded. In traces of
#: `medialane bench encode_sim`, items wait too long for busy encoders if it is larger, and sequences are delayed while
#: encoders are idle if it is smaller; from 0.2 to 0.3 there is little difference.
_DELAY_WEIGHT: Final = 0.25


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

    `num_sequences` counts all gateways' sequences at the worker, running or waiting; since the worker is chosen after
    that, the mean over all of them (`Router.mean_sequences`).
    """
    number = least_loaded(queues_ms)
    if number is None or costs.encoder_ms(item, queues_ms[number]) > costs.worker_ms(item, num_sequences):
        return None
    return number


def least_loaded(queues_ms: Sequence[float]) -> int | None:
    """Return the number of the encoder with the shortest queue, whatever the worker costs; None if there is none."""
    return min(range(len(queues_ms)), key=queues_ms.__getitem__, default=None)
