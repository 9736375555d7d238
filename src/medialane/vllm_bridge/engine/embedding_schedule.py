"""Which embeddings a request has, and, in the scheduler, which of them a step loads and which it is to save.

Theory of operation. A request's embeddings arrive with it (`EmbeddingPlan`) and are registered the first time the
scheduler considers the request, which is before it schedules the request's encoder inputs. An item with an embedding
to load has no pixels, so it must never be scheduled for the encoder: it is known here as long as the request exists,
and a request whose embedding cannot be read any more is failed before it is scheduled. Everything is a lookup in a dict
or in mapped memory: the scheduler is never blocked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from medialane.types.errors import HandoverFailed
from medialane.types.feature import EmbeddingUse, MediaPayload
from medialane.types.request import EmbeddingCounts, EncoderCard
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.vllm_bridge.learned.validation import placeholder_of
from medialane.vllm_bridge.seams.encoder_cache import ECConnectorMetadata

logger = logging.getLogger(__name__)


class EmbeddingPlan(msgspec.Struct, frozen=True, array_like=True):
    """The embeddings of one request by mm_hash, as sent to EngineCore: to be loaded, or to be saved if the item is
    encoded. `request_id` is the request's id in the front end."""

    request_id: str
    loads: dict[str, TensorDescriptor]
    fills: dict[str, TensorDescriptor]


_DECODER = msgspec.msgpack.Decoder(EmbeddingPlan)

_ENCODER = msgspec.msgpack.Encoder()


def request_embeddings(
    request_id: str,
    features: Sequence[MediaPayload],
    uses: Sequence[EmbeddingUse | None],
    *,
    encoder: EncoderCard | None,
    arenas: Container[str],
) -> bytes | None:
    """Return the plan of a request as EngineCore gets it; None if it has no embeddings. What is wrong is found here, in
    the front end: EngineCore would end.

    One to be loaded must be an output of this engine's encoder for its item, in an arena that the engine has mapped.
    Otherwise raises HandoverFailed: the request can be sent with the item's tensors instead. One to be saved under
    those conditions is left out. Raises InvalidFeature for an item without a placeholder.
    """
    plan = EmbeddingPlan(request_id, {}, {})
    for feature, use in zip(features, uses, strict=True):
        fault = "" if use is None else _fault(feature, use, encoder, arenas)
        if use is not None and use.is_filled:
            if fault:
                raise HandoverFailed(f"{feature.modality}: {fault}")
            plan.loads[feature.mm_hash] = use.tensor
        elif use is not None and not fault:
            plan.fills[feature.mm_hash] = use.tensor
    for mm_hash in plan.loads:  # of two equal items, one may have been encoded meanwhile
        plan.fills.pop(mm_hash, None)
    return _ENCODER.encode(plan) if plan.loads or plan.fills else None


def _fault(feature: MediaPayload, use: EmbeddingUse, encoder: EncoderCard | None, arenas: Container[str]) -> str:
    """Return why the engine does not load such an embedding; empty if it does."""
    width = None if encoder is None else encoder.widths.get(feature.modality)
    if encoder is None or width is None:
        return "this engine does not load embeddings"
    expected = TensorSpec(encoder.dtype, (placeholder_of(feature).num_embeds, width))
    if use.tensor.spec != expected:
        return f"the embedding is {use.tensor.spec} instead of {expected}"
    return "" if use.tensor.range.arena in arenas else "the engine has not mapped the arena of the embedding"


@dataclass
class StepEmbeddings(ECConnectorMetadata):  # type: ignore[misc]  # vllm is not typed
    """What the model's processes do in one step, from the scheduler. `fills` are by request, then by mm_hash; fills of
    the requests in `ended` must not be written any more."""

    loads: dict[str, TensorDescriptor] = field(default_factory=dict)
    fills: dict[str, dict[str, TensorDescriptor]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)


