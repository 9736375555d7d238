"""EngineCore's side of the zero-copy hand-over: tensors received as descriptors become views of a mapped arena.

Theory of operation. A worker's front end sends requests to its EngineCore as msgpack. An item whose tensors are in
arenas that EngineCore has mapped is sent by `arena_encoder` as `{"medialane": bytes}`, the bytes being a `WireItem`:
the item's header and the locations of its tensors. EngineCore's input thread decodes requests with `MsgpackDecoder`, a
name that it looks up in its module when it starts: `seams.engine_core` replaces it by a subclass that builds such
items over views.

An exception in that thread would end it silently, and every later request would hang. So the resolver never raises:
an item that it cannot resolve becomes an empty item, and the request is marked. A marked request is rejected one step
later, in `preprocess_add_request`, whose exceptions vLLM does catch: only this request fails, before it is scheduled,
and nothing is computed or cached from missing data.

Both are private seams of vLLM 0.32, pinned by `tests/contract/test_vllm_engine_plugin.py`; `engine_core` installs them.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalKwargsItem

from medialane.arena import ArenaView
from medialane.types.errors import HandoverFailed
from medialane.types.tensor import TensorDescriptor, TensorDescriptors
from medialane.vllm_bridge.items.features import decode_item
from medialane.vllm_bridge.items.pinned_memory import PinnedMemory, pinned
from medialane.vllm_bridge.seams.engine import EngineCoreRequest, ItemDecoder

logger = logging.getLogger(__name__)

#: The only key of an item that is sent as a `WireItem`. No model has a field of this name.
KEY = "medialane"

#: Rejected requests that are remembered: the front end queries them as soon as it sees the error.
MAX_REFUSED = 4096


class WireItem(msgspec.Struct, frozen=True, array_like=True):
    """An item as sent to EngineCore: its header (`features`) and the tensors that it names, in its order."""

    header: bytes
    tensors: TensorDescriptors


_DECODER = msgspec.msgpack.Decoder(WireItem)


class ArenaResolver:
    """The arenas that this process has mapped, and the requests that it rejected.

    EngineCore's main thread attaches, detaches and queries; its input thread resolves and refuses. No lock: each
    update is a single dict operation.
    """

    def __init__(self) -> None:
        self._views: dict[str, ArenaView] = {}
        self._pinned: dict[str, PinnedMemory] = {}
        self._refused: dict[str, None] = {}

    def attach(self, arena: str, directory: str, nonce: str, *, pin: bool = False) -> bool:
        """Map an arena; True if it holds the nonce (hex). `pin` it for the device that this process uses, if any."""
        if arena in self._views:
            return self._views[arena].nonce.hex() == nonce
        try:
            view = self._views[arena] = ArenaView.open(arena, directory, nonce=bytes.fromhex(nonce))
        except HandoverFailed as error:
            logger.warning("EngineCore cannot map the arena: %s", error.message)
            return False
        if pin and (registered := pinned(view.memory)) is not None:
            self._pinned[arena] = registered
        return True

    def detach(self, arena: str) -> None:
        """Unmap an arena that no request reads any more. Idempotent.

        vLLM's requests are reference cycles (their block hasher): finished ones still hold their items, and so the
        mapping, until they are garbage-collected.
        """
        if (registered := self._pinned.pop(arena, None)) is not None:
            registered.release()
        if (view := self._views.pop(arena, None)) is not None:
            view.close()
            gc.collect()

    def resolve(self, wire: bytes) -> MultiModalKwargsItem | None:
        """Return the item over views of the arenas; None if it cannot be read. Never raises."""
        try:
            item = _DECODER.decode(wire)
            return decode_item(item.header, [self._views[t.range.arena].tensor(t) for t in item.tensors])
        except Exception:  # see the theory of operation: no exception may reach vLLM's thread
            logger.exception("an item cannot be read from its arena; its request is rejected")
            return None

    def tensor(self, descriptor: TensorDescriptor) -> memoryview:
        """Return the bytes of a tensor. Raises HandoverFailed."""
        view = self._views.get(descriptor.range.arena)
        if view is None:
            raise HandoverFailed(f"the arena {descriptor.range.arena} is not mapped")
        return view.tensor(descriptor)

    def is_readable(self, descriptor: TensorDescriptor) -> bool:
        """Return whether `tensor` returns its bytes. Reads a few words of memory."""
        try:
            self.tensor(descriptor).release()
        except HandoverFailed:
            return False
        return True

    def refuse(self, request_id: str) -> None:
        """Remember a request that could not be read; beyond MAX_REFUSED the oldest is dropped."""
        self._refused[request_id] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def has_refused(self, request_id: str) -> bool:
        return request_id in self._refused


#: One per process: vLLM creates the decoders and passes no arguments of ours.
RESOLVER = ArenaResolver()


class ArenaDecoder(ItemDecoder):
    """vLLM's decoder, extended by items sent as a `WireItem`."""

    _faulted = False

    def decode(self, bufs: Any) -> Any:
        self._faulted = False
        decoded = super().decode(bufs)
        if self._faulted and isinstance(decoded, EngineCoreRequest):
            decoded.mm_features = Unreadable()
        return decoded

    def decode_item(self, obj: dict[str, Any]) -> MultiModalKwargsItem:
        if KEY not in obj:
            return super().decode_item(obj)
        item = RESOLVER.resolve(obj[KEY])
        self._faulted = self._faulted or item is None
        return MultiModalKwargsItem() if item is None else item


class Unreadable:
    """Value of `EngineCoreRequest.mm_features` if the features could not be read."""
