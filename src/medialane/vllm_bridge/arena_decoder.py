"""EngineCore's end of the zero-copy hand-over: tensors that arrive as descriptors become views of a mapped arena.

Theory of operation. A worker's front end sends requests to its EngineCore as msgpack; where a tensor lies in an arena
that EngineCore has mapped, `arena_encoder` puts `{"medialane": [arena, entry offset, entry nbytes, generation, tensor
offset]}` in its place. EngineCore's input thread decodes requests with `MsgpackDecoder`, a name that it looks up in
its module when it starts: `install` puts a subclass there that resolves such a descriptor.

An exception in that thread would end it silently, and every later request would hang. So the resolver never raises:
what it cannot resolve becomes zeros of the right shape, and the request is marked. A marked request is refused one step
later, in `preprocess_add_request`, whose exceptions vLLM does catch: it fails alone, before it is scheduled, and
nothing is computed or cached from the zeros.

`medialane_attach` and `medialane_faults` are added to EngineCore for the front end to call as utilities. Everything
here leans on private seams of vLLM 0.32, pinned by `tests/contract/test_vllm_engine_plugin.py`; where they are
missing, attaching fails and features travel in the message instead.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.engine import EngineCoreRequest, core
from vllm.v1.serial_utils import MsgpackDecoder, OOBTensorProvider

from medialane.arena import ArenaView
from medialane.core.errors import HandoverFailed, InvalidFeature
from medialane.core.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.vllm_bridge.features import tensor_over

logger = logging.getLogger(__name__)

#: The key of our descriptors in the place of a tensor.
META = "medialane"


class ArenaResolver:
    """The arenas that this process has mapped. `attach` is called by EngineCore's main thread, `resolve` by its input
    thread."""

    def __init__(self) -> None:
        self._views: dict[str, ArenaView] = {}
        self.num_faults = 0

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
        """A view of the tensor's bytes; None, counted as a fault, for whatever is not one. Never raises."""
        try:
            arena, offset, nbytes, generation, tensor_offset = meta[META]
            spec = TensorSpec(dtype, tuple(shape))  # type: ignore[arg-type]  # tensor_over refuses other dtypes
            entry = ArenaRange(arena, offset, nbytes, generation)
            view = self._views[arena]
            return tensor_over(spec, view.tensor(TensorDescriptor(spec, entry, tensor_offset)))
        except Exception:  # see the theory of operation: whatever it is, it must not leave this thread
            self.num_faults += 1
            logger.exception("a tensor cannot be read from its arena; its request is refused")
            return None


#: One per process: decoders are made by vLLM, which has no place for an argument of ours.
_RESOLVER = ArenaResolver()


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
            found.mm_features = _Refused()
        return found

    def _provide(self, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> torch.Tensor:
        if META not in meta:
            if self._inner is None:
                raise ValueError("a tensor came out of band, by a way that this engine does not know")
            return self._inner(dtype, shape, meta)
        found = _RESOLVER.resolve(dtype, shape, meta)
        if found is None:
            self._faulted = True
            return torch.empty(0)
        return found


class _Refused:
    """Stands in `EngineCoreRequest.mm_features` for features that could not be read."""


def install() -> None:
    """Change this process's EngineCore. Idempotent."""
    if core.MsgpackDecoder is ArenaDecoder:
        return
    core.MsgpackDecoder = ArenaDecoder
    inner = core.EngineCore.preprocess_add_request

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        if isinstance(request.mm_features, _Refused):
            raise InvalidFeature("the features could not be read from the arena")
        return inner(self, request)

    core.EngineCore.preprocess_add_request = preprocess_add_request
    core.EngineCore.medialane_attach = _attach
    core.EngineCore.medialane_faults = _faults


def _attach(_engine: Any, arena: str, directory: str, nonce: str) -> bool:
    return _RESOLVER.attach(arena, directory, nonce)


def _faults(_engine: Any) -> int:
    return _RESOLVER.num_faults
