"""A process of simulated workers: no vLLM, no model."""

from __future__ import annotations

import uvloop

from medialane.config import Config
from medialane.worker.simulated import serve_simulated


def run(config: Config, model: str, listen: str) -> int:
    """Serve at `listen` until a signal (0) or until a worker fails. Raises StartupFailed."""
    return uvloop.run(
        serve_simulated(
            config.simulated,
            config.worker,
            config.rpc,
            model=model,
            listen=listen,
            arena_directory=config.arena.directory,
        )
    )
