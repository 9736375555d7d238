"""Which requests a flow accepts, in virtual time, of a server that serves one after the other."""

import heapq
from itertools import count

import pytest

from medialane.gateway.admission import Flow

PATIENCE_S = 30.0
SERVICE_S = 0.05
BODY_S = 0.01


class Server:
    """Serves what is accepted, the oldest first, each in `SERVICE_S`; its client has an answer then. `waits_s` are
    those of accepted requests, `refusals` come with their times."""

    def __init__(self, *, limit_s=None):
        self.flow = Flow("", is_media=False)
        self.now = 0.0
        self.waits_s = []
        self.refusals = []
        self.accepted_at = []
        self._limit_s = limit_s
        self._events, self._numbers = [], count()
        self._queue = []
        self._is_busy = False
        self._stop = (1e9, 1e9)

    def stop(self, begins, *, seconds):
        """Take that much longer for what is served then."""
        self._stop = (begins, begins + seconds)

    def at(self, time, action):
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def run(self, until=1e9):
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def ask(self, on_answer=lambda: None):
        request = object()
        refusal = self.flow.accept(request, self.now, PATIENCE_S, self._limit_s)
        if refusal is not None:
            self.refusals.append((self.now, refusal))
            return
        arrived = self.now
        self.accepted_at.append(arrived)

        def received():
            self.flow.arrived(request)
            self._queue.append((request, arrived, on_answer))
            self.flow.lanes["engine"].add(request, self.now)
            self._serve()

        self.at(self.now + BODY_S, received)

    def _serve(self):
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        request, arrived, on_answer = self._queue.pop(0)
        self.flow.lanes["engine"].leave(request, self.now, is_served=True)
        self.flow.sent(request, self.now)

        def done():
            self._is_busy = False
            self.waits_s.append(self.now - arrived)
            self.flow.answered(SERVICE_S)
            self.flow.end(request)
            on_answer()
            self._serve()

        begins, ends = self._stop
        self.at((ends if begins <= self.now < ends else self.now) + SERVICE_S, done)

    def load(self, times_capacity, *, begins=0.0, seconds):
        interval = SERVICE_S / times_capacity
        for number in range(round(seconds / interval)):
            self.at(begins + number * interval, self.ask)


def p99(values):
    return sorted(values)[int(len(values) * 0.99)]


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_batch_that_is_sent_at_once_is_accepted_whole(seconds):
    server = Server()
    for number in range(200):
        server.at(seconds * number / 200, server.ask)
    server.run()
    assert (len(server.waits_s), server.refusals) == (200, [])
    assert max(server.waits_s) > 9, "it takes as long as it takes"


def test_one_more_client_is_served_beside_a_batch():
    server = Server()
    for _ in range(200):
        server.at(0.0, server.ask)
    for number in range(4):
        server.at(2.0 + number, server.ask)
    server.run()
    assert (len(server.waits_s), server.refusals) == (204, [])


def test_clients_that_wait_for_their_answers_are_never_refused_however_many_they_are():
    server = Server()

    def client():
        if server.now < 60:
            server.ask(client)

    for _ in range(256):
        server.at(0.0, client)
    server.run()
    assert server.refusals == []
    assert len(server.waits_s) > 1400


@pytest.mark.parametrize("times_capacity", [1.5, 3.0, 5.0])
def test_rate_that_is_too_high_is_refused_and_what_is_accepted_waits_for_seconds_at_most(times_capacity):
    server = Server()
    server.load(times_capacity, seconds=60)
    server.run()
    assert p99(server.waits_s) < (3 if times_capacity <= 3 else 5.5)
    assert sorted(server.waits_s)[len(server.waits_s) // 2] < 1
    assert len(server.waits_s) >= 0.97 * 60 / SERVICE_S, "the server has work all the time"
    assert all(not refusal.is_late for _, refusal in server.refusals)


def test_what_cannot_drain_within_the_patience_is_refused_at_once():
    server = Server()
    for _ in range(1000):
        server.at(0.0, server.ask)
        server.at(0.5, server.ask)
    server.run()
    assert 1000 <= len(server.waits_s) < 1010, "by the pace, which is known at the second time"
    assert all(refusal.is_late and refusal.wait_s > 0 for _, refusal in server.refusals)


def test_everything_is_accepted_two_seconds_after_an_overload():
    server = Server()
    server.load(3.0, seconds=20)
    server.load(0.7, begins=20.0, seconds=20)
    server.run()
    assert server.refusals
    assert max(time for time, _ in server.refusals) < 22


@pytest.mark.parametrize("times_capacity", [3.0, 5.0])
def test_limit_of_the_time_to_first_token_is_kept_and_the_server_stays_busy(times_capacity):
    server = Server(limit_s=1.0)
    server.load(times_capacity, seconds=30)
    server.run()
    assert p99(server.waits_s) <= 1.1
    assert len(server.waits_s) >= 0.97 * 30 / SERVICE_S
    assert any(refusal.is_late for _, refusal in server.refusals)


def test_request_is_accepted_if_none_waits_however_long_the_last_ones_took():
    server = Server(limit_s=SERVICE_S / 2)
    for number in range(10):
        server.at(float(number), server.ask)
    server.run()
    assert (len(server.waits_s), server.refusals) == (10, [])


def test_clients_that_send_their_bodies_slowly_delay_nobody():
    server = Server(limit_s=1.0)
    slow = [object() for _ in range(500)]
    for request in slow:
        assert server.flow.accept(request, 0.0, PATIENCE_S) is None
    server.load(0.9, begins=3.0, seconds=10)
    for _ in range(8):
        server.at(8.0, server.ask)
    server.run()
    assert server.refusals == []
    for request in slow:
        server.flow.end(request)
    assert server.flow.num_in_flight == 0


def test_stall_of_the_server_is_noticed_without_anything_that_is_served():
    server = Server(limit_s=2.0)
    server.load(2.0, seconds=0.9)
    server.run(until=1.0)
    assert server.flow.pace_s() == pytest.approx(SERVICE_S, rel=0.1)
    wait_s = server.flow.wait_s(1.0)
    assert server.flow.wait_s(5.0) - wait_s == pytest.approx(4.0, abs=2 * SERVICE_S), "counted once"


@pytest.mark.parametrize("num_clients", [32, 256])
def test_hiccup_of_two_seconds_refuses_nobody_however_many_wait(num_clients):
    server = Server()

    def client():
        if server.now < 60:
            server.ask(client)

    for _ in range(num_clients):
        server.at(0.0, client)
    server.stop(20.0, seconds=2.0)
    for number in range(3):  # in it, after it
        server.at(21.5 + number, server.ask)
    server.run()
    assert server.refusals == []
    assert len(server.waits_s) > 1100


def test_newcomers_are_refused_soon_after_all_workers_have_stopped():
    server = Server()
    server.load(0.9, seconds=60)
    server.stop(20.0, seconds=40.0)
    server.run()
    assert 21.0 < server.refusals[0][0] < 22
    assert max(time for time in server.accepted_at if time < 60) < 22, "none is accepted from then on"
