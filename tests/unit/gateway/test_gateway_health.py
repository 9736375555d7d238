"""What `/health` reports about the workers."""

import msgspec
import pytest

from medialane.gateway import WorkerPool, health_of
from medialane.testing.fake_worker import FAKE_CARD, FakeLink
from medialane.types.errors import StartupFailed
from medialane.types.request import WorkerLoad
from medialane.wire import LoadReport

ENCODER = msgspec.structs.replace(FAKE_CARD, role="encoder")


def workers(total, ready, failing=0, encoders=(), otherwise="lost", unknown_blocks=0, failing_tasks=0):
    """`encoders` are whether each of them is ready; `otherwise` is the state of workers that are not."""
    links = [FakeLink(f"w{number}") for number in range(total)]
    encoder_links = [FakeLink(f"e{number}", ENCODER) for number in range(len(encoders))]
    pool = WorkerPool([*links, *encoder_links])
    for number, link in enumerate(links):
        if number < ready or otherwise != "lost":
            link.join()
            state = {} if number < ready else {f"is_{otherwise}": True}
            reported = {"has_unknown_blocks": number < unknown_blocks, "has_failing_tasks": number < failing_tasks}
            link.worker.report(LoadReport((WorkerLoad(),), **state, **reported))
        elif total - number <= failing:
            link.refuse(StartupFailed("another model"))
    for link, is_ready in zip(encoder_links, encoders, strict=True):
        if is_ready:
            link.join()
    return pool


def test_healthy_response_equals_vllms():
    assert health_of(workers(2, 2)).response() == (200, b"")


def test_gateway_is_ready_while_a_worker_is_and_until_it_stops():
    assert health_of(workers(2, 1)).readiness(is_stopping=False) == (200, b"")
    status, body = health_of(workers(2, 0)).readiness(is_stopping=False)
    assert (status, b"0 of 2 workers are ready" in body) == (503, True)
    status, body = health_of(workers(2, 2)).readiness(is_stopping=True)
    assert (status, b"stopping" in body) == (503, True)


def test_health_in_one_line_names_all_problems():
    assert str(health_of(workers(2, 2))) == "ok"
    assert str(health_of(workers(2, 1), ["no store"])) == "degraded; 1 of 2 workers are ready; no store"


def test_missing_worker_is_reported_while_others_serve():
    status, body = health_of(workers(3, 1, failing=1)).response()
    assert status == 200
    health = msgspec.json.decode(body)
    assert health["status"] == "degraded"
    assert health["problems"][0] == "1 of 3 workers are ready"
    assert health["problems"][1].startswith("1 of 3 workers refuse")


@pytest.mark.parametrize(("ready", "status"), [(1, 200), (0, 503)])
@pytest.mark.parametrize(("state", "text"), [("stalled", "stalled (see its log)"), ("draining", "draining")])
def test_stalled_or_draining_worker_is_reported(ready, status, state, text):
    found = health_of(workers(ready + 1, ready, otherwise=state)).response()
    assert found[0] == status
    assert f"1 of {ready + 1} workers is {text}" in msgspec.json.decode(found[1])["problems"]


def test_worker_whose_background_task_ended_is_reported():
    status, body = health_of(workers(2, 2, failing_tasks=1)).response()
    assert status == 200
    assert msgspec.json.decode(body)["problems"] == ["1 of 2 workers had to restart background tasks (see its log)"]


def test_worker_without_exact_routing_is_reported():
    status, body = health_of(workers(2, 2, unknown_blocks=1)).response()
    assert status == 200
    assert msgspec.json.decode(body)["problems"] == [
        "1 of 2 workers get requests without regard to their KV caches (see its log)"
    ]


def test_problem_of_another_process_is_reported():
    status, body = health_of(workers(1, 1), ["media preparation is restarting", None]).response()
    assert status == 200
    assert msgspec.json.decode(body) == {"status": "degraded", "problems": ["media preparation is restarting"]}


def test_lost_encoder_is_reported_and_requests_are_served():
    assert health_of(workers(2, 2, encoders=[True, True])).response() == (200, b"")
    status, body = health_of(workers(2, 2, encoders=[True, False])).response()
    assert status == 200
    assert msgspec.json.decode(body) == {"status": "degraded", "problems": ["1 of 2 encoders are ready"]}


def test_encoders_alone_serve_nothing():
    status, body = health_of(workers(0, 0, encoders=[True])).response()
    assert status == 503
    assert msgspec.json.decode(body)["problems"] == ["no worker has joined"]


@pytest.mark.parametrize("total", [0, 2])
def test_no_worker_returns_unavailable(total):
    status, body = health_of(workers(total, 0)).response()
    assert status == 503
    assert msgspec.json.decode(body)["status"] == "unavailable"


def test_gateway_that_needs_no_worker_is_healthy_without_one():
    assert health_of(None).response() == (200, b"")
    status, body = health_of(None, ["media preparation is restarting"]).response()
    assert (status, msgspec.json.decode(body)["status"]) == (200, "degraded")
