"""What an operator sees and does: vLLM's metrics of every worker, and its administrative routes."""

import socket

import pytest
from openai_http import chat, picture, text

from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("What is in the picture?")


def families(page):
    """vLLM's own, with the labels that their samples have."""
    return {s.name: set(s.labels) for s in page.samples if s.name.startswith("vllm:")}


async def test_every_plain_vllm_metric_is_exposed_per_worker(ours, plain, serve):
    names = {f"{socket.gethostname()}/{number}" for number in range(2)}
    for server in (ours, plain):
        await server.succeed(chat(picture(90), ASK))

    async def both_are_shown() -> bool:
        return set((await ours.metrics()).by("vllm:num_requests_running", "worker")) == names

    await eventually(both_are_shown, "both workers have connected", 60)
    shown, right = families(await ours.metrics()), families(await plain.metrics())
    assert right.keys() - shown.keys() == set()
    workers_own = {name for name, labels in shown.items() if "worker" in labels}
    assert len(workers_own) > 60
    assert all(shown[name] - {"worker"} == right[name] for name in workers_own & right.keys())


async def test_requests_and_tokens_are_counted_immediately(ours):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    before = [(await ours.metrics()).value(name) for name in names]
    usage = (await ours.succeed(chat(picture(91), ASK))).json["usage"]
    after = [(await ours.metrics()).value(name) for name in names]
    counted = [usage["prompt_tokens"], usage["completion_tokens"], 1]
    assert [now - then for now, then in zip(after, before, strict=True)] == counted


async def test_http_request_metrics_match_plain_vllm(ours, plain):
    counted = {"handler": "/v1/chat/completions", "method": "POST", "status": "2xx"}
    for server in (ours, plain):
        before = (await server.metrics()).value("http_requests_total", **counted)
        await server.succeed(chat(ASK))
        assert (await server.metrics()).value("http_requests_total", **counted) == before + 1


async def test_reset_empties_the_prefix_cache_of_every_worker(ours):
    body = chat(picture(92), ASK)
    first = (await ours.succeed(body)).json["usage"]
    second = (await ours.succeed(body)).json["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] > 0
    assert (await ours.succeed({}, "/reset_prefix_cache")).json == {"success": True}
    assert (await ours.metrics()).value("medialane_routing_blocks") == 0
    third = (await ours.succeed(body)).json["usage"]
    assert third["prompt_tokens"] == first["prompt_tokens"]
    assert not (third["prompt_tokens_details"] or {}).get("cached_tokens")


@pytest.mark.parametrize("path", ["/reset_mm_cache", "/reset_encoder_cache"])
async def test_resetting_caches_does_not_change_outputs(ours, path):
    body = chat(picture(93), ASK)
    right = (await ours.succeed(body)).ids
    await ours.succeed({}, path)
    assert (await ours.succeed(body)).ids == right


async def test_pause_stops_all_workers_until_they_are_resumed(ours):
    assert (await ours.get("/is_paused")).json == {"is_paused": False}
    try:
        assert (await ours.succeed({}, "/pause?mode=keep")).json == {"status": "paused"}
        assert (await ours.get("/is_paused")).json == {"is_paused": True}
        assert (await ours.get("/is_sleeping")).json == {"is_sleeping": True}  # vLLM's own: it counts as level 0
    finally:
        assert (await ours.succeed({}, "/resume")).json == {"status": "resumed"}
    assert (await ours.get("/is_paused")).json == {"is_paused": False}
    await ours.succeed(chat(ASK))


async def test_sleep_level_0_and_wake_up(ours, plain):
    for server in (ours, plain):
        assert (await server.succeed({}, "/sleep?level=0")).json == {"status": "sleeping", "level": 0}
        assert (await server.get("/is_sleeping")).json == {"is_sleeping": True}
        assert (await server.succeed({}, "/wake_up?tags=scheduling")).json["status"] == "awake"
        assert (await server.get("/is_sleeping")).json == {"is_sleeping": False}
        await server.succeed(chat(ASK))
