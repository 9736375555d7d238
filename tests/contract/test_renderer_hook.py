"""vLLM's whole OpenAI app over our engine client and renderer hook: the seams, the errors, the middleware."""

import asyncio
import base64
import inspect
import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from app_server import BASE64, DATA, DATA_URL, Server, image
from counted_middleware import CountedMiddleware
from fake_backend import NUM_EMBEDS
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.multimodal.media import MediaConnector

from medialane.gateway import open_scope
from medialane.gateway.intake import ExtractedMedia
from medialane.gateway.records import report_schema
from medialane.types import admin
from medialane.types.errors import (
    ArenaFull,
    EmptyMedia,
    InvalidImage,
    InvalidMediaUrl,
    InvalidRequest,
    MediaOverloaded,
    PromptRejected,
    PromptTooLong,
    TooManyMediaItems,
    WorkerLost,
)
from medialane.types.feature import MediaSpan, PlaceholderRange
from medialane.types.hashing import owner_salt
from medialane.types.media import MediaRef
from medialane.types.tensor import decode_embeds
from medialane.vllm_bridge.frontend import CONNECTOR, RoutedEngineClient
from medialane.vllm_bridge.frontend.renderer_hook import ReferenceConnector
from waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    # vLLM's own warning: it reads the field whether a request has it or not.
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]


async def test_image_is_passed_to_the_gateway_as_intakes_reference(server):
    response = await server.chat(image(), image("http://host.example/b.png"), mm_processor_kwargs={"a": 1})
    assert response.status_code == 200, response.text
    (prompt,) = server.backend.prompts
    assert [(i.data, i.url) for i in prompt.items] == [(DATA, None), (None, "http://host.example/b.png")]
    assert prompt.items[1].param == "messages[0].content[2].image_url"
    assert prompt.token_ids.count(server.backend.image_token) == 2
    assert prompt.options == b'{"a":1}'


