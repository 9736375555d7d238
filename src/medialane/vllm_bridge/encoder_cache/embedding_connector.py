"""Our connector to vLLM's encoder cache: embeddings are loaded from the arena, and saved there.

vLLM loads this class by the name of its module (`encoder_cache.connect`) and makes one instance in each scheduler and
one in each process that runs the model. `embedding_schedule` has the theory of operation of the former,
`embedding_copies` that of the latter. No method raises: an exception in a scheduler or a model ends the engine.

A request's embeddings are in its sampling parameters (`engine_request`), where vLLM expects what is for a connector.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from medialane.vllm_bridge.encoder_cache.embedding_copies import Copied, EmbeddingCopies
from medialane.vllm_bridge.encoder_cache.embedding_schedule import EmbeddingSchedule, StepEmbeddings
from medialane.vllm_bridge.encoder_cache.step_clock import StepClock
from medialane.vllm_bridge.items.arena_decoder import RESOLVER
from medialane.vllm_bridge.seams.encoder_cache import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    restore_inputs,
    tensor_parallel_rank,
)

#: The only key of `ec_transfer_params` in a request. Its value is an `EmbeddingPlan`, encoded.
KEY = "medialane"

#: Settings of the connector: the directory of arenas.
DIRECTORY = "arena_directory"


class StepMetadata(ECConnectorMetadata):  # type: ignore[misc]  # vllm is not typed
    """From the scheduler to the model's processes, in each step."""

    def __init__(self, step: StepEmbeddings) -> None:
        self.step = step


class CopiedMetadata(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """From the model's processes to the scheduler, after a step in which something was saved or has failed."""

    def __init__(self, copied: Copied) -> None:
        self.copied = copied

    def aggregate(self, other: CopiedMetadata) -> CopiedMetadata:
        one, two = self.copied, other.copied
        unusable = [*one.unusable, *two.unusable]
        return CopiedMetadata(Copied(one.num_saved + two.num_saved, one.num_failed + two.num_failed, unusable))


class EmbeddingConnector(ECConnectorBase):  # type: ignore[misc]
    """Created by vLLM."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        restore_inputs(vllm_config)
        if role is ECConnectorRole.SCHEDULER:
            self.schedule = EmbeddingSchedule(RESOLVER.is_readable, RESOLVER.refuse)
            self.clock = StepClock()
            return
        directory = vllm_config.ec_transfer_config.ec_connector_extra_config[DIRECTORY]
        self._copies = EmbeddingCopies(RESOLVER.tensor, directory, saves=tensor_parallel_rank() == 0)
        self._cache: dict[str, torch.Tensor] = {}
        self._step = StepEmbeddings()

    # In the scheduler. `has_cache_item` is one lookup, for each item in each step, and not worth the clock's calls.

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        with self.clock.measure():
            return self.schedule.is_available(
                request.request_id,
                (request.ec_transfer_params or {}).get(KEY),
                ends=lambda: {f.identifier: f.mm_position.offset + f.mm_position.length for f in request.mm_features},
                num_computed_tokens=num_computed_tokens,
            )

    def has_cache_item(self, identifier: str) -> bool:
        return self.schedule.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        with self.clock.measure():
            self.schedule.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        freed, num_tokens = scheduler_output.free_encoder_mm_hashes, scheduler_output.total_num_scheduled_tokens
        with self.clock.measure():
            step = self.schedule.take_step(freed=freed, runs_model=num_tokens > 0)
        self.clock.end_step()
        return StepMetadata(step)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        if isinstance(worker_meta := connector_output.ec_connector_worker_meta, CopiedMetadata):
            done = worker_meta.copied
            with self.clock.measure():
                self.schedule.report(num_saved=done.num_saved, num_failed=done.num_failed, unusable=done.unusable)

    def take_unavailable_requests(self) -> set[str]:
        return self.schedule.take_refused()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        with self.clock.measure():
            self.schedule.end(request.request_id)
        return False, None

    # In the model's processes

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata.step
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

    def build_connector_worker_meta(self) -> CopiedMetadata | None:
        copied = self._copies.take_copied()
        return None if copied is None else CopiedMetadata(copied)
