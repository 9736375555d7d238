"""vLLM's render endpoints over our items answer as vLLM's own render server does, field by field."""

import asyncio
import base64
import io
import json
import time

import numpy as np
import pytest
import pytest_asyncio
import torch
from app_server import KEY, VLLM_ARGS, Server
from PIL import Image
from plain_render import PlainRender, PreparingBackend
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item, encode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from medialane.testing.sample_media import sample_jpeg
from medialane.vllm_bridge.frontend import CONNECTOR
from medialane.vllm_bridge.frontend.render import RenderAnswer
from medialane.vllm_bridge.seams.scale_out import encoded_item
from video_clips import clip

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning"),
]

CHAT, COMPLETIONS = "/v1/chat/completions/render", "/v1/completions/render"
RESPONSES, MESSAGES = "/v1/responses/render", "/v1/messages/render"

FLAGS = [
    *(arg for arg in VLLM_ARGS if not arg.startswith(("--middleware", "--enable-mm-embeds"))),
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=qwen3",
]

#: Random in each answer.
REQUEST_ID = "request_id"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ours(tiny_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)
        server = await Server.start(str(tiny_model), FLAGS, make_backend=PreparingBackend)
        yield server
        await server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(tiny_model, ours):
    server = await PlainRender.start(str(tiny_model), FLAGS)
    server.client.headers.update(KEY)
    yield server
    await server.close()


@pytest.fixture(autouse=True)
def connector(ours, monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)
    ours.backend.reset()
    ours.backend.predicts, ours.backend.num_prepared, ours.backend.referred = True, 0, []


def data_url(data, media_type):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def photo(seed=0, width=640, height=360):
    return {"type": "image_url", "image_url": {"url": data_url(sample_jpeg(seed, width, height), "image/jpeg")}}


def icon():
    out = io.BytesIO()
    Image.fromarray(np.arange(28 * 28 * 3, dtype=np.uint8).reshape(28, 28, 3)).save(out, "PNG")
    return {"type": "image_url", "image_url": {"url": data_url(out.getvalue(), "image/png")}}


def video(**options):
    url = data_url(clip(30, size=(160, 120)), "video/mp4")
    return {"type": "video_url", "video_url": {"url": url, **options}}


def text(words):
    return {"type": "text", "text": words}


def chat(*parts, **options):
    return {"messages": [{"role": "user", "content": [*parts]}], **options}


ASK = text("What is it?")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

BODIES = {
    "text": (CHAT, chat(ASK)),
    "text with offsets": (CHAT, chat(ASK, return_token_offsets=True)),
    "one image": (CHAT, chat(photo(), ASK)),
    "several images": (CHAT, chat(photo(0), text("and"), photo(1, 333, 500), photo(0), icon(), ASK)),
    "a video": (CHAT, chat(video(), ASK)),
    "a video and an image": (CHAT, chat(photo(2), video(), ASK)),
    "media_io_kwargs": (CHAT, chat(video(), ASK, media_io_kwargs={"video": {"num_frames": 4}})),
    "processor options": (CHAT, chat(photo(3), ASK, mm_processor_kwargs={"max_pixels": 200 * 200})),
    "sampling": (CHAT, chat(photo(), ASK, max_tokens=7, temperature=0.3, top_k=5, stop=["x"], seed=3, n=2)),
    "logprobs": (CHAT, chat(ASK, logprobs=True, top_logprobs=3, max_completion_tokens=4)),
    "tools": (CHAT, chat(photo(), ASK, tools=[TOOL])),
    "a forced tool": (CHAT, chat(ASK, tools=[TOOL], tool_choice="required")),
    "a schema": (CHAT, chat(ASK, response_format={"type": "json_object"})),
    "thinking": (CHAT, chat(photo(), ASK, chat_template_kwargs={"enable_thinking": True})),
    "salt, priority, streamed": (
        CHAT,
        chat(photo(), ASK, cache_salt="pepper", priority=0, stream=True, stream_options={"include_usage": True}),
    ),
    "truncated text": (CHAT, chat(text("word " * 300), truncate_prompt_tokens=20)),
    "turns": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [photo(4), ASK]},
                {"role": "assistant", "content": "A hill."},
                {"role": "user", "content": [text("And this?"), photo(5)]},
            ]
        },
    ),
    "prompt": (COMPLETIONS, {"prompt": "A photo of", "max_tokens": 3}),
    "prompts": (COMPLETIONS, {"prompt": ["A photo of", "A hill"], "return_token_offsets": True}),
    "a long prompt": (COMPLETIONS, {"prompt": "word " * 1200, "return_token_offsets": True, "max_tokens": 1}),
    "tokens": (COMPLETIONS, {"prompt": [[5, 6, 7], [8]], "cache_salt": "pepper"}),
    "a response": (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "What is it?"},
                        {"type": "input_image", "detail": "auto", "image_url": photo()["image_url"]["url"]},
                    ],
                }
            ],
            "request_id": "resp_1",
        },
    ),
    "a response with a tool": (
        RESPONSES,
        {"input": "Look.", "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}]},
    ),
    "a message": (
        MESSAGES,
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/jpeg",
                                "data": base64.b64encode(sample_jpeg(0, 200, 100)).decode(),
                            },
                        },
                        ASK,
                    ],
                }
            ],
        },
    ),
}


