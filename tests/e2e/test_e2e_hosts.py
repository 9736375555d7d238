"""Two real workers on another host, which join gateways on this one: routing and outputs by every hand-over path
between hosts, and what becomes of them in faults."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio
from openai_http import CHAT, assert_same, chat, picture, text, video
from test_e2e_routing import (
    RoutedAnswer,
    test_concurrent_requests_with_one_image_go_to_one_worker,  # noqa: F401 - run with the fixtures below
    test_different_images_share_no_blocks,  # noqa: F401
    test_http_image_twice,  # noqa: F401
    test_prompt_growing_from_one_to_three_images,  # noqa: F401
    test_repeated_video,  # noqa: F401
    test_same_image_before_different_text,  # noqa: F401
    test_same_image_by_http_and_inline,  # noqa: F401
    test_same_image_twice,  # noqa: F401
    test_swapped_image_order_shares_no_block,  # noqa: F401
    test_system_prompt_shared_by_different_images,  # noqa: F401
    test_text_with_a_common_prefix,  # noqa: F401
)
from two_hosts import LOST_S, PATHS, num_pulls

from host_state import stats_of, store_link
from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("Describe the picture.")


@pytest.fixture(scope="module", autouse=True)
def _are_closed_at_the_end(starting_hosts):
    """The tests that follow need the memory and the cores."""
    yield
    starting_hosts.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateways(starting_hosts, plain_vllm):
    """A client for each of PATHS, in place of one host's clients."""
    return await starting_hosts.ready()


@pytest_asyncio.fixture
async def far_store(starting_hosts, gateways):
    """A connection to the workers' store, which holds nothing."""
    async with store_link(starting_hosts.address("far"), starting_hosts.directory("far")) as link:
        yield link


@pytest.fixture(params=PATHS)
def way(request):
    return request.param


@pytest.fixture
def seed(way):
    """Every hand-over path has its own images and texts: they share the workers and their caches."""
    return 1000 * (10 + list(PATHS).index(way))


@pytest_asyncio.fixture
async def routed(gateways, way, plain, far_store):
    """Its outputs equal plain vLLM's, and its media travel by no other path."""
    client, before = gateways[way], await num_pulls(far_store)
    yield RoutedAnswer(client, plain)
    assert (await num_pulls(far_store) - before).keys() <= {PATHS[way][0]}
    assert (await client.metrics()).value("medialane_transfer_fallbacks_total") == 0


BODIES = {
    "one image": chat(picture(80), ASK),
    "three images": chat(picture(80), text("and"), picture(81, 1024, 768), picture(82, 200, 300), ASK),
    "image and video": chat(picture(80), video(81, fps=2), ASK, media_io_kwargs={"video": {"num_frames": 6}}),
    "two choices with logprobs": chat(picture(80), ASK, n=2, temperature=0.8, seed=7, logprobs=True, top_logprobs=2),
}


@pytest.mark.parametrize("name", BODIES)
async def test_output_equals_plain_vllm(gateways, plain, way, name):
    answer, right = await gateways[way].succeed(BODIES[name]), await plain.succeed(BODIES[name])
    assert answer.ids
    assert_same(answer.json, right.json)


async def test_media_are_copied_once_by_the_chosen_mover(gateways, far_store, way, seed):
    before = await num_pulls(far_store)
    bodies = [chat(text(f"{number}: Look at this."), picture(seed + 30)) for number in range(4)]
    answers = await asyncio.gather(*map(gateways[way].succeed, bodies))
    mover = PATHS[way][0]
    assert await num_pulls(far_store) - before == ({mover: 1} if mover else {})
    assert sum(answer.copied_bytes for answer in answers) > 0
    assert (await gateways[way].metrics()).value("medialane_transfer_fallbacks_total") == 0


