"""Settings of the supervisor."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed

MIB = 1 << 20


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The number of workers, and the timeouts of starts, stops and restarts."""

    num_workers: Annotated[int, msgspec.Meta(description="vLLM workers on this machine")] = 1
    single_gpu: Annotated[
        bool,
        msgspec.Meta(
            description="let all workers share the first GPU and split its memory, one starting after another"
        ),
    ] = False
    start_timeout_s: Annotated[
        float, msgspec.Meta(description="longest time until a worker has loaded its model and the gateway answers")
    ] = 1800.0
    stop_timeout_s: Annotated[
        float, msgspec.Meta(description="how long a worker may take to stop before it is killed")
    ] = 40.0
    restart_initial_s: Annotated[
        float, msgspec.Meta(description="delay before a process that exited is restarted; doubles each time")
    ] = 1.0
    restart_max_s: Annotated[float, msgspec.Meta(description="longest delay before a restart")] = 30.0
    restart_reset_s: Annotated[float, msgspec.Meta(description="uptime after which the restart delay is reset")] = 60.0
    max_log_bytes: Annotated[
        int, msgspec.Meta(description="size at which a process's log file is rotated; the newer half is kept as .old")
    ] = 16 * MIB

    def validate(self) -> None:
        """Raise StartupFailed naming the invalid setting."""
        if self.num_workers < 1:
            raise StartupFailed("num_workers must be at least 1")
        if not 0 < self.restart_initial_s <= self.restart_max_s:
            raise StartupFailed("restart_initial_s must be positive and at most restart_max_s")
        for name in ("start_timeout_s", "stop_timeout_s", "restart_reset_s"):
            if getattr(self, name) <= 0:
                raise StartupFailed(f"{name} must be positive")
        if self.max_log_bytes < MIB:
            raise StartupFailed("max_log_bytes must be at least 1MiB")