def body_of(server, name, **options):
    path, body = BODIES[name]
    return path, {"model": server.model, **body, **options}


async def rendered(ours, name, **options):
    path, body = body_of(ours, name, **options)
    response = await ours.client.post(path, json=body)
    assert response.status_code == 200, response.text[:500]
    return response


async def both(ours, plain, name, **options):
    """The answers of both servers, as lists of requests."""
    path, body = body_of(ours, name, **options)
    right = await plain.post(path, body)
    assert right.status_code == 200, right.text[:500]
    answer = await rendered(ours, name, **options)
    return [each if isinstance(each, list) else [each] for each in (answer.json(), right.json())]


def without_ids(request):
    """A rendered request without what differs between two servers: random ids, and hashes, which are ours."""
    features = dict(request["features"]) if request["features"] else None
    if features is not None:
        features["mm_hashes"] = {name: len(hashes) for name, hashes in features["mm_hashes"].items()}
        if sum(features["mm_hashes"].values()) > 1:
            features |= {name: decoded(features[name]) for name in ("kwargs_data", "mm_metadata")}
    return {**request, "features": features, REQUEST_ID: None}


def decoded(entries):
    """Serialised items as what the model gets. The bytes have more: where an item was in the tensors of its request,
    which is not used any more."""
    if entries is None:
        return None
    items = {name: [decode_mm_kwargs_item(data) for data in datas] for name, datas in entries.items()}
    return {
        f"{modality}[{number}].{name}": (elem.data.tolist(), type(elem.field), elem.field.keep_on_cpu)
        for modality, each in items.items()
        for number, item in enumerate(each)
        for name, elem in item.items()
    }


def _differing(place, mine, plain):
    if isinstance(mine, dict) and isinstance(plain, dict) and mine.keys() == plain.keys():
        for name in mine:
            yield from _differing(f"{place}.{name}", mine[name], plain[name])
    elif mine != plain:
        yield place, (mine, plain)


def assert_equal(answer, right):
    assert len(answer) == len(right)
    for mine, plain in zip(map(without_ids, answer), map(without_ids, right), strict=True):
        assert mine.keys() == plain.keys()
        differing = dict(_differing("", mine, plain))
        assert not differing


@pytest.mark.parametrize("name", BODIES)
async def test_answer_equals_vllms(ours, plain, name):
    answer, right = await both(ours, plain, name)
    assert_equal(answer, right)


@pytest.mark.parametrize("name", BODIES)
async def test_answer_without_payload_equals_vllms_and_nothing_is_processed(ours, plain, name):
    answer, right = await both(ours, plain, name, mm_payload="none")
    assert_equal(answer, right)
    assert ours.backend.num_prepared == 0