async def test_a_request_is_one_tree_of_spans_on_both_hosts(gateways, collector):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    client, context = gateways["features/tcp"], f"00-{trace_id}-b7ad6b7169203331-01"
    body = {"model": client.model, **chat(picture(85), ASK, max_tokens=4)}
    async with (
        client.session(traceparent=context) as session,
        session.post(client.base_url + CHAT, json=body) as answer,
    ):
        assert answer.status == 200

    def spans():
        return {span.name: span for span in collector.spans if span.trace_id == trace_id}

    await eventually(lambda: {"llm_request"} < spans().keys(), "the spans of both hosts have arrived", 20)
    found = spans()
    root = next(span for name, span in found.items() if name.startswith("chat "))
    item, attempt, engine = found["medialane.item"], found["medialane.attempt"], found["llm_request"]
    assert root.parent_id == "b7ad6b7169203331"
    assert {span.parent_id for span in (item, attempt, found["medialane.route"])} == {root.span_id}
    assert (engine.parent_id, engine.kind) == (attempt.span_id, root.kind)
    assert {found[f"medialane.{step}"].parent_id for step in ("decode", "process")} == {item.span_id}
    assert root.start_ns <= item.start_ns <= found["medialane.decode"].start_ns <= attempt.start_ns <= engine.start_ns
    tokens = "gen_ai.usage.prompt_tokens"
    assert root.attributes[tokens] == root.attributes["gen_ai.usage.input_tokens"] == engine.attributes[tokens]
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert item.attributes["mm.modality"] == "image"
    assert item.attributes["medialane.item.tokens"] > 0
    assert attempt.attributes["medialane.worker"] in ("far-0", "far-1")
    assert found["medialane.route"].attributes["medialane.routing.engine_cached_tokens"] >= 0


async def test_nixl_goes_over_the_network(starting_hosts, gateways):
    """UCX logs which transports it has chosen."""
    logs = [starting_hosts.log(name).read_text() for name in ("far-0", "far-1", "store")]
    assert "tcp/veth" in "".join(logs)
    assert not any(word in log for word in ("cma/", "posix/", "sysv/") for log in logs)


async def test_idle_hosts_hold_nothing(starting_hosts, gateways, far_store):
    async def is_idle() -> bool:
        near = [await client.metrics() for client in gateways.values()]
        far = (await stats_of(far_store)).arena
        pins = [far.num_leases, far.num_reservations, *(page.value("medialane_arena_leases") for page in near)]
        return not any(pins) and not any(page.value("medialane_worker_in_flight") for page in near)

    await eventually(is_idle, "the last worker has released", 10)


async def test_killed_store_of_the_workers_host_is_replaced_and_outputs_stay_the_same(
    starting_hosts, gateways, far_store, plain
):
    client = gateways["features/auto without nixl"]
    body, other = chat(picture(91), ASK), chat(picture(92), ASK)
    right = await plain.succeed(body)
    assert (await client.succeed(body)).ids == right.ids
    os.kill(starting_hosts.far_store_pid(), signal.SIGKILL)
    assert (await client.succeed(body)).ids == right.ids
    await eventually(lambda: starting_hosts.far_store_pid(), "another store runs", 60)
    async with asyncio.timeout(60):
        await far_store.ready()

    async def is_copied() -> bool:
        assert (await client.succeed(other)).ids == (await plain.succeed(other)).ids
        return bool(await num_pulls(far_store))

    await eventually(is_copied, "the new store copies media", 60)


async def test_link_that_is_cut_loses_both_workers_and_they_return(starting_hosts, network, gateways, plain):
    client = gateways["features/auto without nixl"]
    body = chat(picture(93, 1024, 768), ASK)
    right = await plain.succeed(body)
    asked = [asyncio.create_task(client.post(body)) for _ in range(2)]
    network.set_link("down")
    try:
        await starting_hosts.joined(client, 0, timeout_s=4 * LOST_S)
        for answer in await asyncio.gather(*asked):
            assert answer.status == 503 or answer.ids == right.ids
        assert (await client.post(body)).status == 503
    finally:
        network.set_link("up")
    for each in gateways.values():
        await starting_hosts.joined(each, timeout_s=60)
    assert (await client.succeed(body)).ids == right.ids
