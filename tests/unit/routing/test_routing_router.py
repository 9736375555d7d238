"""The router as a whole: inputs, choices, and state that ends with a request."""

import logging
from itertools import count

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from builders import Clock
from medialane.routing import Router, RoutingConfig, RoutingRequest
from medialane.types.errors import NoWorkerReady
from medialane.types.feature import MediaSpan
from medialane.types.kv_blocks import KvChange, prompt_block_ids
from medialane.types.request import Endpoint, ModelCard, WorkerLoad

BLOCK = 16
CARD = ModelCard("m", 4096, BLOCK, {}, encoder_cache_tokens=10_000, max_num_seqs=64)


def endpoint(name, *, rank=0, **kwargs):
    return Endpoint(name, f"unix:/{name}", True, WorkerLoad(), 0, rank=rank, same_host=True, card=CARD, **kwargs)


def of_block_size(name, size):
    return msgspec.structs.replace(endpoint(name), card=msgspec.structs.replace(CARD, block_size=size))


def packed(ids):
    return np.array(ids, "<u8").tobytes()


def change(*, stored=(), removed=(), snapshot=False):
    return KvChange(0, packed(stored), packed(removed), snapshot)


def request(tokens, *, media=(), **kwargs):
    ids = prompt_block_ids(tokens, block_size=BLOCK, media=media)
    return RoutingRequest({BLOCK: ids}, len(tokens), tuple(media), **kwargs)


def ids_of(asked):
    return asked.block_ids[BLOCK]


def begin(router, asked):
    routed = router.pick(asked)
    routed.begin()
    return routed


def text(seed, length=100):
    return [seed * 1000 + number for number in range(length)]


@pytest.fixture
def make(clock):
    def make(num_workers=2, **config):
        router = Router(RoutingConfig(**config), clock=clock, seed=1)
        for number in range(num_workers):
            assert router.join(endpoint(f"w{number}")) == number
        return router

    return make


def cached_tokens(router, asked):
    """What a worker is expected to have cached of the prompt now."""
    routed = begin(router, asked)
    routed.release()
    return routed.decision.cached_tokens


def serve(router, asked):
    """A whole request whose worker reports its blocks."""
    routed = begin(router, asked)
    routed.prefilled(routed.decision.cached_tokens)
    router.change(routed.slot, change(stored=ids_of(asked)))
    routed.release()
    return routed


def test_prompt_goes_to_the_worker_with_its_prefix(make):
    router = make(4)
    first = serve(router, request(text(1)))
    again = begin(router, request(text(1) + text(2)))
    assert again.slot == first.slot
    assert again.decision.cached_tokens == 96
    assert again.decision.reason == "longest cached prefix"


def test_large_media_go_to_the_worker_that_has_mapped_their_arena(make):
    router = make(2)
    for near in (0, 1, 0):
        for slot in (0, 1):
            router.move(slot, same_host=slot == near)
        routed = begin(router, request(text(near), handover_bytes=1 << 30))
        assert routed.slot == near
        routed.release()


def test_engine_computes_at_least_the_last_token(make):
    router = make()
    serve(router, request(text(1, 96)))
    assert begin(router, request(text(1, 96))).decision.cached_tokens == 80


def test_removed_blocks_are_not_matched(make):
    router = make(1)
    asked = request(text(1))
    serve(router, asked)
    router.change(0, change(removed=ids_of(asked)[2:]))
    assert begin(router, request(text(1))).decision.cached_tokens == 32


def test_snapshot_replaces_known_blocks(make):
    router = make(1)
    old, new = request(text(1)), request(text(2))
    serve(router, old)
    router.change(0, change(stored=ids_of(new), snapshot=True))
    assert begin(router, new).decision.cached_tokens == 96
    assert begin(router, old).decision.cached_tokens == 0


def test_concurrent_equal_prompts_go_to_one_worker(make):
    router = make(4)
    both = [begin(router, request(text(1, 2000))) for _ in range(2)]
    assert both[0].slot == both[1].slot
    assert both[1].decision.cached_tokens == 1984