async def test_repeated_requests_have_their_tensors_again(ours):
    first, second = [(await rendered(ours, "one image")).json()["features"] for _ in range(2)]
    assert first == second
    assert first["kwargs_data"]["image"][0]
    assert first["mm_metadata"]["image"][0]


@pytest.mark.parametrize("name", ["several images", "a response", "a message"])
async def test_references_name_the_features_of_items_and_nothing_is_processed(ours, name):
    answer = (await rendered(ours, name, mm_payload="references")).json()["features"]
    assert answer["kwargs_data"] == {"image": [f"medialane:feature/{key}" for key in answer["mm_hashes"]["image"]]}
    assert answer["mm_metadata"] is None
    assert ours.backend.num_prepared == 0
    assert len(ours.backend.referred) == 1


@pytest.mark.parametrize(
    ("options", "predicts", "media"),
    [
        ({"mm_payload": "none"}, True, "predicted"),
        ({"return_mm_kwargs": False}, True, "predicted"),
        ({"mm_payload": "references"}, True, "predicted"),
        ({"mm_payload": "none"}, False, "prepared"),
        ({}, True, "prepared"),
    ],
)
async def test_answer_says_whether_items_were_processed(ours, options, predicts, media):
    ours.backend.predicts = predicts
    response = await rendered(ours, "several images", **options)
    assert response.headers["x-medialane-media"] == media


async def test_answer_to_text_says_nothing_of_media(ours):
    assert "x-medialane-media" not in (await rendered(ours, "text")).headers


async def test_unknown_payload_is_refused(ours):
    path, body = body_of(ours, "one image", mm_payload="pixels")
    response = await ours.client.post(path, json=body)
    assert response.status_code == 400
    assert "mm_payload" in response.text


async def test_item_that_only_a_worker_can_place_is_refused(ours):
    ours.backend.is_unexpanded = True
    try:
        for payload in ("tensors", "none"):
            path, body = body_of(ours, "one image", mm_payload=payload)
            response = await ours.client.post(path, json=body)
            assert response.json()["error"]["code"] == "feature_unsupported"
    finally:
        ours.backend.is_unexpanded = False


async def test_openapi_document_has_the_endpoints_and_payloads(ours):
    document = (await ours.client.get("/openapi.json")).json()
    assert {CHAT, COMPLETIONS, RESPONSES, MESSAGES} <= document["paths"].keys()
    payload = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]["mm_payload"]
    assert payload["enum"] == ["tensors", "none", "references"]


async def test_length_is_that_of_the_body(ours):
    for name in ("one image", "several images", "text"):
        response = await rendered(ours, name)
        assert int(response.headers["content-length"]) == len(response.content)


DERENDERED = {
    "chat": (
        "/v1/chat/completions/derender",
        {
            "generate_response": {
                "request_id": "r",
                "choices": [{"index": 0, "token_ids": [40, 41], "finish_reason": "length"}],
            },
            "prompt_tokens": 7,
            "chat_request": chat(photo(), ASK, tools=[TOOL]),
        },
    ),
    "completion": (
        "/v1/completions/derender",
        {
            "generate_responses": [
                {"request_id": f"r-{number}", "choices": [{"index": 0, "token_ids": [50, 51 + number]}]}
                for number in range(2)
            ]
        },
    ),
}


@pytest.mark.parametrize("name", DERENDERED)
async def test_derendered_answer_equals_vllms(ours, plain, name):
    path, body = DERENDERED[name]
    body = {"model": ours.model, **body}
    if "chat_request" in body:
        body["chat_request"] = {"model": ours.model, **body["chat_request"]}
    answer, right = await ours.client.post(path, json=body), await plain.post(path, body)
    assert (answer.status_code, right.status_code) == (200, 200), (answer.text[:300], right.text[:300])
    assert {**answer.json(), "created": 0} == {**right.json(), "created": 0}


