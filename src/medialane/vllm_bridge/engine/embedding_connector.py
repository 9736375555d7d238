"""Our connector to vLLM's encoder cache: embeddings are loaded from the arena, and saved there.

vLLM loads this class by the name of its module (`encoder_cache.connect`) and makes one instance in each scheduler and
one in each process that runs the model. `embedding_schedule` has the theory of operation of the former.
No method raises: an exception in a scheduler or a model ends the engine.

A request's embeddings are in its sampling parameters (`engine_request`), where vLLM expects what is for a connector.

The side of the embedding connector in the model's processes: copies between the arena and the encoder cache.

An embedding is loaded by a view of the arena and one copy to the device: vLLM's encoder cache outlives the request, and
with it the hold on the arena. It is saved by one copy as well, at the end of the step's encoder work.

A load from a pinned arena (`items.arena_tensors`) is queued in the device's stream. Any other load, and each save,
waits for the work that is queued there (`medialane bench gpu`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from medialane.arena import ENTRY_HEADER_BYTES, FillWriter
from medialane.types.errors import HandoverFailed, PreparationFailed
from medialane.types.tensor import TensorDescriptor
from medialane.vllm_bridge.engine.embedding_schedule import EmbeddingSchedule, StepEmbeddings
from medialane.vllm_bridge.items.arena_tensors import RESOLVER
from medialane.vllm_bridge.items.features import spec_of, tensor_over
from medialane.vllm_bridge.seams.encoder_cache import (
    ECConnectorBase,
    ECConnectorOutput,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    get_tensor_model_parallel_rank,
    restore_inputs,
)

logger = logging.getLogger(__name__)

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
