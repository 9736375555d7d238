"""Prompts that one worker computes and another one continues, with real vLLM: what is lost with any of the processes
costs time alone, and no KV block is kept for a reader that is gone."""

import os

import pytest
from chaotic_serve import SERVER_FLAGS, ready, stop_leaves_nothing, survives
from injections import Chaos
from kept_blocks import LEASE_S, nothing_is_kept
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE
from openai_http import OpenAiHttp
from scenario import SPLIT, Scenario

from medialane.testing.tiny_model import TINY_MODEL_ENVIRON
from medialane.tools.check import plain_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.whole]

SEED = 44
SECONDS = 240.0
#: A worker is away for a quarter of a minute: most of the time both are there, or nothing would be transferred.
BETWEEN_S = (4.0, 20.0)
NUM_ANSWERS = 1000
#: A worker that reads from one that hangs gives up after a minute; both may be away, and start after each other.
ENDED_S = 240.0
#: The shortest prompts are split, too.
ENGINE_KIND = "vllm"
FLAGS = ("--prefill", "1", "--decode", "1", "--prefill-at", "prefill", "--routing-split-tokens", "1")


@pytest.mark.timeout(0)
async def test_no_request_is_lost_or_wrong_and_no_block_is_kept(
    serving, tiny_model, shared_memory, tmp_path, chaos_seed, chaos_s
):
    environ, flags = {**TINY_MODEL_ENVIRON, **os.environ}, (*SERVER_FLAGS, ONE_PROCESS_ENGINE)
    log = tmp_path / "plain.log"
    async with plain_vllm(str(tiny_model), flags, environ=environ, log=log, program=FORKING_VLLM) as plain:
        processes, client = await ready(serving, num_workers=2)
        load = await survives(
            processes,
            client,
            Scenario(chaos_seed or SEED, chaos_s or SECONDS, SPLIT, BETWEEN_S, in_pairs=True),
            Chaos(processes, client),
            shared_memory=shared_memory,
            with_embeds=True,
            ended_s=ENDED_S,
            num_answers=NUM_ANSWERS,
            right=OpenAiHttp(plain.base_url.removesuffix("/v1"), plain.model),
        )
    await nothing_is_kept(client, 2 * LEASE_S)
    # Half of the answers are streams, whose reports are not counted.
    assert load.counts["transferred"] > NUM_ANSWERS / 10, load


async def test_stop_leaves_nothing(serving, shared_memory, runtime_directory):
    processes, _ = await ready(serving, num_workers=2)
    await stop_leaves_nothing(processes, shared_memory, runtime_directory)
