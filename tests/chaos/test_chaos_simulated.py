"""Everything that can be done to the processes of `serve`, at random times, with simulated workers: most of what may go
wrong does not depend on an engine, and these start in milliseconds."""

import pytest
from chaotic_serve import ready, stop_leaves_nothing, survives
from injections import Chaos
from scenario import CUTS, KILLS, MALFORMED, OTHERS, STOPS, Scenario

pytestmark = [pytest.mark.vllm, pytest.mark.whole]

#: In its seconds there are all kills and cuts, and most of the others; `make chaos` runs other seeds, for longer.
SEED = 3473
SECONDS = 45.0
ACTIONS = (*KILLS, *STOPS, *CUTS, *MALFORMED, *OTHERS)
#: Restarts included.
ENDED_S = 60.0
ENGINE_KIND, FLAGS = "simulated", ("--workers", "3", "--preparers", "2")


@pytest.mark.timeout(0)
async def test_no_request_is_lost_or_wrong_and_nothing_is_left(serving, shared_memory, chaos_seed, chaos_s):
    processes, client = await ready(serving, num_workers=3)
    scenario = Scenario(chaos_seed or SEED, chaos_s or SECONDS, ACTIONS)
    await survives(
        processes,
        client,
        scenario,
        Chaos(processes, client),
        shared_memory=shared_memory,
        with_embeds=False,
        ended_s=ENDED_S,
    )


async def test_stop_leaves_nothing(serving, shared_memory, runtime_directory):
    processes, _ = await ready(serving, num_workers=3)
    await stop_leaves_nothing(processes, shared_memory, runtime_directory)
