"""What operators see of a whole server over real vLLM."""

import pytest
from openai_http import chat, long_chat, picture, text

from waiting import eventually

pytestmark = pytest.mark.vllm

#: Of a streamed answer about a new image.
STEPS = {"upload", "intake", "parse", "render", "store", "fetch", "decode", "process", "assemble", "route", "handover"}
STEPS |= {"transit", "queue", "prefill"}


async def images(ours, query):
    answer = await ours.get(f"/medialane/requests?modality=image&{query}")
    assert answer.status == 200, answer.json
    return answer.json["requests"]


async def test_live_request_with_an_image_is_seen_with_its_stages(ours):
    async with ours.opened(long_chat(text("Look at"), picture(7701, 320, 240), stream=True, n=1)) as response:
        await response.content.readuntil(b"data: {")

        async def in_answer():
            return [each["stage"] for each in await images(ours, "live=true")] == ["answer"]

        await eventually(in_answer, "its answer has begun", 20)
        (live,) = await images(ours, "live=true")
    (item,) = live["items"]
    assert (item["outcome"], item["width"], item["height"], item["tokens"]) == ("new", 320, 240, 99)
    assert (live["prompt_tokens"], live["streams"], live["status"]) == (live["prompt_tokens"], True, 200)
    assert set(live["stages_ms"]) == {*STEPS, "answer"}
    assert live["generated_tokens"] > 0
    path = f"/medialane/requests/{live['id']}"

    async def has_ended():
        return (await ours.get(path)).json["stage"] is None

    await eventually(has_ended, "it has ended with its client", 20)
    ended = (await ours.get(path)).json
    assert ended["error"]["code"] == "client_disconnected"
    assert ended["decision"]["worker"] == ended["worker"]
    assert picture(7701, 320, 240)["image_url"]["url"][30:60] not in str(ended)


async def test_state_has_workers_store_and_cache_outcomes(ours):
    body = chat(text("Look at"), picture(7702, 320, 240))
    await ours.succeed(body)
    again = await ours.succeed(body)
    state = (await ours.get("/medialane/state")).json
    assert state["workers"]["states"] == {"ready": 2}
    assert all(worker["encoder_cache"]["size"] for worker in state["workers"]["listed"])
    assert state["store"]["state"] == "ready"
    assert state["store"]["arena"]["processed_bytes"] > 0
    assert state["caches"]["items"]["hit"] >= 1
    newest = (await images(ours, "limit=1"))[0]
    usage = again.json["usage"]
    assert (newest["prompt_tokens"], newest["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert newest["cached_tokens"] == (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    assert newest["ttft_ms"] < newest["total_ms"]


async def test_server_may_have_no_page_and_no_data_of_it(ours, gateways):
    paths = ("state", "requests", "nothing")
    assert [(await ours.get(f"/medialane/{path}")).status for path in paths] == [200, 200, 404]
    assert [(await gateways["url"].get(f"/medialane/{path}")).status for path in paths] == [404, 404, 404]
