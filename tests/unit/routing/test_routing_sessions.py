import pytest

from medialane.routing.sessions import Sessions


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions(clock):
    return Sessions(ttl_s=10, max_sessions=3, clock=clock)


def test_session_is_found_at_its_last_worker(sessions):
    sessions.note("s", ("a", 0))
    sessions.note("s", ("b", 1))
    assert sessions.find("s") == ("b", 1)
    assert sessions.find("other") is None


def test_session_expires(sessions, clock):
    sessions.note("s", ("a", 0))
    clock.now = 10.0
    assert sessions.find("s") == ("a", 0)
    clock.now = 10.1
    assert sessions.find("s") is None


def test_request_renews_its_session(sessions, clock):
    sessions.note("s", ("a", 0))
    clock.now = 9.0
    sessions.note("s", ("a", 0))
    clock.now = 18.0
    assert sessions.find("s") == ("a", 0)


def test_oldest_session_is_evicted(sessions):
    for name in ("s", "t", "u"):
        sessions.note(name, ("a", 0))
    sessions.note("s", ("a", 0))
    sessions.note("v", ("a", 0))
    assert sessions.find("t") is None
    assert sessions.find("s") == ("a", 0)
    assert len(sessions) == 3


def test_expired_sessions_use_no_memory(sessions, clock):
    sessions.note("s", ("a", 0))
    sessions.note("t", ("a", 0))
    clock.now = 11.0
    sessions.note("u", ("a", 0))
    assert len(sessions) == 1
