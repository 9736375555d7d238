"""vLLM's generate endpoint over prompts with processed items, which the gateway finds or stores.

Theory of operation. vLLM's handler decodes the tensors of a request on the event loop, and trusts ranges, hashes and
tensors. Here intake has put references in their place (`gateway.intake.sent_features`), so the handler gets the input
of an engine that was made of them: features that the client names, or those of its tensors, which have a key of ours.
The ranges that clients send do not say which of their tokens are replaced by embeddings; that is restored from the
model's placeholders, with which the prompt's tokens are compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from medialane.runtime.tasks import LoopFairness, gather_or_cancel
from medialane.types.errors import InvalidRequest, UnknownMedia
from medialane.types.feature import PlaceholderRange, PreparedPrompt, StagedItem
from medialane.types.media import MediaRef, naming
from medialane.vllm_bridge.frontend.renderer_hook import remembered_errors
from medialane.vllm_bridge.frontend.request_backend import RequestBackend
from medialane.vllm_bridge.items.prepared_input import engine_input
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.learned.sent_tensors import SentTensors, TensorsReader
from medialane.vllm_bridge.seams.scale_out import generate_by

T = TypeVar("T")


def install(state: Any, backend: RequestBackend, profile: ModelProfile | None, fairness: LoopFairness) -> None:
    """Serve the generate endpoint of an app with this state from `backend`."""
    reader = None if profile is None or profile.is_unfit else TensorsReader(profile)
    has_encoder_prompt = profile is not None and profile.processor.info.ctx.model_config.is_encoder_decoder
    generate_by(state, _Hook(backend, None if has_encoder_prompt else reader, fairness).engine_input)


class _Hook:
    def __init__(self, backend: RequestBackend, reader: TensorsReader | None, fairness: LoopFairness) -> None:
        self._backend = backend
        self._reader = reader
        self._fairness = fairness
        self._reading = asyncio.Lock()  # the reader's work is done in a thread, or here if it is small

    async def engine_input(self, request: Any) -> Any:
        """Return the engine's input of a request with features. Raises MedialaneError, which it has recorded."""
        with remembered_errors(self._backend):
            if self._reader is None:
                raise InvalidRequest("features of this model are not supported: send its media", param="features")
            given = list(_items(request.features, self._backend.resolve))
            found = await gather_or_cancel([self._found(ref, self._reader) for ref, _ in given])
            prepared = await self._backend.place(
                list(request.token_ids), [item for item, _ in found], [place for _, place in given]
            )
            _check_placed(prepared, found, self._reader)
            made = engine_input(prepared)
            if request.cache_salt is not None:
                made["cache_salt"] = request.cache_salt
            return made

    async def _found(self, ref: MediaRef, reader: TensorsReader) -> tuple[StagedItem, SentTensors | None]:
        """Return the item, and its tensors if they are not those of a feature that this server has made."""
        if ref.data is None:
            return await self._backend.find_feature(ref), None
        data = ref.data
        sent = await self._read(ref, len(data), lambda: reader.read(ref.modality, data))
        if (known := await self._known(ref, sent, reader)) is not None:
            return known, None
        item = await self._read(ref, sent.nbytes, lambda: reader.check(sent))
        return await self._backend.put_feature(ref, item), sent

    async def _known(self, ref: MediaRef, sent: SentTensors, reader: TensorsReader) -> StagedItem | None:
        """Return the feature of the hash that the client gave with the tensors, if it is the same."""
        try:
            item = await self._backend.find_feature(ref, with_tensors=True)
        except UnknownMedia:
            return None
        tensors = self._backend.tensors(item.feature)
        is_same = await self._read(ref, sent.nbytes, lambda: reader.equals(sent, item.feature.header, tensors))
        return item if is_same else None

    async def _read(self, ref: MediaRef, num_bytes: int, work: Callable[[], T]) -> T:
        with naming(ref):
            async with self._reading:
                return await self._fairness.run(num_bytes, work)


def _items(features: Any, resolve: Callable[[str], MediaRef]) -> Iterator[tuple[MediaRef, PlaceholderRange]]:
    """Yield each item's reference and range. Raises InvalidRequest if those of a modality are not in order."""
    for name, entries in features.kwargs_data.items():
        end = 0
        for number, (entry, place) in enumerate(zip(entries, features.mm_placeholders[name], strict=True)):
            if place.offset < end:
                message = "the placeholders of a modality must be in the order of the prompt"
                raise InvalidRequest(message, param=f"features.mm_placeholders.{name}[{number}]")
            end = place.offset + place.length
            yield resolve(entry), PlaceholderRange(place.offset, place.length)


def _check_placed(
    prepared: PreparedPrompt, found: Sequence[tuple[StagedItem, SentTensors | None]], reader: TensorsReader
) -> None:
    """Raise InvalidFeature unless tensors that only the client has made fit their placeholders."""
    for placed, (item, sent) in zip(prepared.features, found, strict=True):
        if sent is not None:
            with naming(item.ref):
                reader.check_placed(sent, placed.placeholder)
