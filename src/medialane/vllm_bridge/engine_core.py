"""What we change in an EngineCore process: its decoder, and utilities that the front end calls by name.

Utilities run between two steps, in EngineCore's main thread. Where they are missing (VLLM_PLUGINS excludes us, or vLLM
was changed), calling them fails, and features travel inside the message instead.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm.v1.engine import EngineCoreRequest, core

from medialane.core.errors import InvalidFeature
from medialane.core.parent_death import signal_on_parent_death
from medialane.vllm_bridge.arena_decoder import RESOLVER, ArenaDecoder, Unreadable


def install() -> None:
    """Change this process's EngineCore, or the one that it will fork. Idempotent."""
    if core.MsgpackDecoder is ArenaDecoder:
        return
    core.MsgpackDecoder = ArenaDecoder
    inner = core.EngineCore.preprocess_add_request

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        if isinstance(request.mm_features, Unreadable):
            RESOLVER.refuse(request.external_req_id or request.request_id)
            raise InvalidFeature("the features could not be read from the arena")
        found = inner(self, request)
        # The input thread's frame keeps this message until the next one: not its items, and with them their arena.
        request.mm_features = None
        return found

    core.EngineCore.preprocess_add_request = preprocess_add_request
    core.EngineCore.medialane_attach = _attach
    core.EngineCore.medialane_detach = _detach
    core.EngineCore.medialane_refused = _refused
    core.EngineCore.medialane_die_with = _die_with


def _attach(_engine: Any, arena: str, directory: str, nonce: str) -> bool:
    return RESOLVER.attach(arena, directory, nonce)


def _detach(_engine: Any, arena: str) -> None:
    RESOLVER.detach(arena)


def _refused(_engine: Any, request_id: str) -> bool:
    return RESOLVER.has_refused(request_id)


def _die_with(_engine: Any, pid: int) -> bool:
    """End when the front end does. vLLM's own engine survives the kill -9 of its parent, and keeps the device."""
    return os.getppid() == pid and signal_on_parent_death(signal.SIGKILL, parent_pid=pid)
