import asyncio

import pytest


@pytest.fixture(autouse=True)
async def _starting_a_process_takes_what_it_takes():
    """A supervisor forks on its event loop, which serves nothing else; on a busy machine a fork takes a second."""
    asyncio.get_running_loop().slow_callback_duration = 10