@pytest.mark.parametrize(("num_words", "in_thread"), [(3, False), (2000, True)])
async def test_short_prompts_are_rendered_without_the_renderers_thread(server, monkeypatch, num_words, in_thread):
    calls = []

    class Recorded(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            calls.append(args)
            return super().submit(*args, **kwargs)

    with Recorded() as pool:
        monkeypatch.setattr(server.frontend.renderer._executor, "_inner", pool)  # vLLM's thread: it has no other door
        response = await server.chat({"type": "text", "text": "word " * num_words})
    assert response.status_code == 200, response.text
    assert bool(calls) == in_thread


async def test_item_options_are_passed_to_the_gateway_within_model_limits(server):
    part = {"type": "image_url", "image_url": {"url": DATA_URL, "max_pixels": 50_000_000, "detail": "high", "fps": 3}}
    assert (await server.chat(part)).status_code == 200
    (item,) = server.backend.prompts[0].items
    assert (item.io, item.options) == (b"{}", b'{"max_pixels":12845056}')


async def test_video_options_override_the_requests(server):
    part = {"type": "video_url", "video_url": {"url": "http://host.example/v.mp4", "fps": 2, "max_frames": 64}}
    io = {"video": {"num_frames": 8, "frame_recovery": True}}
    server.backend.error, server.backend.error_at = MediaOverloaded("enough was seen"), "prepare"
    await server.chat(part, media_io_kwargs=io)
    (item,) = server.backend.prompts[0].items
    assert json.loads(item.io) == {"fps": 2, "max_frames": 64, "num_frames": 64, "frame_recovery": True}


@pytest.mark.parametrize(("modality", "key", "value"), [("video", "backend", "x"), ("image", "image_mode", None)])
async def test_forbidden_request_option_is_named(server, modality, key, value):
    response = await server.chat(image(), media_io_kwargs={modality: {key: value}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"media_io_kwargs.{modality}.{key}"


async def test_images_of_anthropic_messages_are_passed_to_the_gateway(server):
    base64_source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    link = {"type": "image", "source": {"type": "url", "url": "http://host.example/b.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": base64_source}]}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": [{"type": "image", "source": base64_source}, link]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": server.model, "max_tokens": 8, "messages": messages}
    response = await server.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    (prompt,) = server.backend.prompts
    assert [item.data or item.url for item in prompt.items] == [DATA, "http://host.example/b.png", DATA]


async def test_images_of_a_batch_are_passed_to_the_gateway(server):
    conversation = server.body(image())["messages"]
    body = server.body() | {"messages": [conversation, conversation]}
    response = await server.client.post("/v1/chat/completions/batch", json=body)
    assert response.status_code == 200, response.text
    assert [item.param for prompt in server.backend.prompts for item in prompt.items] == [
        "messages[0][0].content[1].image_url",
        "messages[1][0].content[1].image_url",
    ]


REPORT_SCHEMA = json.loads(report_schema())
TEXT = [{"role": "user", "content": "look"}]
REPORTED = {
    "/v1/chat/completions": {"messages": TEXT},
    "/v1/completions": {"prompt": "look"},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": TEXT},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}},
}


@pytest.mark.parametrize("asked", [{"headers": {"X-Medialane-Report": "true"}}, {"body": {"report": True}}], ids=str)
@pytest.mark.parametrize("path", REPORTED)
@pytest.mark.parametrize("stream", [False, True])
async def test_report_is_in_every_kind_of_response(server, path, stream, asked):
    body = {"model": server.model, "max_tokens": 8, **REPORTED[path], "stream": stream}
    if "body" in asked:
        body["medialane"] = asked["body"]
    response = await server.client.post(path, json=body, headers=asked.get("headers"))
    assert response.status_code == 200, response.text
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    report = json.loads(events[-1] if stream else response.text)["medialane"]
    jsonschema.validate(report, REPORT_SCHEMA)
    assert (report["items"], report["request_id"]) == ([], response.headers["x-request-id"])
    assert "intake" in report["times_ms"]


async def test_prepared_prompt_reaches_generate_and_the_output_reaches_the_client(server):
    server.backend.tokens = [11]
    response = await server.chat(image())
    (request,), (prepared,) = server.backend.requests, server.backend.prepared
    assert request.prompt.token_ids == prepared.token_ids
    assert [placed.feature.mm_hash for placed in prepared.features] == [f"{0:064x}"]
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == "<11>"
    assert answer["usage"]["prompt_tokens"] == len(prepared.token_ids)


async def test_text_prompt_is_not_prepared(server):
    assert (await server.chat()).status_code == 200
    assert server.backend.prompts == []
    assert server.backend.prepared == [None]


async def test_stream_runs_in_the_scope_that_prepared_it(server):
    response = await server.chat(image(), stream=True)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(e)["choices"][0]["delta"].get("content") for e in events[:-1]]
    assert [t for t in texts if t] == ["<11>", "<12>", "<13>"]
    assert len(server.backend.scopes) == 2
    assert server.backend.scopes[0] is server.backend.scopes[1]


async def test_scope_releases_the_media_of_its_request(server):
    await server.chat(image())
    assert server.backend.scopes[0].extracted.refs == ()


async def test_truncation_moves_placeholders(server):
    whole = await server.chat({"type": "text", "text": "word " * 50}, image())
    assert whole.status_code == 200
    length = len(server.backend.requests[0].prompt.token_ids)
    cut = await server.chat(
        {"type": "text", "text": "word " * 50}, image(), truncate_prompt_tokens=length - 30, truncation_side="left"
    )
    assert cut.status_code == 200, cut.text
    request, prepared = server.backend.requests[1], server.backend.prepared[1]
    assert len(request.prompt.token_ids) == length - 30
    (placed,) = prepared.features
    assert placed.placeholder.length == NUM_EMBEDS
    span = request.prompt.token_ids[placed.placeholder.offset : placed.placeholder.end]
    assert span == [server.backend.image_token] * NUM_EMBEDS


