"""The record of a request: what operators see of it while it lives and after it, and what they never see."""

import time

import msgspec
import pytest

from medialane.gateway import HandoverPath, ShmTransport
from medialane.gateway.http import usable_id
from medialane.gateway.operators import RequestSums
from medialane.gateway.records import (
    RecentRequests,
    RequestFilter,
    RequestRates,
    RequestRecord,
    Waits,
    request_view,
    series,
)
from medialane.types.errors import InvalidImage, MediaFetchFailed, PromptRejected, to_report
from medialane.types.feature import Feature, StagedItem
from medialane.types.media import STAGES, MediaRef, MediaSize
from medialane.types.request import CompletionDelta, OutputDelta, RoutingDecision

HASH = "0123456789abcdef" * 4
SECRET_URL = "https://user:password@cdn.example.com:8443/path/to/secret.png?token=secret"
SHM = HandoverPath(STAGES["features"], ShmTransport(None))


def record(*refs, model="m"):
    made = RequestRecord()
    made.id = "r1"
    made.received(refs, model=model, streams=True)
    return made


def image(param="a", **where):
    return MediaRef("image", param, **(where or {"data": b"1234"}))


def staged(ref, **more):
    return StagedItem(ref, Feature(ref.modality, HASH, b"", (), MediaSize(width=640, height=480)), None, **more)


def test_items_have_their_own_steps_which_count_for_their_request():
    request = record(image())
    with request.finding(image()) as timeline, timeline.measure("fetch"):
        timeline.num_misses += 1
    (item,) = request.items.values()
    assert [step.name for step in item.timeline.steps] == ["fetch"]
    assert (request.timeline.steps, request.timeline.num_misses) == ([], 1)
    assert request.timeline.seconds.keys() == {"fetch"}
    assert request.timeline.started_at <= item.started_at <= item.timeline.steps[0].started_at <= item.ended_at
    item.mm_hash = HASH
    request.embedded(HASH, time.perf_counter())
    assert [step.name for step in item.timeline.steps] == ["fetch", "encode"]


def test_failed_item_has_the_code_of_its_error():
    request = record(image())
    with pytest.raises(InvalidImage), request.finding(image()):
        raise InvalidImage("no image")
    assert [item.error for item in request.items.values()] == [InvalidImage.code]


def test_request_shows_what_it_waits_for():
    request = record(image(), image("b", url=SECRET_URL))
    first, second = request.items.values()
    with request.timeline.measure("upload"):
        assert request_view(request).stage == "upload"
    with request.finding(image()) as own:
        own.enter("prepare")
        with request.finding(image("b", url=SECRET_URL)):
            assert request_view(request).stage == "fetch", "the first of what its items wait for"
            assert [item.stage for item in request_view(request).items] == ["prepare", "fetch"]
        assert request_view(request).stage == "prepare"
        own.add("decode", 0.020)
    assert request_view(request).items[0].stages_ms == {"decode": 20.0}
    with request.timeline.measure("route"):
        assert request_view(request).stage == "route"
    request.ended(is_disconnected=False)
    view = request_view(request)
    assert view.stage is None
    assert view.stages_ms["decode"] == 20.0
    assert first.outcome is None
    assert second.live is None


@pytest.mark.parametrize(
    ("is_hit", "steps", "outcome"),
    [(True, (), "hit"), (False, ("decode", "process"), "new"), (False, ("fetch",), "shared"), (None, (), "sent")],
)
def test_item_shows_how_it_was_found(is_hit, steps, outcome):
    request = record(image())
    with request.finding(image()) as own:
        for step in steps:
            own.add(step, 0.01)
    request.prepared([staged(image(), is_hit=is_hit)], [300])
    (item,) = request_view(request).items
    assert (item.outcome, item.bytes, item.width, item.tokens, item.source) == (outcome, 4, 640, 300, "body")


def test_urls_hashes_and_salts_are_not_shown():
    ref = image(url=SECRET_URL, salt="the-salt", owner="the-owner")
    request = record(ref)
    request.prepared([staged(ref, is_hit=True)])
    error = MediaFetchFailed(f"cannot fetch {SECRET_URL} or data:image/png;base64,AAAA")
    request.failed(to_report(error), quotes_client=False)
    request.ended(is_disconnected=False)
    shown = msgspec.json.encode(request_view(request, is_full=True)).decode()
    for secret in ("password", "secret", "path/to", "AAAA", "the-salt", "the-owner", HASH[:9]):
        assert secret not in shown
    (item,) = request_view(request).items
    assert (item.origin, item.hash) == ("cdn.example.com:8443", HASH[:8])
    assert request_view(request).error.reason == "cannot fetch https://cdn.example.com:8443/... or data:..."


def test_message_that_quotes_the_client_is_not_kept():
    request = record()
    request.failed(to_report(PromptRejected("the grammar 'my private words' is wrong")), quotes_client=True)
    assert request_view(request).error.reason == ""


@pytest.mark.parametrize("text", ["no URL: here", "3 of 4 workers", "messages[0].content[1]"])
def test_message_without_urls_is_unchanged(text):
    request = record()
    request.failed(to_report(InvalidImage(text)), quotes_client=False)
    assert request.error.reason == text


