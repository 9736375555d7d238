"""Simulated workers without a model: the caches and queues of a real engine, with computation replaced by delays.

`serve_simulated` runs any number of them in one process; `SimulatedEngine` is one engine.
"""

from medialane.worker.simulated.config import SimulatedConfig
from medialane.worker.simulated.engine import SimulatedEngine, SimulatedParams
from medialane.worker.simulated.serve import serve_simulated

__all__ = ["SimulatedConfig", "SimulatedEngine", "SimulatedParams", "serve_simulated"]
