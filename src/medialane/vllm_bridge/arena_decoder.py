"""EngineCore's end of the zero-copy hand-over: tensors that arrive as descriptors become views of a mapped arena.

Theory of operation. A worker's front end sends requests to its EngineCore as msgpack; where a tensor lies in an arena
that EngineCore has mapped, `arena_encoder` puts `{"medialane": [arena, entry offset, entry nbytes, generation, tensor
offset]}` in its place. EngineCore's input thread decodes requests with `MsgpackDecoder`, a name that it looks up in
its module when it starts: `engine_core` puts a subclass there that resolves such a descriptor.

An exception in that thread would end it silently, and every later request would hang. So the resolver never raises:
what it cannot resolve becomes an empty tensor, and the request is marked. A marked request is refused one step
later, in `preprocess_add_request`, whose exceptions vLLM does catch: it fails alone, before it is scheduled, and
nothing is computed or cached from what is not there.

Both are private seams of vLLM 0.32, pinned by `tests/contract/test_vllm_engine_plugin.py`; `engine_core` puts us there.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, OOBTensorProvider

from medialane.arena import ArenaView
from medialane.core.errors import HandoverFailed
from medialane.core.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.vllm_bridge.features import tensor_over

logger = logging.getLogger(__name__)

#: The key of our descriptors in the place of a tensor.
META = "medialane"

#: Refused requests that are remembered: the front end asks as soon as it sees the error.
MAX_REFUSED = 4096


class ArenaResolver:
    """The arenas that this process has mapped, and the requests that it refused.

    EngineCore's main thread attaches and asks, its input thread resolves and refuses; no call needs two steps of the
    other to see one state.
    """

    def __init__(self) -> None:
        self._views: dict[str, ArenaView] = {}
        self._refused: dict[str, None] = {}

    def attach(self, arena: str, directory: str, nonce: str) -> bool:
        """Map an arena; True if it holds the nonce (hex). Arenas whose file is gone are let go: they have no owner."""
        for gone in [view for view in self._views.values() if not view.exists(directory)]:
            del self._views[gone.id]
            gone.close()
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

    def resolve(self, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> torch.Tensor | None:
        """A view of the tensor's bytes; None for whatever is not one. Never raises."""
        try:
            arena, offset, nbytes, generation, tensor_offset = meta[META]
            spec = TensorSpec(dtype, tuple(shape))  # type: ignore[arg-type]  # tensor_over refuses other dtypes
            entry = ArenaRange(arena, offset, nbytes, generation)
            view = self._views[arena]
            return tensor_over(spec, view.tensor(TensorDescriptor(spec, entry, tensor_offset)))
        except Exception:  # see the theory of operation: whatever it is, it must not leave this thread
            logger.exception("a tensor cannot be read from its arena; its request is refused")
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


class ArenaDecoder(MsgpackDecoder):  # type: ignore[misc]  # vllm is not typed
    """vLLM's decoder, with a provider that resolves our descriptors and leaves all others to the one given."""

    def __init__(
        self, t: Any | None = None, share_mem: bool = True, oob_tensor_provider: OOBTensorProvider | None = None
    ) -> None:
        super().__init__(t, share_mem, self._provide)
        self._inner = oob_tensor_provider
        self._faulted = False

    def decode(self, bufs: Any) -> Any:
        self._faulted = False
        found = super().decode(bufs)
        if self._faulted and isinstance(found, EngineCoreRequest):
            found.mm_features = Unreadable()
        return found

    def _provide(self, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> torch.Tensor:
        if META not in meta:
            if self._inner is None:
                raise ValueError("a tensor came out of band, by a way that this engine does not know")
            found: torch.Tensor = self._inner(dtype, shape, meta)
            return found
        resolved = RESOLVER.resolve(dtype, shape, meta)
        self._faulted = self._faulted or resolved is None
        return torch.empty(0) if resolved is None else resolved


class Unreadable:
    """Stands in `EngineCoreRequest.mm_features` for features that could not be read."""
