"""Ten kinds of overlap over two real workers, by every hand-over path: the request goes where its tokens are cached,
and the engine has exactly the cached tokens that the router predicted."""

import asyncio

import pytest
from openai_http import chat, data_url, image, photo, picture, text, video
from picture_server import picture_server

pytestmark = pytest.mark.vllm

HANDOVER_PATHS = ("features/shm", "features/inline", "url")
BLOCK = 128
_WORDS = "The photograph shows a river with a bridge and some houses in the morning light. "


def long_text(topic: str) -> dict[str, str]:
    """More than three blocks of tokens; other topics differ from the first block on."""
    return text(f"{topic}: " + _WORDS * 25)


def system_chat(system: str, *content, **options):
    body = chat(*content, **options)
    return {**body, "messages": [{"role": "system", "content": system}, *body["messages"]]}


class RoutedAnswer:
    """A client that returns the chosen worker and the reason. Its outputs must equal those of `plain`, if given."""

    def __init__(self, client, plain=None) -> None:
        self._client = client
        self._plain = plain

    async def ask(self, body) -> tuple[str, int]:
        """The chosen worker and the engine's own count of cached tokens, which must be what the router predicted."""
        answer = await self._client.succeed({**body, "medialane": {"report": True}})
        if self._plain is not None:
            assert answer.ids == (await self._plain.succeed(body)).ids
        routing = answer.json["medialane"]["routing"]
        details = answer.json["usage"]["prompt_tokens_details"]
        cached = details["cached_tokens"] if details else 0
        assert (routing["cached_tokens"], routing["engine_cached_tokens"]) == (cached, cached), routing
        return routing["worker"], cached


@pytest.fixture(params=HANDOVER_PATHS)
def way(request):
    return request.param


@pytest.fixture
def routed(gateways, way):
    return RoutedAnswer(gateways[way])


@pytest.fixture
def seed(way):
    """Every hand-over path has its own images and texts: they share the workers and their caches."""
    return 1000 * (1 + HANDOVER_PATHS.index(way))


async def repeated(routed, *bodies) -> list[int]:
    """Send all; all but the first must go to the first one's worker. Return the cached tokens of each."""
    answers = [await routed.ask(body) for body in bodies]
    assert len({worker for worker, _ in answers}) == 1, answers
    return [cached for _, cached in answers]


async def test_text_with_a_common_prefix(routed, seed):
    start = long_text(f"Text {seed}")
    first, second = await repeated(routed, chat(start, text("Who?")), chat(start, text("Where?")))
    assert first == 0
    assert second >= 3 * BLOCK


async def test_same_image_twice(routed, seed):
    first, second = await repeated(routed, *[chat(picture(seed), text("What is it?"))] * 2)
    assert (first, second > 0) == (0, True)


async def test_different_images_share_no_blocks(routed, seed):
    for number in (1, 2):
        _, cached = await routed.ask(chat(picture(seed + number), text("What is it?")))
        assert cached == 0


async def test_prompt_growing_from_one_to_three_images(routed, seed):
    parts = [picture(seed + number) for number in (3, 4, 5)]
    cached = await repeated(routed, *(chat(*parts[:n]) for n in (1, 2, 3)))
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2]


async def test_swapped_image_order_shares_no_block(routed, seed):
    one, other = picture(seed + 6), picture(seed + 7)
    _, first = await routed.ask(chat(one, other))
    _, swapped = await routed.ask(chat(other, one))
    assert (first, swapped) == (0, 0)


async def test_http_image_twice(routed, seed):
    async with picture_server({"a": photo(seed + 8)}) as server:
        first, second = await repeated(routed, *[chat(image(server.url("a")), text("What is it?"))] * 2)
    assert (first, second > 0) == (0, True)


async def test_same_image_by_http_and_inline(routed, seed):
    data = photo(seed + 9)
    async with picture_server({"a": data}) as server:
        first, second = await repeated(
            routed, chat(image(server.url("a")), text("What?")), chat(image(data_url(data)), text("What?"))
        )
    assert (first, second > 0) == (0, True)


async def test_same_image_before_different_text(routed, seed):
    first, second = await repeated(
        routed, *(chat(picture(seed + 10), long_text(f"{topic} {seed}")) for topic in ("One", "Two"))
    )
    assert (first, second > 0) == (0, True)


async def test_system_prompt_shared_by_different_images(routed, seed):
    system = f"Assistant {seed}: " + _WORDS * 25
    first, second = await repeated(
        routed, *(system_chat(system, picture(seed + number), text("What?")) for number in (11, 12))
    )
    assert first == 0
    assert second >= 3 * BLOCK


async def test_repeated_video(routed, seed):
    clip = 2 * (seed // 1000)  # there are few different ones
    question = long_text("What happens?")  # a small clip alone fills no block
    body, other = (chat(video(seed=number), question) for number in (clip, clip + 1))
    first, second = await repeated(routed, body, body)
    assert (first, second >= 3 * BLOCK) == (0, True)
    assert (await routed.ask(other))[1] == 0


async def test_concurrent_requests_with_one_image_go_to_one_worker(gateways, way, seed):
    bodies = [chat(picture(seed + 20), text(f"Question {n}?"), medialane={"report": True}) for n in range(2)]
    answers = await asyncio.gather(*map(gateways[way].succeed, bodies))
    routings = [answer.json["medialane"]["routing"] for answer in answers]
    assert len({routing["worker"] for routing in routings}) == 1, routings


async def test_decisions_endpoint_lists_recent_choices_with_reasons(gateways):
    client = gateways["features/shm"]
    await client.succeed(chat(picture(4000), text("What is it?")))
    answer = await client.get("/medialane/decisions?limit=1")
    (decision,) = answer.json["decisions"]
    assert decision["num_tokens"] > 0
    assert decision["engine_cached_tokens"] == decision["cached_tokens"]
    assert decision["reason"]


async def test_metrics_cover_routing(gateways):
    client = gateways["features/shm"]
    for _ in range(2):
        await client.succeed(chat(picture(4001), text("What is it?")))
    page = await client.metrics()
    for kind in ("routed_cached", "engine_cached"):
        assert (
            0
            < page.value("medialane_prompt_tokens_total", kind=kind)
            < page.value("medialane_prompt_tokens_total", kind="all")
        )
    assert page.value("medialane_media_items_total", modality="image", outcome="cached") > 0
    assert page.value("medialane_routing_seconds_count") > 0
    assert page.value("medialane_routing_entries") >= page.value("medialane_routing_blocks") > 0
    assert page.value("medialane_routing_missed_predictions_total") == 0
    assert page.value("medialane_kv_event_gaps_total") == 0
    assert 0 <= page.value("medialane_kv_event_lag_seconds") < 10