async def test_truncation_within_an_image_is_rejected(server):
    images = [image()] * 8
    await server.chat(*images)
    unexpanded = len(server.backend.prompts[0].token_ids)
    response = await server.chat(*images, truncate_prompt_tokens=unexpanded, truncation_side="left")
    assert response.status_code == 400
    assert "truncate_prompt_tokens" in response.text
    assert len(server.backend.requests) == 1


async def test_tokenize_counts_expanded_images(server):
    response = await server.client.post("/tokenize", json=server.body(image()))
    assert response.status_code == 200, response.text
    assert response.json()["tokens"].count(server.backend.image_token) == NUM_EMBEDS


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "data:video/mp4;base64,AAAA"])
async def test_video_is_fetched_by_the_gateway(server, url):
    server.backend.error, server.backend.error_at = MediaOverloaded("enough was seen"), "prepare"
    await server.chat({"type": "video_url", "video_url": {"url": url}})
    (item,) = server.backend.prompts[0].items
    assert (item.modality, item.url or item.data) == ("video", url if url.startswith("http") else bytes(3))


async def test_vllms_connector_resolves_references_and_fetches_nothing_itself(server):
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    connector = MEDIA_CONNECTOR_REGISTRY.load(CONNECTOR, media_io_kwargs={})
    for modality in ("image", "audio", "video"):
        find = getattr(connector, f"fetch_{modality}_async")
        with open_scope() as scope:
            with pytest.raises(InvalidMediaUrl):
                await find("http://169.254.169.254/")
            ref = MediaRef(modality, "messages[0].content[0]", url="http://169.254.169.254/")
            scope.extracted = ExtractedMedia((ref,))
            assert await find(scope.references.text(0)) == ref
            blocking = getattr(connector, f"fetch_{modality}")  # in queries and documents to score
            assert blocking(scope.references.text(0)) == ref
            with pytest.raises(InvalidMediaUrl):
                blocking("http://169.254.169.254/")
    public = {n for n in vars(MediaConnector) if n.startswith(("fetch_", "load_"))}
    embeddings = {n for n in public if "_embedding" in n}
    for name in embeddings:
        refuse = getattr(connector, name)
        with open_scope(), pytest.raises(InvalidRequest, match="embeddings"):
            await refuse("AAAA") if inspect.iscoroutinefunction(refuse) else refuse("AAAA")
    opened = {f"fetch_{modality}{form}" for modality in ("image", "audio", "video") for form in ("", "_async")}
    assert public - embeddings == {*opened, "load_from_url", "load_from_url_async"}


async def test_image_in_non_strict_json_becomes_a_reference(server):
    body = json.dumps(server.body(image("http://169.254.169.254/"), x=float("nan")))
    headers = {"content-type": "application/json"}
    response = await server.client.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert [item.url for item in server.backend.prompts[0].items] == ["http://169.254.169.254/"]


def embeds(*, name="image_embeds", **more):
    buffer = io.BytesIO()
    np.save(buffer, np.ones((6, 128), np.float32))
    tensor = base64.b64encode(buffer.getvalue()).decode()
    return {"type": name, name: {name: tensor, "image_grid_thw": [1, 4, 6]}, **more}


@pytest.mark.parametrize("more", [{}, {"uuid": None}, {"uuid": "mine"}])
async def test_embeddings_are_passed_to_the_gateway_as_intakes_reference(server, more):
    response = await server.chat(embeds(**more), embeds(**more))
    assert response.status_code == 200, response.text
    (prompt,) = server.backend.prompts
    assert [item.param for item in prompt.items] == [f"messages[0].content[{n}].image_embeds" for n in (1, 2)]
    assert all(item.is_embeds and decode_embeds(item.data).fields.keys() for item in prompt.items)
    assert prompt.token_ids.count(server.backend.image_token) == 2


