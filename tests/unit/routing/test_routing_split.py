"""Where a prompt is computed, if there are workers that only do that."""

import msgspec
import pytest

from medialane.routing import Router, RoutingConfig, RoutingRequest
from medialane.types.errors import NoWorkerReady
from medialane.types.feature import MediaSpan
from medialane.types.kv_blocks import KvChange, prompt_block_ids
from medialane.types.request import Endpoint, ModelCard, WorkerLoad

BLOCK = 16
CARD = ModelCard("m", 8192, BLOCK, {}, encoder_cache_tokens=10_000, max_num_seqs=64, kv_group="g")
BUSY = WorkerLoad(num_running=20)


def request(length=1000, *, seed=0, media=(), **more):
    tokens = list(range(seed, seed + length))
    return RoutingRequest({BLOCK: prompt_block_ids(tokens, block_size=BLOCK, media=media)}, length, media, **more)


class Workers:
    """A router and its workers, by name: the first letter is the role."""

    def __init__(self, *names, clock, group="g", **config):
        self.router = Router(RoutingConfig(**config), clock=clock, seed=1)
        self.slots = {name: self.router.join(self._endpoint(name, group)) for name in names}

    def _endpoint(self, name, group):
        role = {"p": "prefill", "d": "decode", "w": "worker"}[name[0]]
        card = msgspec.structs.replace(CARD, role=role, kv_group=group if role == "decode" else "g")
        return Endpoint(name, f"unix:/{name}", True, WorkerLoad(), 0, same_host=True, card=card, role=role)

    def load(self, name, load=BUSY):
        self.router.report(self.slots[name], load)

    def store(self, name, asked):
        ids = asked.block_ids[BLOCK].tobytes()
        self.router.change(self.slots[name], KvChange(0, ids, b""))

    def leave(self, name):
        self.router.leave(self.slots.pop(name))

    def split(self, asked=None):
        """The worker that generates, the one that computes the prompt, and why there is none."""
        split = self.router.pick_split(asked or request())
        for routed in (split.prefill, split.routed):
            if routed is not None:
                routed.begin()
                routed.release()
        self.decisions = [split.routed.decision, split.prefill and split.prefill.decision]
        return split.routed.worker_id, split.prefill and split.prefill.worker_id, split.reason


@pytest.fixture
def make(clock):
    return lambda *names, **more: Workers(*names, clock=clock, **{"prefill_at": "prefill", **more})


def test_prompt_is_computed_by_one_worker_and_continued_by_another(make):
    workers = make("p0", "d0")
    assert workers.split() == ("d0", "p0", "")
    decode, prefill = workers.decisions
    assert (decode.parts.encoder, decode.parts.prefill) == (0, pytest.approx(5 + 1000 * 0.003))
    assert prefill.parts.prefill == pytest.approx(5 + 1000 * 0.05)


def test_workers_without_a_role_do_both_and_are_not_split(make):
    assert make("w0", "w1").split()[1:] == (None, "")


def test_worker_that_prefills_generates_only_if_no_other_does(make):
    workers = make("p0", "d0")
    workers.leave("d0")
    assert workers.split() == ("p0", None, "no_prefill_worker")
    assert workers.router.pick(request()).worker_id == "p0"


def test_worker_that_decodes_computes_prompts_if_no_other_does(make):
    workers = make("p0", "d0")
    workers.router.drain(workers.slots["p0"], draining=True)
    assert workers.split() == ("d0", None, "no_prefill_worker")
    workers.leave("p0")
    assert workers.split() == ("d0", None, "no_prefill_worker")


@pytest.mark.parametrize("group", ["", "other"])
def test_workers_of_different_groups_are_not_paired(make, group):
    assert make("p0", "d0", group=group).split() == ("d0", None, "no_prefill_worker")


def test_prompt_that_is_mostly_cached_where_it_is_continued_stays_there(make):
    workers = make("p0", "d0")
    workers.store("d0", request(960))
    assert workers.split(request(1000)) == ("d0", None, "few_tokens")
    assert workers.split(request(1100)) == ("d0", "p0", "")


def test_prompt_is_computed_where_its_prefix_is_cached(make):
    workers = make("p0", "p1", "d0")
    workers.store("p1", request())
    assert workers.split() == ("d0", "p1", "")


def test_prefix_where_a_prompt_is_continued_weighs_what_its_transfer_costs(make):
    """A few sequences more outweigh it, unless the worker had to compute the prompt."""
    workers = make("p0", "d0", "d1")
    workers.store("d0", request(512))
    workers.load("d0")
    assert workers.split(request(1000))[0] == "d1"
    assert workers.router.pick(request(1000)).worker_id == "d0"


def test_item_is_encoded_where_the_prompt_is_computed(make):
    workers = make("p0", "p1", "d0")
    item = MediaSpan("h" * 64, 10, 500, "image", 500)
    first = workers.router.pick_split(request(media=(item,)))
    for routed in (first.prefill, first.routed):
        routed.begin()
    first.prefill.prefilled(0)
    other = MediaSpan("h" * 64, 20, 500, "image", 500)
    assert workers.split(request(seed=5000, media=(other,)))[1] == first.prefill.worker_id


def test_excluded_worker_computes_no_prompt(make):
    assert make("p0", "d0").split(request(excluded=frozenset(("p0",)))) == ("d0", None, "no_prefill_worker")
    with pytest.raises(NoWorkerReady):
        make("p0", "d0").split(request(excluded=frozenset(("p0", "d0"))))


def test_rank_and_session_are_those_of_the_worker_that_generates(make):
    workers = make("p0", "p1", "d0", "d1")
    first = workers.split(request(rank=0, session_id="s"))
    assert workers.split(request(seed=5000, rank=0, session_id="s"))[0] == first[0]


def test_idle_worker_computes_a_prompt_that_would_delay_nobody(make):
    workers = make("p0", "d0", prefill_at="auto")
    assert workers.split() == ("d0", None, "cheaper")
    workers.load("d0")
    assert workers.split() == ("d0", "p0", "")
    workers.load("p0", WorkerLoad(num_waiting=100))
    assert workers.split() == ("d0", None, "cheaper")


def test_queue_of_workers_that_prefill_is_no_reason_for_its_growth(make):
    """What waits there is in flight at the worker that generates, but has no tokens to be delayed."""
    workers = make("p0", "d0", prefill_at="auto")
    workers.load("d0", WorkerLoad(num_running=4))
    splits = []
    for number in range(40):
        splits.append(workers.router.pick_split(request(seed=5000 * number)))
        for routed in (splits[-1].prefill, splits[-1].routed):
            if routed is not None:
                routed.begin()
    assert 18 <= sum(split.prefill is not None for split in splits) <= 24


def test_prompt_whose_blocks_are_read_is_no_work_for_others_to_wait_for(make):
    workers = make("p0", "d0")
    workers.router.pick_split(request()).routed.begin()
    workers.split(request(seed=5000))
    assert workers.decisions[0].parts.queue == 0


def test_operator_may_have_all_prompts_computed_where_they_are_continued(make):
    workers = make("p0", "d0", prefill_at="decode")
    workers.load("d0")
    assert workers.split() == ("d0", None, "")


def test_choice_without_a_beginning_counts_nowhere(make):
    workers = make("p0", "d0", prefill_at="auto")
    for _ in range(3):
        workers.router.pick_split(request())
    assert workers.router.num_unsent == 0
