"""Simulated workers without a model: the caches and queues of a real engine, with computation replaced by delays.

`serve_simulated` runs any number of them in one process; `SimulatedEngine` is one engine.
"""

from medialane.testing.simulated.config import SimulatedConfig
from medialane.testing.simulated.engine import SimulatedEngine, serve_simulated
from medialane.testing.simulated.sequence import SimulatedParams

__all__ = ["SimulatedConfig", "SimulatedEngine", "SimulatedParams", "serve_simulated"]