async def test_embeddings_with_another_modality_keep_their_positions(server):
    server.backend.error, server.backend.error_at = MediaOverloaded("enough was seen"), "prepare"
    clip = {"type": "video_url", "video_url": {"url": "http://host.example/v.mp4"}}
    await server.chat(clip, embeds())
    found = {item.modality: item.is_embeds for item in server.backend.prompts[0].items}
    assert found == {"image": True, "video": False}


async def test_mixing_images_and_image_embeddings_is_rejected_as_in_vllm(server):
    response = await server.chat(image(), embeds())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "image_embeds"
    assert server.backend.prompts == []


async def test_embeddings_require_vllms_flag(server, monkeypatch):
    config = server.frontend.renderer.model_config.multimodal_config
    monkeypatch.setattr(config, "enable_mm_embeds", False)
    response = await server.chat(embeds())
    assert response.status_code == 400
    assert "--enable-mm-embeds" in response.json()["error"]["message"]


async def test_embeddings_unknown_to_intake_are_not_read(server, monkeypatch):
    monkeypatch.setattr("torch.load", None)
    part = {"type": "image_embeds", "uuid": "u", "image_embeds": {"image_embeds": "AAAA", "image_url": "x"}}
    response = await server.chat(part)
    assert response.status_code == 400
    assert server.backend.prompts == []


def by_uuid(uuid="mine", name="image_url", **more):
    return {"type": name, name: None, "uuid": uuid, **more}


async def test_unknown_image_uuid_error_names_the_uuid(server):
    response = await server.chat(by_uuid())
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unknown_media_uuid", "messages[0].content[1].image_url")


async def processed(server, *prompt):
    """As vLLM's renderer has a prompt's media processed: no request of a client reaches it with these."""
    return await server.frontend.renderer._process_multimodal_async(*prompt)  # vLLM's own, which our hook replaces


@pytest.mark.parametrize("uuids", [{}, {"audio": [None]}, {"audio": [""]}], ids=repr)
async def test_item_without_content_or_uuid_is_empty(server, uuids):
    """As vLLM's app passes an `input_audio` with empty data."""
    with open_scope(), pytest.raises(EmptyMedia):
        await processed(server, [1], {"audio": [None]}, uuids)
    assert server.backend.prompts == []


@pytest.mark.parametrize("options", [{"return_tensors": "np"}, {"images_kwargs": {"return_tensors": "np"}}])
async def test_options_reserved_by_vllm_are_rejected_by_name(server, options):
    response = await server.chat(image(), mm_processor_kwargs=options)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith("mm_processor_kwargs.")
    assert error["param"].endswith("return_tensors")
    assert server.backend.prompts == []


def _without_id(response):
    error = response.json()["error"]
    assert error.pop("request_id") == response.headers["x-request-id"]
    return error


@pytest.mark.parametrize("stream", [False, True])
async def test_item_too_long_for_any_prompt_gives_vllms_prompt_error(server, stream):
    server.backend.error, server.backend.error_at = PromptTooLong("The decoder prompt (length 9) is longer"), "prepare"
    refused = await server.chat(image(), stream=stream)
    server.backend.error = PromptRejected("The decoder prompt (length 9) is longer")
    server.backend.error_at = "generate"
    by_engine = await server.chat(image())
    assert refused.status_code == 400
    assert _without_id(refused) == _without_id(by_engine)


async def test_known_image_uuid_resolves_to_its_content(server):
    server.backend.known = {"mine": "c" * 64}
    response = await server.chat(image(), by_uuid(), image("http://host.example/b.png", uuid="other"))
    assert response.status_code == 200, response.text
    items = server.backend.prompts[0].items
    assert [(item.data, item.content, item.url) for item in items] == [
        (DATA, None, None),
        (None, "c" * 64, None),
        (None, None, "http://host.example/b.png"),
    ]
    assert [item.alias and item.alias.uuid for item in items] == [None, "mine", "other"]


async def test_known_embeddings_uuid_resolves_to_its_content(server):
    server.backend.known = {"mine": "c" * 64}
    response = await server.chat(embeds(), by_uuid(name="image_embeds"))
    assert response.status_code == 200, response.text
    assert [item.content for item in server.backend.prompts[0].items] == [None, "c" * 64]


