"""The side of the embedding connector in the model's processes: copies between the arena and the encoder cache.

An embedding is loaded by a view of the arena and one copy to the device: vLLM's encoder cache outlives the request, and
with it the hold on the arena. It is saved by one copy as well, at the end of the step's encoder work.

A load from a pinned arena (`items.pinned_memory`) is queued in the device's stream. Any other load, and each save,
waits for the work that is queued there (`medialane bench gpu`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from vllm.platforms import current_platform

from medialane.arena import ENTRY_HEADER_BYTES, FillWriter
from medialane.types.errors import HandoverFailed, PreparationFailed
from medialane.types.tensor import TensorDescriptor
from medialane.vllm_bridge.encoder_cache.embedding_schedule import StepEmbeddings
from medialane.vllm_bridge.items.features import spec_of, tensor_over

logger = logging.getLogger(__name__)

#: vLLM's encoder cache: outputs by mm_hash.
EncoderCache = MutableMapping[str, torch.Tensor]


@dataclass
class Copied:
    """What one process has done in a step. `unusable` are items for which the encoder cache has no true embedding."""

    num_saved: int
    num_failed: int
    unusable: list[str]


class EmbeddingCopies:
    """Loads and saves embeddings in one process of the model."""

    def __init__(self, read: Callable[[TensorDescriptor], memoryview], directory: str, *, saves: bool) -> None:
        """`read` maps a tensor of an arena in `directory`. Only one process of an engine `saves`."""
        self._read = read
        self._directory = directory
        self._saves = saves
        self._fills: dict[str, dict[str, TensorDescriptor]] = {}
        self._copied = Copied(0, 0, [])
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

    def take_copied(self) -> Copied | None:
        """Return what was done since the last call; None if nothing."""
        copied, self._copied = self._copied, Copied(0, 0, [])
        return copied if copied != Copied(0, 0, []) else None


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(current_platform.device_type, copy=True, non_blocking=tensor.is_pinned())


def _write(payload: memoryview, where: TensorDescriptor, output: torch.Tensor) -> None:
    first = where.offset - ENTRY_HEADER_BYTES
    tensor_over(where.spec, payload[first : first + where.spec.nbytes]).copy_(output)
