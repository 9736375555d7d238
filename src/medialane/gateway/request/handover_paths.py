"""Hand-over paths to workers: a stage (`types.media.Stage`: what is sent of the media) and a transport (how); and the
prompt in the form that a path sends.

A transport has two ends: the gateway's is an object of this file, which says what the transport needs, what it carries
and when it is tried; the worker's is in `worker.media`.

* `shm`, same host: descriptors are sent, both ends map the arena, no byte is copied.
* `pull`, another host: descriptors are sent, the store of the worker's host copies the entries by `tcp` or `nixl`.
* `inline`, any host, small tensors: the bytes are sent with the request message, copied once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec.structs import replace

from medialane.gateway.config import TransportChoice
from medialane.observability.timeline import RequestTimeline
from medialane.types.errors import HandoverFailed, StoreUnavailable
from medialane.types.feature import MediaPayload, MoverChoice, PlacedFeature, PreparedPrompt, StagedItem
from medialane.types.media import BEST_STAGE, STAGES, Stage, StageChoice, StageName
from medialane.types.request import ExpandedPrompt, Prompt, UnexpandedPrompt
from medialane.types.tensor import ArenaRange, InlineTensor, TensorDescriptor

if TYPE_CHECKING:
    from medialane.gateway.workers.link import WorkerLink
    from medialane.store import HoldPasser, StoreGrants


class Transport(ABC):
    """The gateway's end. With --transport auto all are allowed, otherwise transports that have the value in
    `choices`."""

    #: In metrics, logs and reports.
    name: ClassVar[str]
    choices: ClassVar[Collection[str]]
    #: Whether it can send embeddings; otherwise items are sent with their tensors.
    carries_embeddings: ClassVar[bool] = True
    #: Whether the store of the worker's host takes part: that takes a round trip, and may be impossible.
    needs_remote_store: ClassVar[bool] = False

    @abstractmethod
    def reaches(self, worker: WorkerLink) -> bool:
        """Return whether entries of our arena can be sent to this worker."""

    async def publish(self, payloads: Sequence[MediaPayload], _timeline: RequestTimeline) -> Sequence[MediaPayload]:
        """Return the payloads, which have descriptors of our arena, in the form that is sent.

        The caller holds the entries until the worker holds them, or has the bytes. Raises HandoverFailed.
        """
        return payloads

    def pass_holds(self, _prompt: Prompt, _worker: WorkerLink, _request_id: str) -> bool:
        """Pass holds on what the prompt refers to, to the worker that is about to get it. Return whether it is to wait
        for them."""
        return False


class ShmTransport(Transport):
    """The store passes the gateway's holds to the worker, and with them the embeddings of new items if that keeps
    them."""

    name = "shm"
    choices = ("shm", "tcp", "nixl")  # workers of this host need no mover

    def __init__(self, holds: HoldPasser) -> None:
        self._holds = holds

    def reaches(self, worker: WorkerLink) -> bool:
        return worker.same_host

    def pass_holds(self, prompt: Prompt, worker: WorkerLink, request_id: str) -> bool:
        if not (ranges := _entries(prompt.media)):
            return False
        new = {payload.mm_hash: payload for payload in prompt.media if payload.embedding is None}
        card = worker.encoder_card
        wanted = [one for payload in new.values() if card is not None and (one := card.wanted(payload)) is not None]
        return self._holds.pass_on(ranges, to=worker.store_client, request_id=request_id, wanted=wanted)


class PullTransport(Transport):
    """With each entry goes the right to copy it (`types.feature.RemoteEntry`). `mover` is the operator's choice."""

    name = "pull"
    choices = ("tcp", "nixl")
    needs_remote_store = True

    def __init__(self, grants: StoreGrants, mover: MoverChoice = "auto") -> None:
        self._grants = grants
        self._mover = mover

    def reaches(self, worker: WorkerLink) -> bool:
        return worker.can_pull and not worker.same_host

    async def publish(self, payloads: Sequence[MediaPayload], _timeline: RequestTimeline) -> Sequence[MediaPayload]:
        try:
            granted = await self._grants.grant(_entries(payloads))
        except StoreUnavailable as error:
            raise HandoverFailed(error.message) from error
        remote = {entry.range: replace(entry, mover=self._mover) for entry in granted}
        return [replace(each, remote=remote[each.entry]) if each.entry is not None else each for each in payloads]


class InlineTransport(Transport):
    """`read` returns the bytes of a descriptor, whose arena this process maps; `max_bytes` is their limit in one
    message."""

    name = "inline"
    choices = ("inline",)
    carries_embeddings = False

    def __init__(self, read: Callable[[TensorDescriptor], memoryview], max_bytes: int) -> None:
        self._read = read
        self._max_bytes = max_bytes

    def reaches(self, _worker: WorkerLink) -> bool:
        return True

    async def publish(self, payloads: Sequence[MediaPayload], timeline: RequestTimeline) -> Sequence[MediaPayload]:
        if any(payload.embedding is not None for payload in payloads):
            raise HandoverFailed("embeddings are not sent in messages")
        total = sum(tensor.spec.nbytes for payload in payloads for tensor in payload.tensors)
        if total > self._max_bytes:
            raise HandoverFailed(f"{total} bytes of media exceed the limit of {self._max_bytes} bytes in a message")
        timeline.copied_bytes += total
        return [replace(payload, tensors=tuple(map(self._by_value, payload.tensors))) for payload in payloads]

    def _by_value(self, tensor: TensorDescriptor | InlineTensor) -> InlineTensor:
        return InlineTensor(tensor.spec, self._read(tensor)) if isinstance(tensor, TensorDescriptor) else tensor


