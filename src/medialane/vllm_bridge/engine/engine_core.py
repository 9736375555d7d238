"""Our changes to an EngineCore process: its decoder, and utilities that the front end calls by name.

Utilities run between two steps, in EngineCore's main thread. If they are missing (VLLM_PLUGINS excludes us, or vLLM has
changed), calling them fails, and features are sent in the message instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import astuple

from medialane.runtime.linux import signal_on_parent_death
from medialane.types.errors import InvalidFeature
from medialane.vllm_bridge.engine.embedding_connector import EmbeddingConnector
from medialane.vllm_bridge.engine.engine_embeddings import measure
from medialane.vllm_bridge.items.arena_tensors import RESOLVER, ArenaDecoder, Unreadable
from medialane.vllm_bridge.learned.embeds import try_embeds
from medialane.vllm_bridge.seams import engine_core
from medialane.vllm_bridge.seams.encoder_cache import connector_of, on_every_rank, only_encodes
from medialane.vllm_bridge.seams.engine import EngineCoreRequest

T = TypeVar("T")


def install() -> None:
    """Patch EngineCore in this process, or before it is forked from it. Idempotent."""
    engine_core.report_phases()
    engine_core.use_socket_folder()
    engine_core.change(
        ArenaDecoder,
        before_add=_refuse_unreadable,
        utilities={
            "medialane_attach": _attach,
            "medialane_detach": lambda _engine, arena: RESOLVER.detach(arena),
            "medialane_refused": lambda _engine, request_id: RESOLVER.has_refused(request_id),
            "medialane_die_with": _die_with,
            "medialane_attach_ranks": lambda engine, arena, directory, nonce: all(
                on_every_rank(engine, _attach, arena, directory, nonce)
            ),
            "medialane_detach_ranks": lambda engine, arena: on_every_rank(engine, _detach, arena),
            "medialane_encoder": lambda engine: on_every_rank(engine, measure),
            "medialane_try_embeds": lambda engine: on_every_rank(engine, try_embeds),
            "medialane_embeddings": lambda engine: _embeddings(engine, _totals),
            "medialane_drop_fills": lambda engine: _embeddings(engine, lambda c: c.schedule.drop_fills()),
        },
    )


def _refuse_unreadable(request: EngineCoreRequest) -> None:
    if isinstance(request.mm_features, Unreadable):
        RESOLVER.refuse(request.external_req_id or request.request_id)
        raise InvalidFeature("the features could not be read from the arena")


def _attach(process: Any, arena: str, directory: str, nonce: str) -> bool:
    """In EngineCore, and in the processes that run the model, unless that is EngineCore's own."""
    return RESOLVER.attach(arena, directory, nonce, pin=not only_encodes(process))


def _detach(_worker: Any, arena: str) -> None:
    RESOLVER.detach(arena)


def _embeddings(engine: Any, use: Callable[[EmbeddingConnector], T]) -> T | None:
    """Return what `use` returns for the scheduler's embeddings; None if it has none."""
    connector = connector_of(engine)
    return use(connector) if isinstance(connector, EmbeddingConnector) else None


def _totals(connector: EmbeddingConnector) -> tuple[int, ...]:
    return astuple(connector.schedule.counts)


def _die_with(_engine: Any, pid: int) -> bool:
    """Exit when the front end does. vLLM's own EngineCore survives a SIGKILL of its parent and keeps the device."""
    return os.getppid() == pid and signal_on_parent_death(signal.SIGKILL, parent_pid=pid)
