"""EngineCore, in its own process or in its parent before the fork."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.engine import core

from medialane.vllm_bridge.seams.engine import EngineCoreRequest, ItemDecoder


def change(
    decoder: type[ItemDecoder],
    *,
    before_add: Callable[[EngineCoreRequest], None],
    utilities: Mapping[str, Callable[..., Any]],
) -> None:
    """Make EngineCore decode requests with `decoder` and serve calls of `utilities`. Idempotent.

    `before_add` gets each request, in the input thread; what it raises fails only that request.
    """
    if core.MsgpackDecoder is decoder:
        return
    core.MsgpackDecoder = decoder
    inner = core.EngineCore.preprocess_add_request

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        before_add(request)
        found = inner(self, request)
        # The input thread's frame keeps this message alive until the next one; its items would pin their arena.
        request.mm_features = None
        return found

    core.EngineCore.preprocess_add_request = preprocess_add_request
    for name, utility in utilities.items():
        setattr(core.EngineCore, name, utility)
