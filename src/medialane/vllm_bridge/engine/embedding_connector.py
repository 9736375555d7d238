"""Our connector to vLLM's encoder cache: embeddings are loaded from the arena, and saved there.

vLLM loads `EmbeddingConnector` by the name of this module (`encoder_cache.connect`) and makes one instance in each
scheduler and one in each process that runs the model. No method raises: an exception in a scheduler or a model ends the
engine. A request's embeddings are in its sampling parameters (`engine_request`), where vLLM expects what is for a
connector.

Theory of operation, in the scheduler. A request's embeddings arrive with it (`EmbeddingPlan`) and are registered the
first time the scheduler considers the request, which is before it schedules the request's encoder inputs. An item with
an embedding to load has no pixels, so it must never be scheduled for the encoder: it is known here as long as the
request exists, and a request whose embedding cannot be read any more is failed before it is scheduled. Everything is a
lookup in a dict or in mapped memory: the scheduler is never blocked.

In the model's processes, an embedding is loaded by a view of the arena and one copy to the device: vLLM's encoder cache
outlives the request, and with it the hold on the arena. It is saved by one copy as well, at the end of the step's
encoder work. A load from a pinned arena (`items.arena_tensors`) is queued in the device's stream. Any other load, and
each save, waits for the work that is queued there (`medialane bench gpu`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from medialane.arena import ENTRY_HEADER_BYTES, FillWriter
from medialane.types.errors import HandoverFailed, PreparationFailed
from medialane.types.feature import EmbeddingUse, MediaPayload
from medialane.types.request import EmbeddingCounts, EncoderCard
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.vllm_bridge.items.arena_tensors import RESOLVER
from medialane.vllm_bridge.items.features import spec_of, tensor_over
from medialane.vllm_bridge.learned.validation import placeholder_of
from medialane.vllm_bridge.seams.encoder_cache import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    get_tensor_model_parallel_rank,
    restore_inputs,
)

logger = logging.getLogger(__name__)


class EmbeddingPlan(msgspec.Struct, frozen=True, array_like=True):
    """The embeddings of one request by mm_hash, as sent to EngineCore: to be loaded, or to be saved if the item is
    encoded; of items that are `absent` there is nothing, so that the KV blocks of all of them must be there.
    `request_id` is the request's id in the front end."""

    request_id: str
    loads: dict[str, TensorDescriptor]
    fills: dict[str, TensorDescriptor]
    absent: list[str] = []


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


def absent_media(request_id: str, features: Sequence[MediaPayload], encoder: EncoderCard | None) -> bytes:
    """Return the plan of a request that comes without its media. Raises HandoverFailed if the engine needs more of them
    than their small fields."""
    if encoder is None or any(feature.modality not in encoder.widths for feature in features):
        raise HandoverFailed("this engine needs the media of its requests")
    return _ENCODER.encode(EmbeddingPlan(request_id, {}, {}, [feature.mm_hash for feature in features]))


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
        if num_computed_tokens >= end or (not plan.absent and all(map(self._is_readable, plan.loads.values()))):
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
        end = max((ends.get(mm_hash, 0) for mm_hash in (*embeddings.loads, *embeddings.absent)), default=0)
        self._requests[request_id] = embeddings, end
        return embeddings, end

    def _fail(self, request_id: str) -> bool:
        if (registered := self._requests.get(request_id)) is not None:
            self._refuse(registered[0].request_id)
        logger.warning("an item of request %s can neither be loaded nor encoded", request_id)
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


# In the model's processes

#: vLLM's encoder cache: outputs by mm_hash.
EncoderCache = MutableMapping[str, torch.Tensor]


@dataclass
class CopyCounts(ECConnectorWorkerMetadata):  # type: ignore[misc]  # vllm is not typed
    """What the model's processes have done in a step, for the scheduler. `unusable` are items for which the encoder
    cache has no true embedding."""

    num_saved: int = 0
    num_failed: int = 0
    unusable: list[str] = field(default_factory=list)

    def aggregate(self, other: CopyCounts) -> CopyCounts:
        num_saved, num_failed = self.num_saved + other.num_saved, self.num_failed + other.num_failed
        return CopyCounts(num_saved, num_failed, [*self.unusable, *other.unusable])


