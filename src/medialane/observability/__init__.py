"""Observability: timelines of requests, Prometheus metrics, logging.

Import the modules directly: most packages need only `timeline`, which has no dependencies.
"""

__all__: list[str] = []
