"""Which worker a request goes to."""

from medialane.routing.least_loaded import LeastLoaded

__all__ = ["LeastLoaded"]