async def test_derendered_stream_equals_vllms(ours, plain):
    path, texts = "/v1/chat/completions/derender", []
    request = {"model": ours.model, **chat(ASK)}
    state = dict.fromkeys((ours, plain))
    for number, tokens in enumerate([[40], [41, 42], [43]]):
        choice = {"index": 0, "token_ids": tokens, "finish_reason": "stop" if number == 2 else None}
        chunk = {"request_id": "r", "choices": [choice]}
        answers = []
        for server in (ours, plain):
            body = {"stream": True, "generate_chunk": chunk, "stream_state": state[server], "chat_request": request}
            body["prompt_token_ids"] = [5, 6]
            response = await (plain.post(path, body) if server is plain else ours.client.post(path, json=body))
            assert response.status_code == 200, response.text[:300]
            answer = response.json()
            state[server] = answer["stream_state"]
            answers.append({**answer["chunk"], "created": 0})
        assert answers[0] == answers[1]
        delta = answers[0]["choices"][0]["delta"]
        texts.append(delta.get("content") or delta.get("reasoning"))
    assert any(texts)


async def test_render_without_the_flag_is_forbidden_as_by_vllm(tiny_model):
    flags = [flag for flag in FLAGS if flag != "--enable-scale-out"]
    server = await Server.start(str(tiny_model), flags)
    try:
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/chat/completions/derender"):
            response = await server.client.post(path, json={"model": server.model, **chat(ASK)})
            assert response.status_code == 403
            assert response.json()["error"]["type"] == "PermissionDeniedError"
    finally:
        await server.close()


@pytest.mark.parametrize(("default", "entry"), [("none", None), ("references", "medialane:feature/")])
async def test_servers_payload_is_the_default_and_a_requests_own_wins(tiny_model, default, entry):
    server = await Server.start(str(tiny_model), FLAGS, make_backend=PreparingBackend, render_payload=default)
    try:
        for name in ("one image", "a message", "a response"):
            answer = (await rendered(server, name)).json()["features"]["kwargs_data"]
            assert answer is None if entry is None else answer["image"][0].startswith(entry)
            own = "tensors" if default == "none" else "none"
            answer = (await rendered(server, name, mm_payload=own)).json()["features"]["kwargs_data"]
            assert (answer is None) == (own == "none")
    finally:
        await server.close()


def item_of(*sizes):
    """An item with uint8 tensors of these sizes."""
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    return MultiModalKwargsItem(
        {str(n): MultiModalFieldElem(tensor, MultiModalBatchedField()) for n, tensor in enumerate(tensors)}
    )


#: Around the sizes at which tensors are encoded in another way, and pieces end.
SIZES = [(0,), (1, 16383, 16384), (65535, 65536, 3), (196607, 196608, 196609), (589824,), (7, 1 << 20, 16384, 5)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_data_that_are_sent_in_pieces_are_vllms(ours, sizes):
    sent, items = [], [item_of(*sizes), item_of(5), item_of(*sizes)]

    async def send(message):
        sent.append(message)

    answer = RenderAnswer(ours.backend, ours.fairness, send)
    body = json.dumps({"items": [answer.mark(encoded_item(item)) for item in items]}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
    await answer.send({"type": "http.response.body", "body": body})
    whole = b"".join(message["body"] for message in sent[1:])
    assert json.loads(whole)["items"] == list(map(encode_mm_kwargs_item, items))
    assert dict(sent[0]["headers"]) == {b"content-type": b"application/json", b"content-length": b"%d" % len(whole)}
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]


async def test_large_answers_leave_the_event_loop_to_others(ours):
    """Four answers of 45 MB to clients that read as fast as they are sent."""

    async def send(_message):
        pass

    answers = [RenderAnswer(ours.backend, ours.fairness, send) for _ in range(4)]
    longest = 0.0

    async def watch():
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async def answer(one):
        body = json.dumps([one.mark(encoded_item(item))] * 4).encode()
        await one.send({"type": "http.response.start", "status": 200, "headers": []})
        await one.send({"type": "http.response.body", "body": body})

    item = item_of(8 << 20)
    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(answer, answers))
    watching.cancel()
    assert 0 < longest < 0.03  # an answer at once takes more than 50 ms