def test_pending_blocks_end_with_their_request(make):
    router = make(1)
    begin(router, request(text(1))).release()
    assert begin(router, request(text(1))).decision.cached_tokens == 0


def test_pending_blocks_stay_half_a_second_after_the_output(make, clock):
    router = make(1)
    asked = request(text(1))
    routed = begin(router, asked)
    routed.prefilled(0)
    routed.release()
    for seconds, num_tokens in ((0.4, 96), (0.2, 0)):
        clock.now += seconds
        assert cached_tokens(router, asked) == num_tokens


def test_removal_arriving_with_an_output_is_applied(make):
    router = make(1)
    asked = request(text(1))
    routed = begin(router, asked)
    routed.prefilled(0)
    router.change(0, change(stored=ids_of(asked)))
    routed.release()
    router.change(0, change(removed=ids_of(asked)))
    assert begin(router, asked).decision.cached_tokens == 0


def test_pending_blocks_expire(make, clock):
    router = make(1, pending_ttl_s=30)
    begin(router, request(text(1)))
    clock.now += 31
    assert begin(router, request(text(1))).decision.cached_tokens == 0


def test_concurrent_equal_images_go_to_one_worker(make):
    router = make(4)
    image = MediaSpan("cat", 0, 400)
    shared = text(1, 400)
    first = begin(router, request(shared + text(2, 40), media=[image]))
    other = begin(router, request(shared + text(3, 40), media=[image]))
    assert other.slot == first.slot
    assert (other.decision.num_items, other.decision.encoder_items_cached) == (1, 1)
    assert other.decision.cached_tokens > 200  # of what was only sent, a part is noted


def test_image_elsewhere_in_a_prompt_need_not_be_encoded_again(make):
    router = make(4)
    image = MediaSpan("cat", 40, 400)
    first = serve(router, request(text(1, 500), media=[image]))
    other = begin(router, request(text(2, 500), media=[image]))
    assert other.slot == first.slot
    assert (other.decision.cached_tokens, other.decision.encoder_items_cached) == (0, 1)


def test_image_with_embeddings_in_the_arena_does_not_tie_requests_to_a_busy_worker(make):
    known, new = MediaSpan("known", 40, 1400, embedding_bytes=10 << 20), MediaSpan("new", 40, 1400)
    decided = []
    for image in (new, known):
        router = make(2)
        first = serve(router, request(text(1, 1500), media=[image]))
        router.report(first.slot, WorkerLoad(kv_usage=0.9))
        decided.append(begin(router, request(text(2, 1500), media=[image])).slot == first.slot)
    assert decided == [True, False]


def test_decision_tells_loaded_items_from_encoded_ones(make):
    router = make(1)
    media = [MediaSpan("known", 40, 100, embedding_bytes=1 << 20), MediaSpan("new", 200, 100)]
    decision = begin(router, request(text(1, 500), media=media)).decision
    assert (decision.num_items, decision.encoder_items_cached, decision.encoder_items_loaded) == (2, 0, 1)
    assert decision.parts.load == pytest.approx(router.config.load_ms_per_mib)
    again = begin(router, request(text(2, 500), media=media)).decision
    assert (again.encoder_items_cached, again.encoder_items_loaded) == (2, 0)


def test_items_that_no_worker_has_are_new(make):
    router = make(2)
    cached, within, new = MediaSpan("cached", 400, 60), MediaSpan("within", 20, 60), MediaSpan("new", 480, 60)
    stored = MediaSpan("stored", 560, 60, embedding_bytes=1 << 20)
    begin(router, request(text(1, 500), media=[cached]))
    asked = request(text(2, 700), media=[within, cached, new, stored])
    assert router.new_items(asked) == {"within", "new"}
    router.change(1, change(stored=ids_of(asked)[:10]))
    assert router.new_items(asked) == {"new"}
    assert router.new_items(request(text(2, 700))) == frozenset()


def test_items_of_a_lost_worker_are_new(make):
    router = make(1)
    asked = request(text(1, 500), media=[MediaSpan("cat", 40, 400)])
    begin(router, asked)
    assert router.new_items(asked) == frozenset()
    router.leave(0)
    assert router.new_items(asked) == {"cat"}


