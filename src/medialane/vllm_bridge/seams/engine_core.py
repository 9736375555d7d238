"""EngineCore, in its own process or in the one that will fork it."""

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
    """Have EngineCore decode requests by `decoder`, and answer calls of `utilities`. Idempotent.

    `before_add` sees each request in the input thread; the request fails by what it raises, alone.
    """
    if core.MsgpackDecoder is decoder:
        return
    core.MsgpackDecoder = decoder
    inner = core.EngineCore.preprocess_add_request

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        before_add(request)
        found = inner(self, request)
        # The input thread's frame keeps this message until the next one: not its items, and with them their arena.
        request.mm_features = None
        return found

    core.EngineCore.preprocess_add_request = preprocess_add_request
    for name, utility in utilities.items():
        setattr(core.EngineCore, name, utility)


__all__ = ["change"]
