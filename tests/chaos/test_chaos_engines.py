"""What has an engine of its own, or a whole model: a scenario over two workers with real vLLM."""

import pytest
from chaotic_serve import ready, stop_leaves_nothing, survives
from injections import Chaos
from scenario import CUTS, ENGINE, KILLS, OTHERS, STOPS, Scenario

pytestmark = [pytest.mark.vllm, pytest.mark.whole]

SEED = 146
SECONDS = 45.0
#: Its worker is away for half a minute: what loses one comes more often than the others.
ACTIONS = (*ENGINE, *KILLS, *STOPS, *CUTS, *OTHERS)
#: Two workers may be away at once, and start after each other.
ENDED_S = 120.0
ENGINE_KIND, FLAGS = "vllm", ("--workers", "2", "--preparers", "1")


@pytest.mark.timeout(0)
async def test_no_request_is_lost_or_wrong_and_nothing_is_left(serving, shared_memory, chaos_seed, chaos_s):
    processes, client = await ready(serving, num_workers=2)
    scenario = Scenario(chaos_seed or SEED, chaos_s or SECONDS, ACTIONS)
    await survives(
        processes,
        client,
        scenario,
        Chaos(processes, client),
        shared_memory=shared_memory,
        with_embeds=True,
        ended_s=ENDED_S,
    )


async def test_stop_leaves_nothing(serving, shared_memory, runtime_directory):
    processes, _ = await ready(serving, num_workers=2)
    await stop_leaves_nothing(processes, shared_memory, runtime_directory)