class HandoverPath(NamedTuple):
    stage: Stage
    transport: Transport

    def __str__(self) -> str:
        return f"{self.stage.name}/{self.transport.name}"


class Transports:
    """All transports of a gateway, best first; `choice` is the operator's."""

    def __init__(self, transports: Sequence[Transport], choice: TransportChoice = "auto") -> None:
        self._all = transports
        self._allowed = [each for each in transports if choice == "auto" or choice in each.choices]
        self.carry_embeddings = any(transport.carries_embeddings for transport in self._allowed)

    def paths(self, stage: StageChoice, worker: WorkerLink, *, prepared: bool) -> list[HandoverPath]:
        """Return the hand-over paths to try, best first; empty if the operator's choice is impossible at this worker.
        `prepared`: the request has features."""
        has_features = prepared and worker.same_processor
        return [
            HandoverPath(each, transport)
            for each in _stages(stage, has_features=has_features)
            for transport in self._of_stage(each, worker)
        ]

    def _of_stage(self, stage: Stage, worker: WorkerLink) -> list[Transport]:
        usable = [transport for transport in self._allowed if transport.reaches(worker)]
        if stage.is_small and (not usable or usable[-1].needs_remote_store):
            sure = [each for each in self._all if each.reaches(worker) and not each.needs_remote_store]
            usable += sure[-1:]
        return usable


def _stages(choice: StageChoice, *, has_features: bool) -> Iterator[Stage]:
    """Yield the possible stages, best first. `has_features`: our features are equivalent to the worker's own."""
    name: StageName | None = BEST_STAGE if choice == "auto" else choice
    while name is not None:
        stage = STAGES[name]
        is_possible = has_features or not stage.same_processor
        if is_possible:
            yield stage
        name = None if choice != "auto" else stage.after_failure if is_possible else stage.if_unsupported


def _entries(payloads: Sequence[MediaPayload]) -> list[ArenaRange]:
    return list(dict.fromkeys(payload.entry for payload in payloads if payload.entry is not None))


async def prompt_for(
    path: HandoverPath,
    token_ids: list[int],
    prepared: PreparedPrompt,
    timeline: RequestTimeline,
    *,
    encoder_ms_per_token: float = 0.0,
) -> Prompt:
    """Return the prompt in the form for `path`. The request's scope holds the media that it refers to.

    `token_ids` are the prompt's as vLLM's app passed them, `encoder_ms_per_token` as for `feature_payload`. Raises
    HandoverFailed, and what preparing the media for the path's stage raises.
    """
    stage, source = path.stage, prepared.source
    if not stage.is_processed:
        token_ids = _unexpanded(token_ids, prepared)
    items = await prepared.media.in_stage(stage.name)
    if stage.is_processed:
        placed = (PlacedFeature(i.feature, p.placeholder) for i, p in zip(items, prepared.features, strict=True))
        payloads = [feature_payload(each, encoder_ms_per_token) for each in placed]
        sent = await path.transport.publish(payloads, timeline)
        return ExpandedPrompt(token_ids, tuple(sent), source.options, prepared.encoder_token_ids)
    sent = await path.transport.publish(list(map(_source_payload, items)), timeline)
    encoder_token_ids = None if prepared.encoder_token_ids is None else source.token_ids
    return UnexpandedPrompt(token_ids, tuple(sent), source.options, stage.name, encoder_token_ids)


def described(token_ids: list[int], prepared: PreparedPrompt) -> ExpandedPrompt:
    """Return the prompt for a worker that needs no tensor of its media."""
    payloads = (replace(feature_payload(each, 0.0), tensors=(), embedding=None) for each in prepared.features)
    return ExpandedPrompt(token_ids, tuple(payloads), prepared.source.options, prepared.encoder_token_ids)


def feature_payload(placed: PlacedFeature, encoder_ms_per_token: float) -> MediaPayload:
    """Return a feature with its position in the expanded prompt. `encoder_ms_per_token` is the expected time of
    encoding one embedding: a worker waits as long for another one that is encoding the same item."""
    feature, place = placed.feature, placed.placeholder
    return MediaPayload(
        feature.modality,
        feature.mm_hash,
        feature.header,
        feature.tensors,
        feature.size,
        place,
        embedding=feature.embedding,
        embedding_wait_ms=0.0 if feature.embedding is not None else encoder_ms_per_token * place.num_embeds,
    )


def _source_payload(item: StagedItem) -> MediaPayload:
    """Return an item that the worker processes itself."""
    feature = item.feature
    return MediaPayload(
        feature.modality,
        feature.mm_hash,
        b"",
        feature.tensors,
        feature.size,
        media_type=item.media_type,
        io=item.ref.io if item.ref.page is None else b"{}",  # vLLM gets an image
        param=item.ref.param,
    )


def _unexpanded(token_ids: list[int], prepared: PreparedPrompt) -> list[int]:
    """Return `token_ids` with unexpanded placeholders, plus the tokens that vLLM's beam search has appended.

    Raises HandoverFailed for what cannot be sent to a worker that expands the prompt: per-item options and truncated
    prompts.
    """
    if any(ref.options != b"{}" for ref in prepared.source.items):
        raise HandoverFailed("a worker processes all items of a request with the same options")
    if not prepared.features or prepared.encoder_token_ids is not None:  # the decoder's prompt has no placeholders
        return token_ids
    num_expanded = len(prepared.token_ids)
    if token_ids[:num_expanded] != prepared.token_ids:
        raise HandoverFailed("a truncated prompt cannot be expanded by a worker")
    return [*prepared.source.token_ids, *token_ids[num_expanded:]]
