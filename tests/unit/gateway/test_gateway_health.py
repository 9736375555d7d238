"""What `/health` reports about the workers."""

from types import SimpleNamespace

import msgspec
import pytest

from medialane.gateway import health_of


def workers(total, ready, failing=0, encoders=()):
    """`encoders` are whether each of them is connected."""
    of_role = {"worker": [None] * total, "encoder": [SimpleNamespace(client=1 if up else None) for up in encoders]}
    return SimpleNamespace(
        links=dict.fromkeys(range(total + len(encoders))),
        num_ready=ready,
        num_failing=failing,
        of_role=of_role.__getitem__,
    )


def test_healthy_response_equals_vllms():
    assert health_of(workers(2, 2)).response() == (200, b"")


def test_missing_worker_is_reported_while_others_serve():
    status, body = health_of(workers(3, 1, failing=1)).response()
    assert status == 200
    health = msgspec.json.decode(body)
    assert health["status"] == "degraded"
    assert health["problems"][0] == "1 of 3 workers are ready"
    assert health["problems"][1].startswith("1 of 3 workers refuse")


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
