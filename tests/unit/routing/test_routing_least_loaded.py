import pytest

from medialane.core.errors import NoWorkerReady
from medialane.core.request import Endpoint, WorkerLoad
from medialane.routing import LeastLoaded


def endpoint(name, *, ready=True, in_flight=0, running=0, waiting=0):
    return Endpoint(name, f"unix:/{name}", ready, WorkerLoad(running, waiting), in_flight)


def test_least_in_flight_wins():
    decision = LeastLoaded().pick([endpoint("a", in_flight=3), endpoint("b", in_flight=1), endpoint("c", in_flight=2)])
    assert decision.worker_id == "b"
    assert decision.reason == "least loaded"


def test_what_the_worker_reports_counts_when_it_is_more():
    endpoints = [endpoint("a", in_flight=0, running=4, waiting=1), endpoint("b", in_flight=2)]
    assert LeastLoaded().pick(endpoints).worker_id == "b"


def test_ties_go_round():
    router, endpoints = LeastLoaded(), [endpoint("a"), endpoint("b"), endpoint("c")]
    assert sorted(router.pick(endpoints).worker_id for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_worker_that_is_not_ready_is_never_chosen():
    endpoints = [endpoint("a", ready=False), endpoint("b", in_flight=50)]
    assert LeastLoaded().pick(endpoints).worker_id == "b"


@pytest.mark.parametrize("endpoints", [[], [endpoint("a", ready=False)]])
def test_no_ready_worker_is_unavailable_with_retry_after(endpoints):
    with pytest.raises(NoWorkerReady) as caught:
        LeastLoaded().pick(endpoints)
    assert caught.value.status == 503
    assert caught.value.retry_after_s == 5
