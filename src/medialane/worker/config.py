"""Settings of a worker."""

from __future__ import annotations

import msgspec
from msgspec import field

from medialane.core.setting import PositiveFloat, check_bounds


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts for the engine. They are long, since an engine step may take seconds on a busy CPU."""

    ping_interval_s: PositiveFloat = field(default=2.0, name="worker-ping-interval")
    """interval of the engine's liveness check"""
    ping_timeout_s: PositiveFloat = field(default=60.0, name="worker-ping-timeout")
    """timeout of the engine's liveness check; the worker exits after two missed checks"""
    release_timeout_s: PositiveFloat = field(default=60.0, name="worker-release-timeout")
    """how long the engine may take to release an aborted request before the worker exits"""
    stop_timeout_s: PositiveFloat = field(default=20.0, name="worker-stop-timeout")
    """how long the engine may take to stop at shutdown"""

    def validate(self) -> None:
        """Raise StartupFailed with the name of an invalid setting."""
        check_bounds(self)