def test_mean_sequences_are_those_of_workers_that_accept_requests(make):
    assert make(0).mean_sequences == 0
    router = make(3)
    router.report(0, WorkerLoad(num_running=3))
    begin(router, request(text(1)))
    assert router.mean_sequences == pytest.approx(4 / 3)


def test_image_of_an_aborted_request_is_not_counted(make):
    router = make(1)
    image = MediaSpan("cat", 40, 400)
    begin(router, request(text(1, 500), media=[image])).release()
    assert begin(router, request(text(2, 500), media=[image])).decision.encoder_items_cached == 0


def test_item_of_unknown_length_attracts_equal_items_to_its_worker(make):
    router = make(4)
    unknown = MediaSpan("cat", 30, 0)
    first = begin(router, request(text(1, 30), media=[unknown]))
    assert begin(router, request(text(2, 30), media=[unknown])).slot == first.slot


def test_item_within_the_cached_prefix_counts_as_cached(make):
    router = make(1)
    asked = request(text(1, 500), media=[MediaSpan("cat", 40, 400)])
    router.change(0, change(stored=ids_of(asked)))
    assert begin(router, asked).decision.encoder_items_cached == 1


def test_queued_work_sends_the_next_request_elsewhere(make):
    router = make(2)
    first = begin(router, request(text(1, 1000)))
    assert begin(router, request(text(2))).slot != first.slot


def test_load_imbalance_replicates_a_hot_prompt(make):
    router = make(2)
    hot = text(1, 1000)
    serve(router, request(hot))
    routed = [begin(router, request(hot + text(number, 400))) for number in range(2, 12)]
    assert {each.slot for each in routed} == {0, 1}
    assert routed[0].decision.reason == "longest cached prefix"
    assert "longer prefix elsewhere, but higher load or more evictions" in {each.decision.reason for each in routed}


def test_full_worker_is_excluded_until_it_has_capacity(make):
    router = make(1, max_in_flight=1)
    routed = begin(router, request(text(1)))
    with pytest.raises(NoWorkerReady, match="reached their limit") as caught:
        begin(router, request(text(2)))
    assert caught.value.retry_after_s == 1
    routed.release()
    assert begin(router, request(text(2))).slot == 0


def test_refused_request_is_sent_away_until_a_place_is_expected_to_become_free(make, clock):
    router = make(1, max_in_flight=2)
    held = [begin(router, request(text(n))) for n in range(2)]
    clock.now += 48
    for routed in held:
        routed.release()
    held = [begin(router, request(text(n))) for n in range(2)]
    waits = []
    for n in range(3):
        with pytest.raises(NoWorkerReady) as caught:
            router.pick(request(text(n)))
        waits.append(caught.value.retry_after_s)
    assert waits == [24, 48, 72], "requests take 48 s, two at a time"


def test_drained_worker_gets_no_request_until_it_is_resumed(make):
    router = make(2)
    router.drain(0, draining=True)
    assert {begin(router, request(text(n))).slot for n in range(5)} == {1}
    router.drain(1, draining=True)
    with pytest.raises(NoWorkerReady, match="no worker is ready"):
        begin(router, request(text(1)))
    router.drain(0, draining=False)
    assert begin(router, request(text(1))).slot == 0


def test_draining_and_lost_workers_are_excluded(make):
    router = make(2)
    router.join(endpoint("draining", draining=True))
    router.leave(0)
    assert {begin(router, request(text(n))).slot for n in range(5)} == {1}
    router.leave(1)
    with pytest.raises(NoWorkerReady, match="no worker is ready"):
        begin(router, request(text(1)))


def test_no_worker_at_all_is_unavailable(make):
    with pytest.raises(NoWorkerReady, match="no worker is ready") as caught:
        make(0).pick(request(text(1)))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5)


def test_requested_rank_is_chosen():
    router = Router()
    for rank in range(3):
        router.join(endpoint("w", rank=rank, num_ranks=3))
    decision = begin(router, request(text(1), rank=2)).decision
    assert (decision.worker_id, decision.rank, decision.num_ranks) == ("w", 2, 3)


