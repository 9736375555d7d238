"""A worker's process: the engine, then the worker around it. Imported once vLLM's environment is set."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import uvloop

from medialane.config import Config
from medialane.vllm_bridge.engine import build_engine
from medialane.worker.serve import serve_worker


def run(config: Config, model: str, vllm_args: Sequence[str], listen: str) -> int:
    """Load the engine, then serve at `listen` until a signal (0) or until the engine is lost. Raises StartupFailed."""
    # Until the worker listens for signals itself: leave by unwinding, so that vLLM ends the processes it has started.
    signal.signal(signal.SIGTERM, _leave)
    engine = build_engine(
        model,
        vllm_args,
        arena_directory=config.arena.directory,
        release_timeout_s=config.worker.release_timeout_s,
    )
    return uvloop.run(serve_worker(config.worker, config.rpc, engine, listen, arena_directory=config.arena.directory))


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
