"""Settings of a worker."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts for the engine. They are long, since an engine step may take seconds on a busy CPU."""

    ping_interval_s: Annotated[float, msgspec.Meta(description="interval of the engine's liveness check")] = 2.0
    ping_timeout_s: Annotated[
        float,
        msgspec.Meta(description="timeout of the engine's liveness check; the worker exits after two missed checks"),
    ] = 60.0
    release_timeout_s: Annotated[
        float,
        msgspec.Meta(description="how long the engine may take to release an aborted request before the worker exits"),
    ] = 60.0
    stop_timeout_s: Annotated[float, msgspec.Meta(description="how long the engine may take to stop at shutdown")] = (
        20.0
    )

    def validate(self) -> None:
        """Raise StartupFailed with the name of an invalid setting."""
        for name in ("ping_interval_s", "ping_timeout_s", "release_timeout_s", "stop_timeout_s"):
            if getattr(self, name) <= 0:
                raise StartupFailed(f"worker {name} must be positive")
