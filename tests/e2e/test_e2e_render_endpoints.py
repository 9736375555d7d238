"""The render endpoints answer as plain vLLM's do, from items that nobody has processed where their data are not wanted;
what they return is generated from."""

import base64

import msgspec
import pytest
from openai_http import chat, picture, text, video

pytestmark = [pytest.mark.vllm, pytest.mark.thread]

RENDER = "/v1/chat/completions/render"
ASK = text("Describe the picture.")

BODIES = {
    "text": chat(ASK),
    "one image": chat(picture(60), ASK),
    "three images, one of them twice": chat(picture(61), picture(62, 640, 480), text("and"), picture(61), ASK),
    "a video and an image": chat(video(63), picture(64, 200, 300), ASK),
}


def comparable(rendered):
    """An answer without its random id, and without hashes, which are ours. Items are decoded: the order of their fields
    is that of a set, which differs from process to process."""
    features = rendered["features"]
    if features is not None:
        data = features["kwargs_data"] or {}
        features = {
            **features,
            "mm_hashes": {name: len(hashes) for name, hashes in features["mm_hashes"].items()},
            "kwargs_data": {
                name: [msgspec.msgpack.decode(base64.b64decode(item)) for item in data[name]] for name in data
            },
        }
    return {**rendered, "request_id": None, "features": features}


def decoded(item):
    return msgspec.msgpack.decode(base64.b64decode(item))


@pytest.mark.parametrize("name", BODIES)
async def test_answer_equals_plain_vllms(ours, plain, name):
    body = {**BODIES[name], "mm_payload": "none"}
    answer, right = await ours.succeed(body, RENDER), await plain.succeed(body, RENDER)
    assert comparable(answer.json) == comparable(right.json)
    if name != "text":
        assert answer.headers["x-medialane-media"] == "predicted"


async def test_tensors_equal_plain_vllms_also_on_repeats(ours, plain):
    body = {**BODIES["one image"], "mm_payload": "tensors"}
    right = comparable((await plain.succeed(body, RENDER)).json)
    for _ in range(2):
        answer = await ours.succeed(body, RENDER)
        assert comparable(answer.json) == right
        assert answer.headers["x-medialane-media"] == "prepared"


async def test_rendered_hashes_are_those_of_the_chat_that_follows(ours):
    body = {**BODIES["three images, one of them twice"], "medialane": {"report": True}}
    rendered = (await ours.succeed({**body, "mm_payload": "none"}, RENDER)).json
    answer = (await ours.succeed({**body, "max_tokens": 1}, "/v1/chat/completions")).json
    assert rendered["features"]["mm_hashes"]["image"] == [item["mm_hash"] for item in answer["medialane"]["items"]]
    assert rendered["token_ids"] == answer["prompt_token_ids"]


async def test_answer_is_derendered_as_by_plain_vllm(ours, plain):
    rendered = (await ours.succeed(BODIES["text"], RENDER)).json
    generated = (await ours.succeed(rendered, "/inference/v1/generate")).json
    chat_request = {"model": ours.model, **BODIES["text"]}
    body = {"generate_response": generated, "chat_request": chat_request, "prompt_token_ids": rendered["token_ids"]}
    path = "/v1/chat/completions/derender"
    answer, right = (await ours.succeed(body, path)).json, (await plain.succeed(body, path)).json
    assert {**answer, "created": 0} == {**right, "created": 0}
    assert answer["choices"][0]["message"]["content"] == (await ours.succeed(BODIES["text"])).content
