"""What the gateway reports to the router about workers and requests."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from medialane.gateway import Routes, WorkerPool
from medialane.observability import Metrics
from medialane.routing import Router
from medialane.testing.fake_worker import ARENA, FakeClient, FakeLink
from medialane.types.feature import Embedding, Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.types.kv_blocks import KvChange, prompt_block_ids
from medialane.types.media import MediaRef, MediaSize
from medialane.types.request import EncoderCard, EngineRequest, ExpandedPrompt, ModelCard, WorkerLoad
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.wire import ArenaMapped, EncoderCleared, KvBlocks, LoadReport


def link_to(name, *, block_size=16, same_host=True, encoder="", role="worker", ranks=1):
    card = ModelCard(
        *("m", 4096, block_size, {}),
        encoder_cache_tokens=10_000,
        max_num_seqs=8,
        data_parallel_size=ranks,
        role=role,
        encoder=card_of(encoder),
    )
    return FakeLink(name, card, same_host=same_host)


def card_of(encoder):
    return EncoderCard(encoder, "bfloat16", {"image": 8}) if encoder else None


def routed(*links):
    """The pool of these links, which have joined, and its routes."""
    pool = WorkerPool(links)
    routes = Routes(Router(seed=1), pool, Metrics(CollectorRegistry()))
    for link in links:
        link.join()
    return pool, routes


@pytest.fixture
def make_routes():
    return lambda *links: routed(*links)[1]


def left_to_worker(number):
    """A request whose one image the worker expands, seen for the first time."""
    item = MediaRef("image", "messages[0].content[0].image_url", data=b"")
    prepared = PreparedPrompt([1, 2, 3], (), ("f" * 64,), MediaPrompt([1, 2, 3], (item,)), None)
    return EngineRequest(f"r{number}", ExpandedPrompt([1, 2, 3]), b""), prepared


def with_large_media(number):
    """A request whose one image takes a gigabyte as features."""
    spec = TensorSpec("uint8", (1 << 30,))
    tensor = TensorDescriptor(spec, ArenaRange("a" * 32, 0, 64 + (1 << 30), 1), 64)
    placed = PlacedFeature(Feature("image", f"{number:064x}", b"", (tensor,), MediaSize()), PlaceholderRange(1, 1))
    item = MediaRef("image", "messages[0].content[0].image_url", data=b"")
    prepared = PreparedPrompt([1, 7, 3], (placed,), (placed.feature.mm_hash,), MediaPrompt([1, 7, 3], (item,)), None)
    return EngineRequest(f"m{number}", ExpandedPrompt([1, 7, 3]), b""), prepared


def test_prompt_is_hashed_once_for_its_new_items_and_its_worker(make_routes):
    """For each size of blocks; what was hashed is kept."""
    routes, block_ids = make_routes(link_to("w0"), link_to("w1", block_size=32)), {}
    request, prepared = with_large_media(7)
    assert routes.new_items(request, prepared, block_ids) == {f"{7:064x}"}
    hashed = dict(block_ids)
    routes.choose(request, prepared, block_ids=block_ids)
    assert block_ids.keys() == {16, 32}
    assert all(block_ids[size] is ids for size, ids in hashed.items())


def test_concurrent_new_images_share_a_worker_before_their_position_is_known(make_routes):
    routes = make_routes(link_to("w0"), link_to("w1"))
    first = routes.choose(*left_to_worker(0))
    routes.begin(first, "r0")
    assert routes.choose(*left_to_worker(1)).link is first.link


def test_request_is_counted_once_at_its_worker_when_sent(make_routes):
    routes = make_routes(link_to("w0"))
    route = routes.choose(*left_to_worker(0))
    for _ in range(2):
        routes.begin(route, "r0")
    decision = route.routed.decision
    assert (decision.worker_id, decision.reason) == ("w0", "the only candidate")
    assert routes.stats().num_encoder_items == 1


def test_removed_worker_is_not_chosen(make_routes):
    first, second = link_to("w0"), link_to("w1")
    routes = make_routes(first, second)
    first.lose()
    assert {routes.choose(*left_to_worker(n)).link.name for n in range(4)} == {"w1"}


def test_worker_that_maps_the_arena_later_counts_as_of_this_host(make_routes):
    near, far = link_to("w0"), link_to("w1", same_host=False)
    routes = make_routes(near, far)
    for here, elsewhere in ((far, near), (near, far)):
        here.worker.report(ArenaMapped(ARENA))
        elsewhere.worker.report(ArenaMapped("another"))
        chosen = {routes.choose(*with_large_media(number)).link.name for number in range(4)}
        assert chosen == {here.name}


def test_worker_failing_to_join_can_leave_and_rejoin(make_routes):
    link = link_to("w0")
    make_routes(link)
    other = link_to("w1")
    other.router, endpoints = link.router, other.endpoints
    other.endpoints = lambda: [*endpoints(), *link.endpoints()]
    with pytest.raises(ValueError, match="has joined already"):
        other.join()
    other.endpoints = endpoints
    other.join()
    other.lose()
    other.lose()
    other.join(FakeClient(link_to("w1").worker.welcome.card))


@pytest.mark.parametrize("name", ["w0", "w1"])
def test_prompt_goes_to_the_worker_that_has_cached_it_at_its_own_block_size(make_routes, name):
    links = {"w0": link_to("w0", block_size=16), "w1": link_to("w1", block_size=32)}
    routes = make_routes(*links.values())
    tokens = list(range(200))
    ids = prompt_block_ids(tokens, block_size=16 if name == "w0" else 32)
    links[name].worker.reports.apply(KvChange(0, ids.astype("<u8").tobytes(), b""))
    route = routes.choose(EngineRequest("r0", ExpandedPrompt(tokens), b""), None)
    routes.begin(route, "r0")
    assert route.link is links[name]
    assert route.routed.decision.cached_tokens == 192


def test_request_that_reads_no_prefix_cache_counts_no_cached_tokens(make_routes):
    link = link_to("w0", block_size=16)
    routes = make_routes(link)
    tokens = list(range(200))
    ids = prompt_block_ids(tokens, block_size=16)
    link.worker.reports.apply(KvChange(0, ids.astype("<u8").tobytes(), b""))
    for reads, cached in ((True, 192), (False, 0)):
        wanted = EngineRequest(f"r{reads}", ExpandedPrompt(tokens), b"", reads_prefix_cache=reads)
        route = routes.choose(wanted, None)
        routes.begin(route, wanted.request_id)
        assert route.routed.decision.cached_tokens == cached
        assert route.routed.decision.num_tokens == 200


async def test_lag_of_events_does_not_depend_on_the_clock_of_the_workers_host(make_routes):
    """The worker measures it. A snapshot has none, and leaves the last one."""
    link = link_to("w0")
    routes = make_routes(link)
    link.client.reports.received(KvBlocks(KvChange(0, b"", b"", age_s=0.25)))
    link.client.reports.received(KvBlocks(KvChange(0, b"", b"", snapshot=True)))
    assert routes.stats().event_lag_s == {"w0": 0.25}


def test_choice_that_was_never_sent_is_counted(make_routes):
    routes = make_routes(link_to("w0"))
    for number in range(2):
        route = routes.choose(*left_to_worker(number))
        if number:
            routes.begin(route, f"r{number}")
        route.routed.release()
    assert routes.stats().num_unsent == 1


def test_load_of_a_rank_counts_only_at_that_rank(make_routes):
    link = link_to("w0", ranks=2)
    routes = make_routes(link)
    for busy in (0, 1, 0):
        loads = tuple(WorkerLoad(8, 40, 0.9) if rank == busy else WorkerLoad() for rank in range(2))
        link.worker.report(LoadReport(loads))
        request, prepared = left_to_worker(busy)
        assert routes.choose(request, prepared).data_parallel_rank == 1 - busy


@pytest.mark.parametrize(
    ("encoders", "expected"),
    [(["d", "d"], "d"), (["d", ""], "d"), (["d", "e"], ""), (["", ""], ""), ([], "")],
)
def test_embeddings_are_those_of_the_one_encoder_that_all_workers_have(encoders, expected):
    links = [link_to(f"w{number}", encoder=encoder) for number, encoder in enumerate(encoders)]
    assert routed(*links)[0].encoder == expected


def test_encoder_workers_with_another_encoder_change_nothing_for_the_others():
    assert routed(link_to("w0", encoder="d"), link_to("e0", encoder="e", role="encoder"))[0].encoder == "d"
    assert routed(link_to("e0", encoder="e", role="encoder"))[0].encoder == ""


@pytest.mark.parametrize(("change", "expected"), [("joined", "e"), ("left", ""), ("moved", ""), ("cleared", "e")])
def test_encoder_follows_the_workers(change, expected):
    link = link_to("w0", encoder="d")
    pool, _ = routed(link)
    assert pool.encoder == "d"
    match change:
        case "joined":
            link.lose()
            link.join(link_to("w0", encoder="e").worker)
        case "left":
            link.lose()
        case "moved":
            link.worker.report(ArenaMapped("another"))
        case "cleared":
            link.worker.report(EncoderCleared(card_of("e")))
    assert pool.encoder == expected


def test_known_embedding_is_part_of_what_is_routed(make_routes):
    routes = make_routes(link_to("w0", encoder="d"))
    sent, prepared = with_large_media(0)
    spec = TensorSpec("bfloat16", (1, 8))
    embedding = Embedding("k", TensorDescriptor(spec, ArenaRange("a" * 32, 4096, 128, 1), 64))
    (placed,) = prepared.features
    feature = msgspec.structs.replace(placed.feature, tensors=(), embedding=embedding)
    known = msgspec.structs.replace(prepared, features=(msgspec.structs.replace(placed, feature=feature),))
    assert [span.embedding_bytes for span in routes.choose(sent, prepared).prefix.media] == [0]
    assert [span.embedding_bytes for span in routes.choose(sent, known).prefix.media] == [16]


def test_item_of_an_encoders_prompt_has_no_place_in_the_prompt_that_is_routed(make_routes):
    routes = make_routes(link_to("w", block_size=0))
    ref = MediaRef("audio", "file", data=b"x")
    placed = PlacedFeature(Feature("audio", "f" * 64, b"", (), MediaSize()), PlaceholderRange(0, 1500))
    for features in ((placed,), ()):
        source = MediaPrompt([], (ref,), is_encoder_prompt=True)
        prepared = PreparedPrompt([], features, ("f" * 64,), source, None, [0] * 1500)
        prefix = routes.choose(EngineRequest("r", ExpandedPrompt([1, 2, 3]), b""), prepared).prefix
        assert (prefix.token_ids, prefix.media) == ([1, 2, 3], ())
        (item,) = prefix.unplaced_items
        assert (item.mm_hash, item.modality, item.offset, item.end) == ("f" * 64, "audio", 3, 3)
        assert item.num_embeds == (1500 if features else 0)
