"""What happened: timelines of requests, metrics for Prometheus, logging.

Import the files themselves: `timeline` is all that most of the house needs, and costs nothing.
"""

__all__: list[str] = []
