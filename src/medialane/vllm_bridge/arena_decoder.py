"""EngineCore's end of the zero-copy hand-over: tensors that arrive as descriptors become views of a mapped arena.

Theory of operation. A worker's front end sends requests to its EngineCore as msgpack; an item whose tensors lie in
arenas that EngineCore has mapped is sent by `arena_encoder` as `{"medialane": bytes}`, the bytes being a `WireItem`:
the item's header, and where its tensors lie. EngineCore's input thread decodes requests with `MsgpackDecoder`, a name
that it looks up in its module when it starts: `seams.engine_core` puts a subclass there, which makes such an item over
views.

An exception in that thread would end it silently, and every later request would hang. So the resolver never raises:
what it cannot resolve becomes an empty item, and the request is marked. A marked request is refused one step
later, in `preprocess_add_request`, whose exceptions vLLM does catch: it fails alone, before it is scheduled, and
nothing is computed or cached from what is not there.

Both are private seams of vLLM 0.32, pinned by `tests/contract/test_vllm_engine_plugin.py`; `engine_core` puts us there.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalKwargsItem

from medialane.arena import ArenaView
from medialane.core.errors import HandoverFailed
from medialane.core.tensor import TensorDescriptor
from medialane.vllm_bridge.features import decode_item
from medialane.vllm_bridge.seams.engine import EngineCoreRequest, ItemDecoder

logger = logging.getLogger(__name__)

#: The one key of an item that is sent as a `WireItem`. No field of a model is called so.
KEY = "medialane"

#: Refused requests that are remembered: the front end asks as soon as it sees the error.
MAX_REFUSED = 4096


class WireItem(msgspec.Struct, frozen=True, array_like=True):
    """An item on its way to EngineCore: its header (`features`) and the tensors that it names, in its order."""

    header: bytes
    tensors: tuple[TensorDescriptor, ...]


_DECODER = msgspec.msgpack.Decoder(WireItem)


class ArenaResolver:
    """The arenas that this process has mapped, and the requests that it refused.

    EngineCore's main thread attaches and asks, its input thread resolves and refuses; no call needs two steps of the
    other to see one state.
    """

    def __init__(self) -> None:
        self._views: dict[str, ArenaView] = {}
        self._refused: dict[str, None] = {}

    def attach(self, arena: str, directory: str, nonce: str) -> bool:
        """Map an arena; True if it holds the nonce (hex)."""
        if arena in self._views:
            return self._views[arena].nonce.hex() == nonce
        try:
            view = ArenaView.open(arena, directory)
        except HandoverFailed as error:
            logger.warning("EngineCore does not map the arena: %s", error.message)
            return False
        if view.nonce.hex() != nonce:
            view.close()
            return False
        self._views[arena] = view
        return True

    def detach(self, arena: str) -> None:
        """Unmap an arena of which no request reads any more. Idempotent.

        vLLM's requests refer to themselves (their block hasher): those that have ended still hold their items, and so
        the mapping, until they are collected.
        """
        if (view := self._views.pop(arena, None)) is not None:
            view.close()
            gc.collect()

    def resolve(self, wire: bytes) -> MultiModalKwargsItem | None:
        """The item over views of the arenas; None for whatever is not one. Never raises."""
        try:
            found = _DECODER.decode(wire)
            return decode_item(found.header, [self._views[t.range.arena].tensor(t) for t in found.tensors])
        except Exception:  # see the theory of operation: whatever it is, it must not leave this thread
            logger.exception("an item cannot be read from its arena; its request is refused")
            return None

    def refuse(self, request_id: str) -> None:
        """Remember a request that could not be read; the oldest are forgotten."""
        self._refused[request_id] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def has_refused(self, request_id: str) -> bool:
        return request_id in self._refused


#: One per process: decoders are made by vLLM, which has no place for an argument of ours.
RESOLVER = ArenaResolver()


class ArenaDecoder(ItemDecoder):
    """vLLM's decoder, which makes items of ours, too."""

    _faulted = False

    def decode(self, bufs: Any) -> Any:
        self._faulted = False
        found = super().decode(bufs)
        if self._faulted and isinstance(found, EngineCoreRequest):
            found.mm_features = Unreadable()
        return found

    def decode_item(self, obj: dict[str, Any]) -> MultiModalKwargsItem:
        if KEY not in obj:
            return super().decode_item(obj)
        item = RESOLVER.resolve(obj[KEY])
        self._faulted = self._faulted or item is None
        return MultiModalKwargsItem() if item is None else item


class Unreadable:
    """Stands in `EngineCoreRequest.mm_features` for features that could not be read."""