class EmbeddingSchedule:
    """The embeddings of the engine's requests. Not thread-safe."""

    def __init__(self, is_readable: Callable[[TensorDescriptor], bool], refuse: Callable[[str], None]) -> None:
        """`refuse` is called with the front end's id of a request that cannot be served."""
        self._num_loaded = self._num_encoded = self._num_saved = self._num_failed = 0
        self._is_readable = is_readable
        self._refuse = refuse
        self._requests: dict[str, tuple[EmbeddingPlan, int]] = {}
        self._loads: dict[str, dict[str, TensorDescriptor]] = {}
        self._refused: set[str] = set()
        self._unusable: set[str] = set()
        self._step = StepEmbeddings()

    @property
    def counts(self) -> EmbeddingCounts:
        return EmbeddingCounts(self._num_loaded, self._num_encoded, self._num_saved, self._num_failed)

    def has(self, mm_hash: str) -> bool:
        """Return whether an item is loaded instead of encoded."""
        return mm_hash in self._loads

    def is_available(
        self, request_id: str, sent: bytes | None, *, ends: Callable[[], Mapping[str, int]], num_computed_tokens: int
    ) -> bool:
        """Return whether the request's embeddings can be loaded; if not, it is in `take_refused` next.

        `sent` are its `EmbeddingPlan`; `ends` returns where each of its items ends in the prompt.
        """
        if request_id in self._refused:
            return False
        registered = self._requests.get(request_id)
        if registered is None and sent is not None:
            registered = self._register(request_id, sent, ends())
            if registered is None:
                return self._fail(request_id)
        if self._unusable and not self._unusable.isdisjoint(ends()):
            return self._fail(request_id)
        if registered is None:
            return True
        plan, end = registered
        if num_computed_tokens >= end or all(map(self._is_readable, plan.loads.values())):
            return True
        return self._fail(request_id)

    def _register(self, request_id: str, sent: bytes, ends: Mapping[str, int]) -> tuple[EmbeddingPlan, int] | None:
        try:
            embeddings = _DECODER.decode(sent)
        except (msgspec.DecodeError, TypeError, ValueError):
            logger.exception("the embeddings of a request cannot be read; it is rejected")
            return None
        for mm_hash, tensor in embeddings.loads.items():
            self._loads.setdefault(mm_hash, {})[request_id] = tensor
        if embeddings.fills:
            self._step.fills[request_id] = dict(embeddings.fills)
        end = max((ends.get(mm_hash, 0) for mm_hash in embeddings.loads), default=0)
        self._requests[request_id] = embeddings, end
        return embeddings, end

    def _fail(self, request_id: str) -> bool:
        if (registered := self._requests.get(request_id)) is not None:
            self._refuse(registered[0].request_id)
        logger.warning("an embedding of request %s cannot be loaded", request_id)
        self._refused.add(request_id)
        self._num_failed += 1
        self.end(request_id)
        return False

    def take_refused(self) -> set[str]:
        """Return the requests that must fail, once."""
        refused, self._refused = self._refused, set()
        return refused

    def allocated(self, mm_hash: str) -> None:
        """The scheduler has allocated memory for an item, which is loaded or encoded in this step."""
        tensors = self._loads.get(mm_hash)
        if tensors is None:
            self._num_encoded += 1
            return
        self._num_loaded += 1
        # Any of them will do; the request of another may be past reading it, and so not be checked any more.
        readable = (tensor for tensor in tensors.values() if self._is_readable(tensor))
        self._step.loads[mm_hash] = next(readable, next(iter(tensors.values())))

    def end(self, request_id: str) -> None:
        """The request has ended: nothing of it is read or written any more. Idempotent."""
        registered = self._requests.pop(request_id, None)
        if registered is None:
            return
        embeddings, _ = registered
        for mm_hash in embeddings.loads:
            tensors = self._loads[mm_hash]
            tensors.pop(request_id, None)
            if not tensors:
                del self._loads[mm_hash]
        if embeddings.fills:
            self._step.fills.pop(request_id, None)
            self._step.ended.append(request_id)

    def drop_fills(self) -> None:
        """Save nothing of the present requests: the weights are about to change, or have changed."""
        for request_id, (embeddings, end) in self._requests.items():
            if embeddings.fills:
                self._requests[request_id] = msgspec.structs.replace(embeddings, fills={}), end
                self._step.fills.pop(request_id, None)
                self._step.ended.append(request_id)

    def take_step(self, *, freed: Collection[str], runs_model: bool) -> StepEmbeddings:
        """Return what this step does. `freed` are items that leave the encoder cache. A step that does not run the
        model does nothing: its message may not reach the model's processes."""
        self._unusable.difference_update(freed)
        if not runs_model:
            return StepEmbeddings()
        step, self._step = self._step, StepEmbeddings()
        return step

    def report(self, *, num_saved: int, num_failed: int, unusable: Sequence[str]) -> None:
        """Record what the model's processes have done. `unusable` are items that are in the encoder cache, but could
        not be loaded: requests with them must fail until they are evicted."""
        self._num_saved += num_saved
        self._num_failed += num_failed
        self._unusable.update(unusable)
