"""vLLM's pooling endpoints over our engine client: media reach the gateway as references, whatever their place."""

import asyncio
import base64
import inspect

import numpy as np
import pytest
import pytest_asyncio
from app_server import BASE64, DATA, DATA_URL, Server
from fake_backend import NUM_EMBEDS
from vllm.entrypoints.pooling.base.io_processor import PoolingIOProcessor
from vllm.entrypoints.pooling.scoring.io_processor import ScoringIOProcessors
from vllm.inputs import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM

from medialane.gateway import open_scope
from medialane.types.errors import InvalidImage, StartupFailed, WorkerLost
from medialane.vllm_bridge.frontend import CONNECTOR, RoutedEngineClient, pooling_endpoints
from medialane.vllm_bridge.seams.engine import MsgpackDecoder

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

FLAGS = (
    "--max-model-len=8192",
    "--enforce-eager",
    "--skip-mm-profiling",
    '--limit-mm-per-prompt={"image":8,"video":1}',
    "--enable-mm-embeds",
    "--runner=pooling",
)
URL = "http://host.example/b.png"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def embedding(tiny_model):
    server = await Server.start(str(tiny_model), FLAGS, ("embed", "token_embed"))
    yield server
    await server.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reranker(tiny_model):
    overrides = '--hf-overrides={"num_labels":1}'
    server = await Server.start(str(tiny_model), (*FLAGS, "--convert=classify", overrides), ("classify",))
    yield server
    await server.close()


@pytest.fixture(autouse=True)
def _reset(request, monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)
    yield
    for name in {"embedding", "reranker"}.intersection(request.fixturenames):
        request.getfixturevalue(name).backend.reset()


def image(url=DATA_URL):
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts):
    return [{"role": "user", "content": list(parts)}]


async def post(server, path, **body):
    return await server.client.post(path, json={"model": server.model, **body})


def params_of(server):
    decode = MsgpackDecoder(PoolingParams).decode
    return [decode(request.sampling_params) for request in server.backend.requests]


def items_of(server):
    return [[(item.data, item.url) for item in prompt.items] for prompt in server.backend.prompts]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_response_has_a_report_if_a_header_asks_for_it(embedding, path):
    body = {"model": embedding.model, "messages": chat(image())}
    response = await embedding.client.post(path, json=body, headers={"X-Medialane-Report": "true"})
    assert response.status_code == 200, response.text
    assert response.json()["medialane"]["request_id"] == response.headers["x-request-id"]


async def test_media_of_a_chat_are_prepared_and_the_tensor_is_the_response(embedding):
    response = await post(embedding, "/v1/embeddings", messages=chat(image(), image(URL)), priority=3)
    assert response.status_code == 200, response.text
    assert items_of(embedding) == [[(DATA, None), (None, URL)]]
    (sent,) = embedding.backend.requests
    assert sent.is_pooling
    assert sent.reads_prefix_cache
    assert sent.priority == 3
    assert embedding.backend.prepared[0].features
    num_tokens = len(sent.prompt.token_ids)
    assert sent.prompt.token_ids.count(embedding.backend.image_token) == 2 * NUM_EMBEDS
    assert response.json()["data"][0]["embedding"] == [num_tokens, sum(sent.prompt.token_ids)]
    assert response.json()["usage"]["prompt_tokens"] == num_tokens
    assert [params.task for params in params_of(embedding)] == ["embed"]


@pytest.mark.parametrize("member", ["messages", "input"])
async def test_prompts_of_a_batch_are_prepared_at_the_same_time(embedding, member):
    entered, all_entered = [], asyncio.Event()
    prepare = embedding.backend.prepare

    async def prepare_together(prompt):
        entered.append(prompt)
        if len(entered) == 3:
            all_entered.set()
        await asyncio.wait_for(all_entered.wait(), 20)
        return await prepare(prompt)

    embedding.backend.prepare = prepare_together
    try:
        response = await post(embedding, "/v1/embeddings", **{member: [chat(image()), chat(image(URL)), chat(image())]})
    finally:
        del embedding.backend.prepare
    assert response.status_code == 200, response.text
    assert len(response.json()["data"]) == 3


DOCUMENTS = {
    "queries/documents": lambda query, documents: {"queries": query, "documents": documents},
    "queries/items": lambda query, documents: {"queries": query, "items": documents},
    "data": lambda query, documents: {"data_1": query, "data_2": documents},
    "text": lambda query, documents: {"text_1": query, "text_2": documents},
}