@pytest.mark.parametrize("uuid", ["medialane:0", "medialane:7", "", 7])
async def test_uuid_is_never_mistaken_for_a_reference(server, uuid):
    response = await server.chat(image(), by_uuid(uuid))
    assert response.status_code == 400
    assert server.backend.prompts == []


async def test_video_by_uuid_uses_the_requests_options(server):
    server.backend.known = {"mine": "c" * 64}
    server.backend.error, server.backend.error_at = MediaOverloaded("enough was seen"), "prepare"
    await server.chat(by_uuid(name="video_url"), media_io_kwargs={"video": {"num_frames": 8}})
    (item,) = server.backend.prompts[0].items
    assert (item.modality, item.content, json.loads(item.io)["num_frames"]) == ("video", "c" * 64, 8)


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
@pytest.mark.parametrize("value", ["x" * 1_400_000, list(range(5000))], ids=["bytes", "values"])
async def test_request_options_are_bounded(server, field, value):
    response = await server.chat(image(), **{field: {"image": {"any": value}}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert server.backend.prompts == []


async def test_error_while_preparing_has_openais_format(server):
    server.backend.error, server.backend.error_at = InvalidImage("broken", param="messages[0].content[1]"), "prepare"
    before = server.num_errors("invalid_image")
    response = await server.chat(image())
    assert response.status_code == 400
    assert response.json() == {
        "error": {
            "message": "broken",
            "type": "invalid_request_error",
            "param": "messages[0].content[1]",
            "code": "invalid_image",
            "request_id": response.headers["x-request-id"],
        }
    }
    assert "total;dur=" in response.headers["server-timing"]
    assert server.num_errors("invalid_image") == before + 1


async def test_error_while_generating_keeps_status_and_retry_after(server):
    server.backend.error, server.backend.error_at = ArenaFull("no room", retry_after_s=7), "generate"
    before = server.num_errors("arena_full")
    response = await server.chat(image())
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert response.json()["error"]["code"] == "arena_full"
    assert server.num_errors("arena_full") == before + 1


async def test_error_in_a_stream_is_its_last_event(server):
    server.backend.error, server.backend.error_at = WorkerLost("the worker was lost"), "stream"
    response = await server.chat(stream=True)
    assert response.status_code == 200
    events = [line for line in response.text.splitlines() if line]
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("the worker was lost", "worker_lost")
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_worker_no_response_starts(server, stream):
    server.backend.ready = False
    response = await server.chat(stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["code"] == "no_worker_ready"
    assert (await server.client.get("/health")).status_code == 503
    models = await server.client.get("/v1/models")
    assert (models.status_code, models.headers["retry-after"]) == (503, "5")
    assert models.json()["error"]["code"] == "no_worker_ready"
    server.backend.ready = True
    assert (await server.client.get("/v1/models")).json()["data"]
    assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("parts", [(), (image(),)])
async def test_parsing_and_rendering_have_steps_of_their_own(server, parts):
    response = await server.chat(*parts)
    names = [metric.partition(";")[0] for metric in response.headers["server-timing"].split(", ")]
    assert names[:4] == ["upload", "intake", "parse", "render"]


async def test_unserialisable_parameter_is_a_client_error(server):
    response = await server.chat(vllm_xargs={"a": 1 << 80})
    assert response.status_code == 400
    assert server.backend.requests == []


@pytest.mark.parametrize("path", ["/unforeseen", "/nowhere", "/v1/models"])
async def test_every_response_has_server_timing(server, path):
    response = await server.client.get(path)
    assert response.headers["server-timing"].count("total;dur=") == 1


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize("kind", ["", "_async"])
async def test_connector_takes_urls_by_vllms_parameter_names(modality, kind):
    """Of the scores of documents, vLLM passes the URLs of videos by name."""
    ours, vllms = (
        list(inspect.signature(getattr(connector, f"fetch_{modality}{kind}")).parameters)[1]
        for connector in (ReferenceConnector, MediaConnector)
    )
    assert ours == vllms


async def test_request_metrics_match_vllm(tiny_model):
    """With an app of its own: a process counts for one app only, the last that was made."""
    labels = {"handler": "/v1/chat/completions", "method": "POST", "status": "2xx"}
    server = await Server.start(str(tiny_model), ["--max-model-len=8192", "--api-key=secret"])
    try:
        assert (await server.chat()).status_code == 200
        # Counted when the app has returned, which may be after the client has the whole response.
        await eventually(lambda: REGISTRY.get_sample_value("http_requests_total", labels) == 1)
    finally:
        await server.close()


async def test_user_middleware_is_instantiated_and_called_once(server):
    before = CountedMiddleware.num_passed
    await server.client.get("/v1/models")
    assert (CountedMiddleware.num_made, CountedMiddleware.num_passed) == (1, before + 1)


@pytest.mark.parametrize("parts", [(), (image(),)], ids=["text", "image"])
async def test_beam_search_uses_the_media_of_the_prompt(server, parts):
    server.backend.tokens = [11]
    response = await server.chat(*parts, use_beam_search=True, n=2, max_tokens=2)
    assert response.status_code == 200, response.text
    assert len(server.backend.requests) >= 1
    found = [None if p is None else [f.feature.mm_hash for f in p.features] for p in server.backend.prepared]
    assert found == [[f"{0:064x}"] if parts else None] * len(server.backend.requests)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def administered(session_server):
    """A client of vLLM's administrative routes, which need VLLM_SERVER_DEV_MODE, over the same engine client."""
    from fastapi import FastAPI
    from vllm.entrypoints.rl.factories import register_rl_api_routers
    from vllm.entrypoints.serve import register_vllm_dev_api_routers

    app = FastAPI()
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    app.state.engine_client = session_server.app.state.engine_client
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


#: vLLM's routes: the call to the workers, their results, the response to the operator.
ROUTES = [
    ("POST", "/sleep?level=2&mode=wait", admin.Sleep(2, "wait"), None, {"status": "sleeping", "level": 2}),
    ("POST", "/wake_up?tags=weights", admin.WakeUp(("weights",)), False, {"status": "sleeping", "tags": ["weights"]}),
    ("POST", "/wake_up", admin.WakeUp(), True, {"status": "awake", "tags": None}),
    ("GET", "/is_sleeping", admin.IsSleeping(), True, {"is_sleeping": True}),
    ("POST", "/release_kv_cache_memory", admin.ReleaseKvCacheMemory(), None, {"status": "kv_cache_released"}),
    ("POST", "/reset_prefix_cache", admin.ResetPrefixCache(), False, {"success": False}),
    ("POST", "/reset_prefix_cache?reset_running_requests=1", admin.ResetPrefixCache(True), True, {"success": True}),
    ("POST", "/reset_mm_cache", admin.ResetMmCache(), None, None),
    ("POST", "/reset_encoder_cache", admin.ResetEncoderCache(), None, None),
    ("POST", "/pause?mode=keep", admin.PauseGeneration("keep"), None, {"status": "paused"}),
    ("POST", "/resume", admin.ResumeGeneration(), None, {"status": "resumed"}),
    ("GET", "/is_paused", admin.IsPaused(), False, {"is_paused": False}),
]


@pytest.mark.parametrize(("method", "path", "call", "result", "answer"), ROUTES, ids=[r[1] for r in ROUTES])
async def test_vllms_administrative_routes_call_the_workers(server, administered, method, path, call, result, answer):
    server.backend.admin_result = result
    response = await administered.request(method, path)
    assert response.status_code == 200, response.text
    assert server.backend.calls == [call]
    assert (response.json() if response.content else None) == answer


async def test_body_of_an_unauthenticated_client_is_not_read(server):
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    await server.app(_scope(headers=[(b"content-type", b"application/json")]), receive, send)
    assert sent[0]["status"] == 401
    assert b"server-timing" in dict(sent[0]["headers"])


async def test_client_disconnect_closes_the_backend_stream(server):
    server.backend.token_s, server.backend.tokens = 0.01, [11] * 1000
    left = asyncio.Event()
    num_sent = 0
    body = json.dumps(server.body(image(), stream=True)).encode()
    pending = [{"type": "http.request", "body": body[:500], "more_body": True}]
    pending.append({"type": "http.request", "body": body[500:], "more_body": False})

    async def receive():
        if pending:
            return pending.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal num_sent
        num_sent += 1
        if num_sent == 4:
            left.set()

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer secret")]
    async with asyncio.timeout(10):
        await server.app(_scope(headers=headers), receive, send)
    await eventually(lambda: server.backend.num_ended, "the loop's hook closes the generator that vLLM drops")
    assert server.backend.scopes[0].extracted.refs == ()


def _scope(headers):
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": headers,
        "client": ("client", 1),
        "server": ("gateway", 80),
        "state": {},
    }


async def test_client_disconnect_closes_the_backend_of_a_whole_answer(server):
    server.backend.token_s, server.backend.tokens = 0.01, [11] * 1000
    pending = [{"type": "http.request", "body": json.dumps(server.body(image())).encode(), "more_body": False}]
    sent = []

    async def receive():
        if pending:
            return pending.pop(0)
        await eventually(lambda: server.backend.scopes, "the request has begun")
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer secret")]
    async with asyncio.timeout(10):
        await server.app(_scope(headers=headers), receive, send)
    await eventually(lambda: server.backend.num_ended, "the answer is not made to its end")
    assert sent[0]["status"] < 500  # nobody reads it, but it is counted


async def test_no_handler_listens_for_the_disconnect_besides_the_gateway(server):
    listening = with_cancellation(lambda: None).__code__
    handlers = [route.endpoint for route in server.app.routes if isinstance(route, APIRoute)]
    assert [handler for handler in handlers if handler.__code__ is listening]
    calls = [route.dependant.call for route in server.app.routes if isinstance(route, APIRoute)]
    assert [call for call in calls if call.__code__ is listening] == []


async def test_engine_client_implements_vllms_protocol():
    assert RoutedEngineClient.__abstractmethods__ == frozenset()
    for name in EngineClient.__abstractmethods__ | {"check_admission", "get_supported_tasks"}:
        theirs = inspect.getattr_static(EngineClient, name)
        if isinstance(theirs, property):
            assert isinstance(inspect.getattr_static(RoutedEngineClient, name), property)
    theirs, ours = (inspect.signature(c.generate).parameters for c in (EngineClient, RoutedEngineClient))
    assert list(ours) == list(theirs)
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


async def test_placeholder_ranges_are_as_vllm_expects(server):
    import torch

    from medialane.vllm_bridge.items import to_vllm_range

    found = to_vllm_range(PlaceholderRange(3, 4, is_embed=b"\1\0\1\1"))
    assert (found.offset, found.length) == (3, 4)
    assert torch.equal(found.is_embed, torch.tensor([True, False, True, True]))
    assert to_vllm_range(PlaceholderRange(3, 4)).is_embed is None


def generate(*parts, token_ids, **more):
    return {"token_ids": token_ids, "sampling_params": {"max_tokens": 4}, "content_parts": list(parts), **more}


async def test_media_of_a_prompt_of_token_ids(server):
    server.backend.known = {"mine": "c" * 64}
    token = server.backend.image_token
    parts = [{"type": "image_url", "url": DATA_URL}, {"type": "image_url", "uuid": "mine"}]
    body = generate(*parts, token_ids=[1, token, token], cache_salt="tenant")
    response = await server.client.post("/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    items = server.backend.prompts[0].items
    salt = owner_salt(items[0].owner, "tenant")  # of this server's key
    assert [(item.data, item.content, item.salt) for item in items] == [(DATA, None, salt), (None, "c" * 64, salt)]


@pytest.mark.parametrize("url", ["medialane:0", "medialane::0", "data:image/png;base64,medialane:0"])
async def test_reference_in_a_prompt_of_token_ids_is_refused(server, url):
    """Refused by intake, or because it is neither base64 nor a URL."""
    parts = [{"type": "image_url", "url": DATA_URL}, {"type": "image_url", "url": url}]
    response = await server.client.post("/inference/v1/generate", json=generate(*parts, token_ids=[1, 2]))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "content_parts[1]"
    assert server.backend.prompts == []


async def test_item_that_a_prompt_repeats_is_refused(server):
    """No request of a client has this effect: references are unknown to it."""
    ref = MediaRef("image", "messages[0].content[0]", data=DATA)
    with open_scope(), pytest.raises(TooManyMediaItems):
        await processed(server, [1, 2], {"image": [ref, ref]})


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
async def test_url_without_an_object_is_quoted_as_sent(server, kind):
    url = "https://example.com/harbour.png"
    response = await server.chat({"type": kind, kind: url})
    assert response.status_code == 400
    assert f"input_value='{url}'" in response.text
    assert "medialane:" not in response.text
    assert response.headers["content-length"] == str(len(response.content))


@pytest.mark.parametrize("more", [{}, {"a": 1}, {"description": "a harbour"}, {"description": "of a harbour at noon"}])
async def test_abridged_reference_is_not_shown(server, more):
    """pydantic shows 50 characters of a part without its `detail`."""
    response = await server.chat({"type": "input_image", "image_url": DATA_URL, **more})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "input_value={" in message
    assert not [piece for piece in ("medial", "lane:", ":0'") if piece in message], message


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_has_the_tokens_of_media_that_a_worker_places(server, stream):
    """Also in each step of a beam search, which has the same media."""
    server.backend.placed = (
        MediaSpan("a", 3, 16, "image"),
        MediaSpan("b", 30, 4, "video"),
        MediaSpan("c", 50, 16, "image"),
    )
    options = (
        {"stream": True, "stream_options": {"include_usage": True}} if stream else {"use_beam_search": True, "n": 2}
    )
    response = await server.chat(image(), image("http://host.example/b.png"), **options)
    assert response.status_code == 200, response.text
    answer = json.loads(response.text.split("data: ")[-2]) if stream else response.json()
    assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 32, "video": 4}


async def test_usage_has_the_tokens_of_media_that_the_gateway_places(server):
    response = await server.chat(image())
    assert response.json()["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": NUM_EMBEDS}


RESPONSE_IMAGE = {"type": "input_image", "image_url": "http://host.example/a.png", "detail": "auto"}


async def respond(server, *items, **more):
    body = {"model": server.model, "input": list(items), "max_output_tokens": 8, **more}
    return await server.client.post("/v1/responses", json=body)


async def test_result_of_a_tool_may_be_an_image(server):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [RESPONSE_IMAGE]}
    response = await respond(server, {"role": "user", "content": "look"}, call, result)
    assert response.status_code == 200, response.text
    assert [item.url for item in server.backend.prompts[0].items] == ["http://host.example/a.png"]


async def test_media_of_a_stored_response_are_not_those_of_the_next_request(server, monkeypatch):
    monkeypatch.setattr(server.app.state.openai_serving_responses, "enable_store", True)
    first = await respond(server, {"role": "user", "content": [RESPONSE_IMAGE]}, store=True)
    assert first.status_code == 200, first.text
    other = {**RESPONSE_IMAGE, "image_url": "http://host.example/b.png"}
    second = await respond(server, {"role": "user", "content": [other]}, previous_response_id=first.json()["id"])
    assert (second.status_code, second.json()["error"]["code"]) == (400, "invalid_media_url"), second.text
    assert "an earlier one" in second.json()["error"]["message"]
    assert len(server.backend.prompts) == 1
