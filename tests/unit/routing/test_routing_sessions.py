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


def test_session_is_found_where_it_was_last(sessions):
    sessions.note("s", ("a", 0))
    sessions.note("s", ("b", 1))
    assert sessions.find("s") == ("b", 1)
    assert sessions.find("other") is None


def test_session_is_forgotten_after_its_time(sessions, clock):
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


def test_oldest_session_makes_room(sessions):
    for name in ("s", "t", "u"):
        sessions.note(name, ("a", 0))
    sessions.note("s", ("a", 0))
    sessions.note("v", ("a", 0))
    assert sessions.find("t") is None
    assert sessions.find("s") == ("a", 0)
    assert len(sessions) == 3


def test_old_sessions_take_no_memory(sessions, clock):
    sessions.note("s", ("a", 0))
    sessions.note("t", ("a", 0))
    clock.now = 11.0
    sessions.note("u", ("a", 0))
    assert len(sessions) == 1