def test_returning_worker_holds_nothing(make):
    router = make(1)
    asked = request(text(1), media=[MediaSpan("cat", 0, 64)])
    serve(router, asked)
    router.leave(0)
    router.join(endpoint("w0"))
    decision = begin(router, asked).decision
    assert (decision.cached_tokens, decision.encoder_items_cached) == (0, 0)
    with pytest.raises(KeyError):
        router.leave(3)


def test_request_outliving_its_worker_leaves_no_state(make):
    router = make(1)
    routed = begin(router, request(text(1), media=[MediaSpan("cat", 0, 64)]))
    router.leave(0)
    router.join(endpoint("new"))
    routed.prefilled(0)
    routed.release()
    assert begin(router, request(text(2))).decision.parts.queue == 0


def test_session_stays_with_its_worker_by_default(make):
    router = make(4, session_ms=5.0)
    for number in range(3):
        routed = begin(router, request(text(number, 10), session_id="s"))
        routed.release()
        assert routed.slot == 0
        begin(router, request(text(9, 10))).release()
    assert routed.decision.reason == "worker of the session's last request"


def test_session_returns_with_its_worker(make):
    router = make(3, session_ms=5.0)
    begin(router, request(text(1, 10))).release()
    assert begin(router, request(text(1, 10), session_id="s")).slot == 1
    router.leave(1)
    assert begin(router, request(text(1, 10), session_id="t")).slot != 1
    router.join(endpoint("w1"))
    assert begin(router, request(text(2, 10), session_id="s")).slot == 1


def test_session_is_forgotten_when_it_expires_or_there_are_too_many(make, clock):
    router = make(2, session_ms=5.0, session_ttl_s=10.0, max_sessions=2)

    def serve_at_w1(name):
        begin(router, request(text(1, 10), session_id=name, excluded=frozenset(["w0"]))).release()

    def is_remembered(name):
        return router.pick(request(text(1, 10), session_id=name)).worker_id == "w1"

    for name in ("a", "b", "a", "c"):
        serve_at_w1(name)
    assert [is_remembered(name) for name in "abc"] == [True, False, True], "the least recently used one is dropped"
    clock.now += 9
    serve_at_w1("c")
    clock.now += 2
    assert [is_remembered(name) for name in "ac"] == [False, True]


def test_reported_load_sends_requests_elsewhere(make):
    router = make(2)
    router.report(0, WorkerLoad(num_running=4, num_waiting=6, kv_usage=0.2))
    assert {begin(router, request(text(n, 10))).slot for n in range(3)} == {1}


def test_decision_has_its_reasons(make):
    decision = begin(make(5), request(text(1))).decision
    assert decision.parts.expected_ms == pytest.approx(decision.expected_ms)
    assert decision.num_tokens == 100
    assert len(decision.alternatives) == 3
    assert all(other.score >= decision.parts.total for other in decision.alternatives)


@pytest.mark.parametrize("policy", ["round-robin", "random", "least-loaded", "prefix-only"])
def test_every_policy_predicts_and_records(make, policy):
    router = make(1, router=policy)
    serve(router, request(text(1)))
    decision = begin(router, request(text(1))).decision
    assert (decision.policy, decision.cached_tokens) == (policy, 96)


def test_worker_not_caching_as_predicted_is_reported(make, clock, caplog):
    caplog.set_level(logging.WARNING)
    router = make(1)
    for _ in range(12):
        routed = begin(router, request(text(1)))
        routed.prefilled(96)
        router.change(0, change(stored=[7]))  # ids made in some other way
        routed.release()
        clock.now += 100
    assert router.predictions.num_more == 12
    assert "worker w0 (rank 0) does not cache as predicted" in caplog.text


def test_worker_caching_as_predicted_is_not_reported(make, clock):
    router = make(2)
    predicted = []
    for number in range(40):
        predicted.append(serve(router, request(text(number % 5) + text(number))).decision.cached_tokens)
        clock.now += 11
    assert any(predicted)
    assert (router.predictions.num_fewer, router.predictions.num_more) == (0, 0)


