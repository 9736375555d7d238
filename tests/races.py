"""Races with other processes that a test cannot wait for: what happens right before a system call of ours."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_event = ""
_actions: list[Callable[[], object]] = []
_acting: list[bool] = []


@contextmanager
def before(event: str, *actions: Callable[[], object]) -> Iterator[None]:
    """Call each of the actions, in turn, right before a system call of this process, in its thread. `event` is its name
    in https://docs.python.org/3/library/audit_events.html; the actions may make such calls themselves. Fails unless all
    were called."""
    global _event
    if not _event:
        sys.addaudithook(_audit)  # it cannot be removed
    _event = event
    _actions.extend(reversed(actions))
    try:
        yield
        assert not _actions, f"{len(_actions)} calls less than expected were made"
    finally:
        _actions.clear()


def _audit(event: str, _arguments: object) -> None:
    if _actions and event == _event and not _acting:
        _acting.append(True)
        try:
            _actions.pop()()
        finally:
            _acting.clear()
