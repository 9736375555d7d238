"""Prompts of token ids with processed items: by tensors, references or hashes, the tokens equal the chat's."""

import base64
import json

import msgspec
import pytest
from openai_http import chat, picture, text, video
from safetensors.torch import load
from vllm.entrypoints.scale_out.token_in_token_out import mm_serde

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.thread,
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
ASK = text("Describe the picture.")
UNKNOWN = "f" * 64


def asked(seed, **options):
    return chat(text("First."), picture(seed, 320, 240), text("Then."), picture(seed + 1, 280, 364), ASK, **options)


async def rendered(server, body, payload):
    return (await server.succeed({**body, "mm_payload": payload}, RENDER)).json


def by_hash(request):
    return {**request, "features": {**request["features"], "kwargs_data": None, "mm_metadata": None}}


def with_features(request, **fields):
    return {**request, "features": {**request["features"], **fields}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("payload", ["tensors", "references", "hashes"])
async def test_tokens_are_those_of_the_chat(ours, plain, payload, stream):
    body = asked(80)
    right = await plain.succeed(body)
    request = await rendered(ours, body, "tensors" if payload == "hashes" else payload)
    request = by_hash(request) if payload == "hashes" else request
    answer = await ours.succeed({**request, "stream": stream, "return_token_ids": True}, GENERATE)
    assert answer.ids == right.ids
    first = answer.events[0] if stream else answer.json
    assert first["prompt_token_ids"] == right.json["prompt_token_ids"]
    assert first["mm_placeholders"] == request["features"]["mm_placeholders"]


async def test_hash_of_a_chat_is_known_and_named_in_another_prompt(ours, plain):
    """A trainer has ids and offsets of its own."""
    body = asked(82, medialane={"report": True})
    hashes = [item["mm_hash"] for item in (await ours.succeed(body)).json["medialane"]["items"]]
    longer = asked(82)
    longer["messages"].insert(0, {"role": "system", "content": "You look at pictures."})
    request = await rendered(plain, longer, "none")
    request = with_features(request, mm_hashes={"image": hashes})
    assert (await ours.succeed(request, GENERATE)).ids == (await plain.succeed(longer)).ids


async def test_tensors_of_another_server_have_a_key_of_their_own_and_are_sent_once(ours, plain):
    body = asked(84)
    request = await rendered(plain, body, "tensors")
    right = (await plain.succeed(body)).ids
    answers = [await ours.succeed({**request, "medialane": {"report": True}}, GENERATE) for _ in range(2)]
    assert [answer.ids for answer in answers] == [right, right]
    assert answers[0].copied_bytes > 100_000
    assert answers[1].copied_bytes == 0


@pytest.mark.parametrize(("renders", "payload"), [("ours", "tensors"), ("ours", "references"), ("plain", "tensors")])
async def test_videos_are_generated_from(request, ours, plain, renders, payload):
    body = chat(video(2), text("and"), picture(100, 200, 300), ASK)
    features = await rendered(request.getfixturevalue(renders), body, payload)
    assert (await ours.succeed(features, GENERATE)).ids == (await plain.succeed(body)).ids


async def test_tensors_under_the_hash_of_other_media_change_nothing_for_those(ours, plain):
    victim, attacker = asked(86), asked(88)
    request, other = await rendered(ours, victim, "references"), await rendered(ours, attacker, "tensors")
    poisoned = with_features(other, mm_hashes=request["features"]["mm_hashes"])
    assert (await ours.succeed(poisoned, GENERATE)).ids == (await plain.succeed(attacker)).ids
    right = (await plain.succeed(victim)).ids
    assert (await ours.succeed(victim)).ids == right
    assert (await ours.succeed(request, GENERATE)).ids == right


async def test_reused_tensors_are_found_in_the_caches_of_the_chat(ours):
    body = asked(90)
    await ours.succeed(body)
    request = await rendered(ours, body, "tensors")
    answer = await ours.succeed({**request, "medialane": {"report": True}}, GENERATE)
    assert answer.copied_bytes == 0, "the feature of the chat is used"


@pytest.mark.parametrize("salt", [None, "pepper"])
async def test_other_tenants_and_unknown_hashes_get_the_same_error(ours, salt):
    request = await rendered(ours, asked(92, cache_salt="salt"), "references")
    known = await ours.post(with_features(request) | {"cache_salt": salt}, GENERATE)
    unknown = await ours.post(
        with_features(request, kwargs_data={"image": [f"medialane:feature/{UNKNOWN}"] * 2}), GENERATE
    )
    assert known.status == unknown.status == 404
    errors = [{**answer.error, "request_id": ""} for answer in (known, unknown)]
    assert errors[0] == errors[1]
    assert (known.error["code"], known.error["param"]) == ("unknown_media", "features.kwargs_data.image[0]")


def changed(entry, field, change):
    """The tensors with another field."""
    item = msgspec.msgpack.decode(base64.b64decode(entry))
    dtype, shape, data = item[field]["data"]
    item[field]["data"] = change(dtype, shape, bytes(data.data))
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def raw(data):
    return msgspec.msgpack.Ext(3, data)


CHANGES = {
    "another dtype": ("pixel_values", lambda _, shape, data: ["int8", shape, raw(data)]),
    "fewer rows": (
        "pixel_values",
        lambda dtype, shape, data: [dtype, [shape[0] - 4, shape[1]], raw(data[: -4 * len(data) // shape[0]])],
    ),
    "another width": (
        "pixel_values",
        lambda dtype, shape, data: [dtype, [shape[0] * 2, shape[1] // 2], raw(data)],
    ),
    "fewer bytes": ("pixel_values", lambda dtype, shape, data: [dtype, shape, raw(data[:-1])]),
    "an odd grid": (
        "image_grid_thw",
        lambda dtype, shape, data: [dtype, shape, raw(data[8:16] + data[:8] + data[16:])],
    ),
    "a huge grid": ("image_grid_thw", lambda dtype, shape, data: [dtype, shape, raw(b"\x7f" * 7 + b"\x00" + data[8:])]),
    "a buffer beside the message": ("pixel_values", lambda dtype, shape, _: [dtype, shape, 1]),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_wrong_tensors_are_refused_and_the_engine_lives(ours, plain, name):
    request = await rendered(plain, asked(94), "tensors")
    entries = request["features"]["kwargs_data"]["image"]
    wrong = with_features(request, kwargs_data={"image": [changed(entries[0], *CHANGES[name]), entries[1]]})
    answer = await ours.post(wrong, GENERATE)
    assert answer.status == 400, answer.json
    assert answer.error["param"] == "features.kwargs_data.image[0]", answer.error
    assert (await ours.succeed(request, GENERATE)).ids == (await plain.succeed(asked(94))).ids


async def test_ranges_that_are_not_those_of_the_items_are_refused(ours):
    request = await rendered(ours, asked(96), "references")
    first, second = request["features"]["mm_placeholders"]["image"]
    for ranges, number in (
        ([{**first, "offset": first["offset"] + 1}, second], 0),
        ([first, {**second, "length": second["length"] - 1}], 1),
    ):
        answer = await ours.post(with_features(request, mm_placeholders={"image": ranges}), GENERATE)
        assert answer.status == 400, answer.json
        assert answer.error["param"] == f"features.mm_placeholders.image[{number}]", answer.error
    beyond = with_features(request, mm_placeholders={"image": [first, {**second, "offset": 100_000}]})
    for wrong in (beyond, with_features(request, mm_hashes={})):
        answer = await ours.post(wrong, GENERATE)
        assert answer.status == 400
        assert "mm_placeholders" in answer.error["message"]


async def fetched(server, path, **headers):
    async with server.session() as session, session.get(server.base_url + path, headers=headers) as response:
        return response.status, await response.read(), response.headers


async def test_tensors_of_a_feature_are_those_that_were_rendered(ours):
    features = (await rendered(ours, asked(98, cache_salt="salt"), "tensors"))["features"]
    for mm_hash, entry in zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True):
        path, salt = f"/medialane/v1/features/{mm_hash}", {"X-Cache-Salt": "salt"}
        _, encoded, headers = await fetched(ours, f"{path}?format=msgpack", **salt)
        assert encoded == base64.b64decode(entry)
        _, file, _ = await fetched(ours, path, **salt)
        own, metadata = tensors_in(base64.b64decode(entry)), json.loads(headers["x-medialane-feature"])
        assert {name: tensor.tolist() for name, tensor in load(file).items()} == own
        assert (metadata["normalized"], metadata["mm_hash"], len(metadata["processor"])) == ("false", mm_hash, 64)
        assert metadata == json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (UNKNOWN, 404, "unknown_media"),
        ("../../../etc/passwd", 404, None),
        ("x", 404, "unknown_media"),
        (f"{UNKNOWN}?format=pickle", 400, "invalid_request"),
    ],
)
async def test_unknown_feature_has_no_tensors(ours, path, status, code):
    answer, body, _ = await fetched(ours, f"/medialane/v1/features/{path}")
    assert answer == status
    assert code is None or json.loads(body)["error"]["code"] == code


async def test_tensors_of_another_tenant_are_not_found(ours):
    (mm_hash, _) = (await rendered(ours, asked(98, cache_salt="salt"), "references"))["features"]["mm_hashes"]["image"]
    path = f"/medialane/v1/features/{mm_hash}"
    assert (await fetched(ours, path, **{"X-Cache-Salt": "salt"}))[0] == 200
    assert (await fetched(ours, path))[0] == (await fetched(ours, f"{path}?cache_salt=salt"))[0] == 404


def tensors_in(encoded):
    """The values of an item in vLLM's encoding."""
    item = mm_serde.decode_mm_kwargs_item(base64.b64encode(encoded).decode())
    return {name: elem.data.tolist() for name, elem in item.items()}