def test_pick_changes_no_router_state_before_begin(make):
    router = make(2)
    asked = request(text(1), session_id="s")
    routed = router.pick(asked)
    assert (routed.worker_id, routed.rank, routed.num_ranks) == ("w0", 0, 1)
    assert router.mean_sequences == 0
    with pytest.raises(RuntimeError, match="not begun"):
        _ = routed.decision
    assert router.pick(asked).slot == 1, "no block is pending, no session has a worker"
    routed.begin()
    routed.begin()
    assert router.mean_sequences == 1 / 2
    again = begin(router, asked)
    assert (again.slot, again.decision.cached_tokens, again.decision.parts.session < 0) == (0, 96, True)


def test_request_that_never_began_is_only_counted_as_not_sent(make):
    router = make(1)
    asked = request(text(1), media=[MediaSpan("cat", 0, 64)], session_id="s")
    routed = router.pick(asked)
    routed.prefilled(0)
    for _ in range(2):
        routed.release()
    assert not routed.begin()
    assert (router.num_unsent, router.num_encoder_items, router.mean_sequences) == (1, 0, 0)
    decision = begin(router, asked).decision
    assert (decision.cached_tokens, decision.parts.session, decision.parts.queue) == (0, 0, 0)


@pytest.mark.parametrize("is_sent", [True, False])
def test_request_counted_before_it_is_sent_counts_as_sent_only_once_it_was(make, is_sent):
    router = make(1)
    routed = router.pick(request(text(1)))
    assert routed.begin(is_sent=False)
    if is_sent:
        assert not routed.begin()
    routed.release()
    assert router.num_unsent == (not is_sent)


def test_worker_that_leaves_after_the_choice_is_still_named_among_the_alternatives(make):
    router = make(3)
    routed = router.pick(request(text(1)))
    router.leave(1)
    router.leave(2)
    router.join(endpoint("new"))
    routed.begin()
    assert {other.worker_id for other in routed.decision.alternatives} == {"w1", "w2"}


def test_request_whose_worker_left_before_it_began_leaves_no_state(make):
    router = make(1)
    routed = router.pick(request(text(1)))
    router.leave(0)
    router.join(endpoint("new"))
    routed.begin()
    assert routed.decision.worker_id == "w0"
    routed.prefilled(0)
    routed.release()
    assert router.mean_sequences == 0
    assert cached_tokens(router, request(text(1))) == 0


@pytest.fixture
def mixed(clock):
    """Two workers: w0 has blocks of 16 tokens, w1 of 32."""
    router = Router(clock=clock, seed=1)
    router.join(of_block_size("w0", 16))
    router.join(of_block_size("w1", 32))
    return router


def request_by_sizes(tokens, *, media=(), **kwargs):
    ids = {size: prompt_block_ids(tokens, block_size=size, media=media) for size in (16, 32)}
    return RoutingRequest(ids, len(tokens), tuple(media), **kwargs)


def ids_at(asked, name):
    return asked.block_ids[16 if name == "w0" else 32]


def test_block_sizes_are_those_of_the_workers_that_have_joined(mixed):
    assert mixed.block_sizes == (16, 32)
    mixed.leave(0)
    assert mixed.block_sizes == (32,)
    mixed.leave(1)
    assert mixed.block_sizes == (16,), "vLLM's default, while there is no worker"


@pytest.mark.parametrize("name", ["w0", "w1"])
def test_prompt_is_matched_by_the_ids_of_each_workers_block_size(mixed, name):
    asked = request_by_sizes(text(1, 100))
    slot = int(name[1])
    mixed.change(slot, change(stored=ids_at(asked, name)))
    decision = begin(mixed, asked).decision
    assert (decision.worker_id, decision.cached_tokens) == (name, 96)
    assert [(other.worker_id, other.cached_tokens) for other in decision.alternatives] == [(f"w{1 - slot}", 0)]


