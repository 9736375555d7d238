"""Workers with real engines that join a gateway, and what they show to scrapers and probes."""

import aiohttp
import pytest
from openai_http import chat, picture, text
from prometheus_client.parser import text_string_to_metric_families

from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("What is in the picture?")

#: Counted by the part of vLLM that runs in the gateway, and by vLLM's route for sleep mode, once that was called.
OF_THE_API_SERVER = ("vllm:tool_call_parser_invocations", "vllm:sleep_mode_operation")


async def get(port, path):
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


def families(page):
    """vLLM's families by name: their types, and the names and labels of their samples."""
    return {
        family.name: (family.type, {(sample.name, frozenset(sample.labels)) for sample in family.samples})
        for family in text_string_to_metric_families(page)
        if family.name.startswith("vllm:")
    }


async def test_gateway_that_lists_no_workers_serves_with_those_that_join(gateways, plain):
    client = gateways["joined"]

    async def both_have_joined() -> bool:
        return (await client.metrics()).value("medialane_worker_state", state="ready") == 2

    await eventually(both_have_joined, "both workers have joined", 60)
    body = chat(picture(95), ASK)
    assert (await client.succeed(body)).ids == (await plain.succeed(body)).ids
    page = await client.metrics()
    assert page.value("medialane_transfer_fallbacks_total") == 0
    assert len(page.by("vllm:num_requests_running", "worker")) == 2


async def test_metrics_of_a_worker_are_those_of_plain_vllm(ours, plain, plain_vllm, metrics_port):
    for server in (ours, plain):
        await server.succeed(chat(picture(96), ASK))
    right = families((await get(int(plain_vllm.base_url.rsplit(":", 1)[1].partition("/")[0]), "/metrics"))[1])
    for port in (metrics_port, metrics_port + 1):
        status, page = await get(port, "/metrics")
        assert status == 200
        shown = families(page)
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
            assert shown[f"vllm:{name}"] == right[f"vllm:{name}"]
        assert {name: found for name, found in shown.items() if right.get(name) != found} == {}
        assert [name for name in right.keys() - shown.keys() if not name.startswith(OF_THE_API_SERVER)] == []
        assert "medialane_worker_engine_up 1.0" in page


async def test_workers_are_healthy_and_ready(ours, metrics_port):
    await ours.succeed(chat(ASK))
    for port in (metrics_port, metrics_port + 1):
        assert await get(port, "/health") == (200, "")
        assert await get(port, "/ready") == (200, "")