class EmbeddingCopies:
    """Loads and saves embeddings in one process of the model."""

    def __init__(self, read: Callable[[TensorDescriptor], memoryview], directory: str, *, saves: bool) -> None:
        """`read` maps a tensor of an arena in `directory`. Only one process of an engine `saves`."""
        self._read = read
        self._directory = directory
        self._saves = saves
        self._fills: dict[str, dict[str, TensorDescriptor]] = {}
        self._copied = CopyCounts()
        self._has_logged = False

    def begin(self, step: StepEmbeddings) -> None:
        self._fills.update(step.fills if self._saves else {})
        for request_id in step.ended:
            self._fills.pop(request_id, None)

    def load(self, step: StepEmbeddings, cache: EncoderCache) -> None:
        """Put the step's embeddings into the cache. Never raises.

        The scheduler has checked that they are readable, so failures are not expected; but without a tensor in the
        cache, the engine would end with all its requests. So an item that cannot be loaded is replaced by zeros, and
        reported as unusable.
        """
        for mm_hash, tensor in step.loads.items():
            if mm_hash not in cache:
                try:
                    cache[mm_hash] = _on_device(tensor_over(tensor.spec, self._read(tensor)))
                except Exception:  # see above
                    logger.exception("the embedding of item %s cannot be loaded", mm_hash)
                    cache[mm_hash] = _on_device(torch.zeros((), dtype=getattr(torch, tensor.spec.dtype))).expand(
                        tensor.spec.shape
                    )
                    self._copied.num_failed += 1
                    self._copied.unusable.append(mm_hash)

    def save(self, cache: EncoderCache) -> None:
        """Save the outputs that are wanted and in the cache. Never raises: the answer does not depend on it."""
        for request_id, fills in list(self._fills.items()):
            for mm_hash in fills.keys() & cache.keys():
                self._save(mm_hash, fills.pop(mm_hash), cache[mm_hash])
            if not fills:
                del self._fills[request_id]

    def _save(self, mm_hash: str, where: TensorDescriptor, output: torch.Tensor) -> None:
        try:
            if (spec := spec_of(output)) != where.spec:
                raise PreparationFailed(f"the encoder's output is {spec} instead of {where.spec}")
            with FillWriter.open(where.range, self._directory) as payload:
                _write(payload, where, output)
            self._copied.num_saved += 1
        except HandoverFailed as error:  # the range is not ours any more, or has been written
            logger.debug("the embedding of item %s is not saved: %s", mm_hash, error.message)
        except Exception:  # noqa: BLE001 - see `save`; the same again, such as another dtype, would fill the log
            log = logger.debug if self._has_logged else logger.error
            log("the embedding of item %s cannot be saved", mm_hash, exc_info=True)
            self._has_logged = True
            self._copied.num_failed += 1

    def take_copied(self) -> CopyCounts | None:
        """Return what was done since the last call; None if nothing."""
        copied, self._copied = self._copied, CopyCounts()
        return copied if copied != CopyCounts() else None


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(current_platform.device_type, copy=True, non_blocking=tensor.is_pinned())


def _write(payload: memoryview, where: TensorDescriptor, output: torch.Tensor) -> None:
    first = where.offset - ENTRY_HEADER_BYTES
    tensor_over(where.spec, payload[first : first + where.spec.nbytes]).copy_(output)


#: The only key of `ec_transfer_params` in a request. Its value is an `EmbeddingPlan`, encoded.
KEY = "medialane"

#: Settings of the connector: the directory of arenas.
DIRECTORY = "arena_directory"


class EmbeddingConnector(ECConnectorBase):  # type: ignore[misc]  # vllm is not typed
    """Created by vLLM."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        restore_inputs(vllm_config)
        if role is ECConnectorRole.SCHEDULER:
            self.schedule = EmbeddingSchedule(RESOLVER.is_readable, RESOLVER.refuse)
            return
        directory = vllm_config.ec_transfer_config.ec_connector_extra_config[DIRECTORY]
        self._copies = EmbeddingCopies(RESOLVER.tensor, directory, saves=get_tensor_model_parallel_rank() == 0)
        self._cache: dict[str, torch.Tensor] = {}
        self._step = StepEmbeddings()

    # In the scheduler, whose steps must never be blocked

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self.schedule.is_available(
            request.request_id,
            (request.ec_transfer_params or {}).get(KEY),
            ends=lambda: {f.identifier: f.mm_position.offset + f.mm_position.length for f in request.mm_features},
            num_computed_tokens=num_computed_tokens,
        )

    def has_cache_item(self, identifier: str) -> bool:
        return self.schedule.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.schedule.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepEmbeddings:
        freed, num_tokens = scheduler_output.free_encoder_mm_hashes, scheduler_output.total_num_scheduled_tokens
        return self.schedule.take_step(freed=freed, runs_model=num_tokens > 0)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        if isinstance(done := connector_output.ec_connector_worker_meta, CopyCounts):
            self.schedule.report(num_saved=done.num_saved, num_failed=done.num_failed, unusable=done.unusable)

    def take_unavailable_requests(self) -> set[str]:
        return self.schedule.take_refused()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.schedule.end(request.request_id)
        return False, None

    # In the model's processes

    def bind_connector_metadata(self, connector_metadata: StepEmbeddings) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata
        self._copies.begin(self._step)

    def start_save_caches(self, **kwargs: Any) -> None:
        """In an engine that only encodes, `start_load_caches` is not called."""
        self._cache = kwargs["encoder_cache"]

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._cache = encoder_cache
        self._copies.load(self._step, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Called for each item that was encoded, but not by every model runner of vLLM, and not for items that were
        in the encoder cache already: see `get_finished`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Called when the step's encoder inputs are in the cache."""
        self._copies.save(self._cache)
        return None, None

    def build_connector_worker_meta(self) -> CopyCounts | None:
        return self._copies.take_copied()
