"""Processes of a supervisor for the time of a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from medialane.cluster import Supervisor


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """Run the supervisor's processes: ready inside the block, stopped after it. Raises StartupFailed."""
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()