@pytest.mark.parametrize(("num_small", "num_large", "best"), [(5, 3, "w1"), (5, 2, "w0"), (4, 2, None)])
def test_prefixes_are_compared_in_tokens(mixed, num_small, num_large, best):
    asked = request_by_sizes(text(1, 1000))
    mixed.change(0, change(stored=ids_at(asked, "w0")[:num_small]))
    mixed.change(1, change(stored=ids_at(asked, "w1")[:num_large]))
    decision = begin(mixed, asked).decision
    tokens = {"w0": 16 * num_small, "w1": 32 * num_large}
    assert decision.cached_tokens == tokens[decision.worker_id] == max(tokens.values())
    assert best in (None, decision.worker_id)


@pytest.mark.parametrize("other", ["w0", "w1"])
def test_prompt_in_flight_is_pending_at_a_worker_of_any_block_size(mixed, other):
    asked = request_by_sizes(text(1, 2000))
    first = begin(mixed, msgspec.structs.replace(asked, excluded=frozenset([other])))
    again = begin(mixed, asked)
    assert again.worker_id == first.worker_id != other
    assert again.decision.cached_tokens == 1984
    first.release()
    again.release()
    assert begin(mixed, asked).decision.cached_tokens == 0


@pytest.mark.parametrize("other", ["w0", "w1"])
def test_announced_prompt_is_pending_at_another_gateway_by_the_same_ids(mixed, clock, other):
    there = Router(clock=clock, seed=1)
    for number, size in ((1, 32), (0, 16)):  # joined in another order
        there.join(of_block_size(f"w{number}", size))
    asked, sent = request_by_sizes(text(1, 2000)), []
    routed = begin(mixed, msgspec.structs.replace(asked, excluded=frozenset([other])))
    routed.announce(lambda work: sent.append(work) or (lambda _: None))
    there.announced(1 - routed.slot, *sent)
    decision = begin(there, asked).decision
    assert (decision.worker_id, decision.cached_tokens) == (routed.worker_id, 1984)


def test_item_is_covered_by_the_cached_tokens_at_any_block_size(mixed):
    media = [MediaSpan("cat", 20, 40)]
    asked = request_by_sizes(text(1, 500), media=media)
    for slot, num_blocks in ((0, 4), (1, 2)):  # 64 tokens
        mixed.change(slot, change(stored=ids_at(asked, f"w{slot}")[:num_blocks]))
        only = msgspec.structs.replace(asked, excluded=frozenset([f"w{1 - slot}"]))
        routed = begin(mixed, only)
        assert routed.decision.encoder_items_cached == 1
        routed.release()


def test_workers_of_several_block_sizes_cache_as_predicted(mixed, clock):
    used = set()
    for number in range(60):
        asked = request_by_sizes(text(number % 5) + text(number))
        routed = begin(mixed, asked)
        if routed.decision.cached_tokens:
            used.add(routed.worker_id)
        routed.prefilled(routed.decision.cached_tokens)
        mixed.change(routed.slot, change(stored=ids_at(asked, routed.worker_id)))
        routed.release()
        clock.now += 11
    assert (mixed.predictions.num_fewer, mixed.predictions.num_more) == (0, 0)
    assert used == {"w0", "w1"}


def test_worker_whose_block_size_the_request_lacks_is_chosen_without_a_prefix(mixed):
    mixed.join(of_block_size("w2", 64))
    routed = begin(mixed, request_by_sizes(text(1), excluded=frozenset(["w0", "w1"])))
    assert (routed.worker_id, routed.decision.cached_tokens) == ("w2", 0)
    routed.prefilled(0)
    routed.release()


class Routed:
    """A request at an instance of a worker."""

    is_prefilled = is_released = False

    def __init__(self, routed, instance):
        self.routed, self.instance, self.decision = routed, instance, routed.decision

    def prefilled(self, num_tokens):
        self.is_prefilled = True
        self.routed.prefilled(num_tokens)

    def release(self):
        self.is_released = True
        self.routed.release()