def test_attempts_name_their_workers_and_how_they_ended():
    request = record()
    first, second = RoutingDecision("w0", "idle", num_tokens=9), RoutingDecision("w1", "idle", num_tokens=9)
    request.sending(first, SHM)
    request.sending(first, SHM)
    request.attempt_failed("w0", 0, SHM, "worker_lost")
    request.attempt_failed("w9", 0, SHM, "worker_draining")  # nothing was sent there
    request.sending(second, SHM)
    delta = OutputDelta("r", [CompletionDelta(0, "a", [1, 2])], num_cached_tokens=8)
    request.answered(delta, second, 9, {}, times=(time.perf_counter(), time.perf_counter()))
    view = request_view(request, is_full=True)
    assert [(each.worker, each.error) for each in view.attempts] == [
        ("w0", "worker_lost"),
        ("w9", "worker_draining"),
        ("w1", ""),
    ]
    assert (view.worker, view.prompt_tokens, view.cached_tokens, view.stage) == ("w1", 9, 8, "answer")
    assert view.decision.worker == "w1"
    assert view.ttft_ms >= 0


@pytest.mark.parametrize("given", ["", "with space", "é", "a" * 129, "<script>"])
def test_unusable_id_is_replaced(given):
    found = usable_id(given)
    assert found != given
    assert len(found) == 32


def test_request_without_a_status_was_left_by_its_client():
    request = record()
    request.ended(is_disconnected=True)
    assert (request_view(request).status, request_view(request).error.code) == (499, "client_disconnected")


def test_error_of_the_app_has_its_status_as_code():
    request = record()
    request.status = 404
    request.ended(is_disconnected=False)
    assert request_view(request).error.code == "404"


def ended(recent, request):
    recent.begin(request)
    request.ended(is_disconnected=False)
    recent.end(request)
    return request


def good(**more):
    request = record(**more)
    request.status = 200
    return request


def test_requests_are_filtered():
    recent = RecentRequests()
    video = record(MediaRef("video", "v", data=b"1"), model="other")
    video.status, video.tenant = 200, "acme"
    video.sending(RoutingDecision("host/3", "idle"), SHM)
    slow = good()
    slow.timeline.started_at -= 5
    failed = record(image())
    failed.failed(to_report(InvalidImage("broken")), quotes_client=False)
    for each in (video, slow, failed):
        ended(recent, each)
    live = good()
    recent.begin(live)

    def found(**wanted):
        return list(recent.newest(RequestFilter(**wanted)))

    assert found() == [live, failed, slow, video]
    assert found(model="oth") == found(tenant="acme") == found(modality="video") == found(worker="host/3") == [video]
    assert found(failed=True) == [failed]
    assert found(slow_ms=1000) == [slow]
    assert found(live=True) == [live]
    assert found(modality="text") == [live, slow]
    assert recent.live == [live]
    assert recent.find("r1") is live


def test_failed_requests_are_kept_longer_than_others():
    recent = RecentRequests()
    failed = record()
    failed.failed(to_report(InvalidImage("broken")), quotes_client=False)
    ended(recent, failed)
    for _ in range(1100):
        ended(recent, good())
    assert failed not in list(recent.newest(RequestFilter()))
    assert list(recent.newest(RequestFilter(failed=True))) == [failed]


def test_rates_of_gateways_add_up():
    now = 1_000_000.0
    one, other = RequestRates(lambda: now), RequestRates(lambda: now)
    for rates in (one, one, other):
        request = good()
        request.generated_tokens = 7
        request.ended(is_disconnected=False)
        rates.add(request)
    parts = [RequestSums(steps=rates.steps()) for rates in (one, other)]
    summed = series(sum(parts, start=RequestSums()).steps, now)
    assert [step.requests for step in one.steps().values()] == [2], "the sum is another object"
    assert summed.values["requests"][-1] == 3
    assert summed.values["generated_tokens"][-1] == 21
    assert summed.values["requests"][:-1] == [0] * 179
    assert summed.values["ttft_p95_ms"][-1] is None
    assert summed.started_at + 179 * summed.step_s <= now


def test_steps_older_than_a_quarter_of_an_hour_are_forgotten():
    now = 1_000_000.0
    rates = RequestRates(lambda: now)
    rates.add(ended(RecentRequests(), good()))
    now += 901
    assert not rates.steps()


@pytest.mark.parametrize(("ms", "share", "expected"), [(1, 0.5, 1.0), (1500, 0.5, 1536.0), (200_000, 1.0, 262144.0)])
def test_percentile_lies_in_its_bucket(ms, share, expected):
    waits = Waits()
    for _ in range(4):
        waits.count(ms)
    assert waits.percentile_ms(share) == expected


def test_ending_a_request_is_cheap():
    """At 500 requests/s, 1 % of a core is 20 us for each."""
    recent, number = RecentRequests(), 2000
    started = time.process_time()
    for _ in range(number):
        request = good()
        recent.begin(request)
        with request.finding(image()):
            pass
        request.ended(is_disconnected=False)
        recent.end(request)
    assert (time.process_time() - started) / number < 200e-6


@pytest.mark.parametrize("text", ["a" * 1_000_000, "a://" * 250_000, "http://u:" * 100_000, "a." * 500_000])
def test_urls_are_removed_from_long_messages_in_time(text):
    error = to_report(InvalidImage(text))
    started = time.thread_time()
    record().failed(error, quotes_client=False)
    assert time.thread_time() - started < 0.1


def test_url_that_is_cut_shows_no_password():
    for number in range(8150, 8200):
        request = record()
        error = InvalidImage(f"http://h/{'x' * number} http://user:secret{'x' * 90}@host/")
        request.failed(to_report(error), quotes_client=False)
        assert "secret" not in request.error.reason
