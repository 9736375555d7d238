import msgspec

from medialane.core.request import CostParts, RoutingDecision
from medialane.routing.decisions import Decisions


def decision(name):
    return RoutingDecision(name, "why", cached_tokens=32, parts=CostParts(prefill=1.5, queue=2.0))


def filled(size, count):
    ring = Decisions(size)
    numbers = [ring.add(f"r{n}", decision(f"w{n}"), time_s=float(n)) for n in range(count)]
    return ring, numbers


def test_newest_decisions_come_first():
    ring, _ = filled(4, 3)
    assert [record.request_id for record in ring.last()] == ["r2", "r1", "r0"]
    assert [record.request_id for record in ring.last(1)] == ["r2"]


def test_only_recent_decisions_are_kept():
    ring, _ = filled(4, 11)
    assert [record.request_id for record in ring.last()] == ["r10", "r9", "r8", "r7"]


def test_engine_report_is_added_to_the_decision():
    ring, numbers = filled(4, 5)
    ring.prefilled(numbers[3], reported_cached_tokens=16, first_token_ms=12.5)
    found = {record.request_id: record for record in ring.last()}
    assert found["r3"].reported_cached_tokens == 16
    assert found["r3"].first_token_ms == 12.5
    assert found["r4"].reported_cached_tokens is None


def test_report_for_an_evicted_decision_is_ignored():
    ring, numbers = filled(4, 6)
    before = ring.last()
    ring.prefilled(numbers[0], reported_cached_tokens=16, first_token_ms=1.0)
    ring.prefilled(17, reported_cached_tokens=16, first_token_ms=1.0)
    assert ring.last() == before


def test_record_serialises_to_json():
    ring, _ = filled(4, 1)
    seen = msgspec.json.decode(msgspec.json.encode(ring.last()))
    assert seen[0]["decision"]["parts"] == {"prefill": 1.5, "queue": 2.0}
    assert seen[0]["decision"]["worker_id"] == "w0"