class Bookkeeping(RuleBasedStateMachine):
    """In any order of events, a request's reservations are released when it ends."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.router = Router(clock=self.clock, seed=1)
        self.routed = []
        self.joined = {}  # slot, and a number that tells a worker from earlier ones of its name
        self.instances = count()

    @rule(name=st.sampled_from("abc"))
    def join(self, name):
        if name not in self.joined:
            self.joined[name] = (self.router.join(endpoint(name)), next(self.instances))

    @rule(name=st.sampled_from("abc"))
    def leave(self, name):
        if name in self.joined:
            self.router.leave(self.joined.pop(name)[0])

    @rule(seed=st.integers(0, 4), image=st.sampled_from([None, "x", "y"]))
    def pick(self, seed, image):
        media = [MediaSpan(image, 10, 300)] if image else []
        if self.joined:
            routed = begin(self.router, request(text(seed, 400), media=media, session_id=str(seed)))
            self.routed.append(Routed(routed, self.joined[routed.worker_id]))

    @rule(place=st.integers(0, 50), tokens=st.sampled_from([None, 0, 160]))
    def prefill(self, place, tokens):
        if self.routed:
            self.routed[place % len(self.routed)].prefilled(tokens)

    @rule(place=st.integers(0, 50), again=st.booleans())
    def release(self, place, again):
        if self.routed:
            routed = self.routed[place % len(self.routed)]
            routed.release()
            if not again:
                self.routed.remove(routed)

    @rule(seed=st.integers(0, 4), name=st.sampled_from("abc"), snapshot=st.booleans(), gone=st.booleans())
    def tell(self, seed, name, snapshot, gone):
        if name in self.joined:
            ids = ids_of(request(text(seed, 400)))
            update = change(removed=ids) if gone else change(stored=ids, snapshot=snapshot)
            self.router.change(self.joined[name][0], update)

    @rule(seconds=st.sampled_from([1, 20, 70]))
    def wait(self, seconds):
        self.clock.now += seconds

    def at_worker(self, name):
        """The requests that have begun there and are not released."""
        return [routed for routed in self.routed if self.joined.get(name) == routed.instance and not routed.is_released]

    @invariant()
    def queues_are_those_of_the_requests(self):
        if self.joined:
            in_flight = sum(len(self.at_worker(name)) for name in self.joined)
            assert self.router.mean_sequences == pytest.approx(in_flight / len(self.joined))
        for name in self.joined:
            queued = [routed.decision.parts for routed in self.at_worker(name) if not routed.is_prefilled]
            work_ms = sum(parts.prefill + parts.encoder + parts.load for parts in queued)
            assert self.probe(name, 99).parts.queue == pytest.approx(work_ms)

    def probe(self, name, seed):
        """The decision about another request at this worker."""
        routed = begin(self.router, request(text(seed, 400), excluded=frozenset("abc") - {name}))
        routed.release()
        return routed.decision

    def teardown(self):
        for routed in self.routed:
            routed.release()
        self.clock.now += 1000
        for name, (slot, _) in self.joined.items():
            self.router.change(slot, change(snapshot=True))
            assert [self.probe(name, seed).cached_tokens for seed in range(5)] == [0] * 5
            assert self.probe(name, 99).parts.queue == 0
        if self.joined:
            assert self.router.mean_sequences == 0
        for slot, _ in self.joined.values():
            self.router.leave(slot)
        assert self.router.num_encoder_items == 0
        assert self.router.index.num_entries == 0


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, deadline=None)


def test_worker_without_a_prefix_cache_is_never_expected_to_hold_a_prefix(clock):
    """Not even after it was sent the same prompt, and beside a worker that holds it."""
    router = Router(RoutingConfig(), clock=clock, seed=1)
    without, other = router.join(of_block_size("without", 0)), router.join(of_block_size("other", BLOCK))
    assert router.block_sizes == (BLOCK,)
    asked = request(text(1))
    router.change(other, change(stored=ids_of(asked)))
    begin(router, asked)
    router.leave(other)
    for _ in range(2):
        routed = begin(router, asked)
        routed.prefilled(0)
        routed.release()
        assert (routed.worker_id, routed.decision.cached_tokens) == ("without", 0)
    assert router.predictions.num_fewer == 0
    router.leave(without)


def test_block_size_is_never_zero(clock):
    router = Router(RoutingConfig(), clock=clock, seed=1)
    router.join(of_block_size("without", 0))
    assert all(router.block_sizes)