@pytest.mark.parametrize("form", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("name", ["embedding", "reranker"])
async def test_media_of_queries_and_documents_are_prepared(embedding, reranker, name, form):
    server = {"embedding": embedding, "reranker": reranker}[name]
    query, documents = {"content": [image()]}, [{"content": [image(URL)]}, "text"]
    response = await post(server, "/score", **form(query, documents))
    assert response.status_code == 200, response.text
    assert len(response.json()["data"]) == 2
    found = [item for items in items_of(server) for item in items]
    assert set(found) == {(DATA, None), (None, URL)}


async def test_reranker_gets_query_and_document_in_one_prompt(reranker):
    query, documents = {"content": [image(URL)]}, [{"content": [image()]}, "boat"]
    response = await post(reranker, "/rerank", query=query, documents=documents)
    assert response.status_code == 200, response.text
    assert sorted(items_of(reranker), key=len) == [[(None, URL)], [(None, URL), (DATA, None)]]
    assert {params.task for params in params_of(reranker)} == {"classify"}


async def test_rerank_repeats_the_documents_with_the_clients_urls(embedding):
    documents = [{"content": [image(), {"type": "text", "text": "a"}]}, "boat", {"content": [image(URL)]}]
    response = await post(embedding, "/v1/rerank", query="b", documents=documents)
    assert response.status_code == 200, response.text
    shown = {r["index"]: r["document"] for r in response.json()["results"]}
    assert shown[0]["multi_modal"][0]["image_url"]["url"] == DATA_URL
    assert shown[1]["text"] == "boat"
    assert shown[2]["multi_modal"][0]["image_url"]["url"] == URL
    assert BASE64 in response.text
    assert "medialane:" not in response.text


@pytest.mark.parametrize(
    "body", [{"images": [DATA_URL, URL]}, {"inputs": [{"content": [image()]}, {"content": [image(URL)]}]}]
)
async def test_media_of_cohere_embeddings_are_prepared(embedding, body):
    response = await post(embedding, "/v2/embed", embedding_types=["float"], **body)
    assert response.status_code == 200, response.text
    assert items_of(embedding) == [[(DATA, None)], [(None, URL)]]
    assert len(response.json()["embeddings"]["float"]) == 2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_encoding_formats_have_the_tensors_bytes(embedding, path):
    answers = {
        form: await post(embedding, path, input="boat", encoding_format=form) for form in ("float", "base64", "bytes")
    }
    key = "embedding" if path == "/v1/embeddings" else "data"
    floats = np.array(answers["float"].json()["data"][0][key], np.float32)
    assert base64.b64decode(answers["base64"].json()["data"][0][key]) == floats.tobytes()
    assert answers["bytes"].content == floats.tobytes()


async def test_error_of_an_item_is_the_response(embedding):
    embedding.backend.error, embedding.backend.error_at = InvalidImage("not an image", param="p"), "prepare"
    response = await post(embedding, "/v1/embeddings", messages=chat(image()))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_image")


async def test_lost_worker_is_unavailable(embedding):
    embedding.backend.error, embedding.backend.error_at = WorkerLost("lost"), "generate"
    response = await post(embedding, "/pooling", input="x")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "medialane:0", "data:image/png;base64,!"])
async def test_url_that_intake_has_not_extracted_is_never_opened(embedding, url):
    response = await post(embedding, "/score", queries="x", documents=[{"content": [image(), image(url)]}])
    if url.startswith("file:"):  # the store refuses it
        assert items_of(embedding) == [[(DATA, None), (None, url)]]
    else:
        assert response.status_code == 400
        assert embedding.backend.prompts == []


@pytest.mark.parametrize("skips", [False, True])
async def test_request_that_skips_the_prefix_cache_is_not_routed_by_it(embedding, skips):
    """vLLM sets this for embeddings of all tokens."""
    client, params = embedding.app.state.serving_pooling.engine_client, PoolingParams(task="embed")
    params.skip_reading_prefix_cache = skips
    with open_scope():
        (found,) = [output async for output in client.encode(tokens_input([1, 2]), params, "r")]
    assert found.outputs.data.tolist() == [2, 3]
    assert [request.reads_prefix_cache for request in embedding.backend.requests] == [not skips]


async def test_plugin_that_makes_prompts_is_refused_at_start(embedding, monkeypatch):
    monkeypatch.setattr(pooling_endpoints, "has_io_processor", lambda _config, _plugin: True)
    with pytest.raises(StartupFailed, match="io-processor-plugin"):
        pooling_endpoints.check_supported(embedding.frontend.config)


async def test_encode_has_the_parameters_of_vllms():
    ours, theirs = inspect.signature(RoutedEngineClient.encode), inspect.signature(AsyncLLM.encode)
    assert list(ours.parameters) == list(theirs.parameters)


async def test_prompts_are_rendered_by_the_three_methods_that_are_deferred():
    """Whatever else an IO processor's `render` asks of its renderer is missing in ours, so it would fail."""
    for kind in (PoolingIOProcessor, *ScoringIOProcessors.values()):
        used = {word.partition("(")[0] for word in inspect.getsource(kind.render).split("self.renderer.")[1:]}
        assert used <= {"render_chat", "render_cmpl", "process_for_engine"}, kind
