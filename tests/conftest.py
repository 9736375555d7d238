"""Checks that apply to every test (no leaked resources), and the tiny model.

* A test that leaves an asyncio task running, an arena file open, mapped or abandoned, or another scheduling policy,
  fails; a unit test also if it leaves a descriptor open.
* Unit tests run their loop in debug mode: a callback that blocks the loop fails the test. The limit is far above
  the 10 ms that the product allows itself, because a busy test machine alone takes a process off the CPU for that long;
  `medialane bench loop` measures the 10 ms. Of the stack that debug mode keeps of each callback, task and future, only
  the last frames are: all of them, pytest's included, took more than half of the tests' CPU time.
* Tests that start vLLM (marker `vllm`) get minutes instead of seconds.
"""

import asyncio
import gc
import inspect
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from builders import Clock, checked_arena
from left_behind import arena_files, descriptors, new_descriptors, other_runs
from waiting import comes_true, comes_true_sync

BLOCKED_S = 1.5
SETTLE_S = 0.2
OTHER_TEST_S = 30.0
VLLM_TIMEOUT_S = 600
STACK_FRAMES = 3
#: Rooms whose unit tests fail if they leave a descriptor open.
COUNTED_ROOMS = {"arena", "gateway", "media", "routing", "runtime", "store", "types", "wire", "worker"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(VLLM_TIMEOUT_S))
    if "medialane.gateway.intake" in sys.modules:  # as a gateway does when it starts
        from medialane.gateway.intake import warm_up

        warm_up()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the tiny Qwen2.5-VL, cached between sessions in the user's cache folder."""
    from medialane.testing.tiny_model import build_tiny_model, cache_folder

    return build_tiny_model(cache_folder(os.environ))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fairness():
    """How the event loop of a test is shared out."""
    from medialane.runtime.tasks import LoopFairness

    found = LoopFairness()
    yield found
    found.close()


@pytest.fixture
def become_another_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have this process take itself for one of another user, until the end of the test or `monkeypatch.undo`."""
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.fixture
async def resolve_names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have names of hosts resolve to these IPv4 addresses and ports, in a test's event loop."""

    def resolve(*addresses: tuple[str, int]) -> None:
        async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

        monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", getaddrinfo, raising=False)

    return resolve


@pytest.fixture
def arena():
    """Of 16 MiB. A test that leaves a pin or a reservation fails."""
    with checked_arena() as arena:
        yield arena


@pytest.fixture(autouse=True, scope="module")
def _small_heap_to_collect():
    """Exclude objects of earlier modules from garbage collection, which would block the loop for up to a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request):
    """Set up before the test's own fixtures and torn down after them, when their resources are released."""
    before, scheduler = arena_files(), os.sched_getscheduler(0)
    is_async = inspect.iscoroutinefunction(request.function)
    if is_async:
        request.getfixturevalue("_loop_watch")
    opened = descriptors()
    yield
    left = _arena_files_after(before)
    assert not left, f"arena files left behind: {left}"
    if not is_async and _counts_descriptors(request):
        comes_true_sync(lambda: not new_descriptors(opened), SETTLE_S)
        assert not _still_open(opened), f"descriptors left open: {_still_open(opened)}"
    assert os.sched_getscheduler(0) == scheduler, "later tests and their processes would starve others"


@pytest.fixture
async def _loop_watch(request, caplog):
    loop = asyncio.get_running_loop()
    if "unit" in request.path.parts:
        loop.set_debug(True)
        loop.slow_callback_duration = BLOCKED_S
    before, opened = asyncio.all_tasks(), descriptors()
    # Not by the fixture `monkeypatch`: this one would then end before it undoes what the test has patched.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback, "walk_stack", partial(_last_frames, traceback.walk_stack))
        yield
    left = await _settled(before)
    assert not left, f"tasks left behind: {left}"
    if _counts_descriptors(request):
        await comes_true(lambda: not new_descriptors(opened), SETTLE_S)  # a transport is closed by its loop
        assert not _still_open(opened), f"descriptors left open: {_still_open(opened)}"
    slow = [record.getMessage() for record in _all_records(caplog) if record.name == "asyncio"]
    assert not [message for message in slow if message.startswith("Executing ")], slow


def _counts_descriptors(request) -> bool:
    """Elsewhere tests share servers, preparers and libraries, which open what they need when a test first needs it."""
    return not COUNTED_ROOMS.isdisjoint(request.path.parts) and "unit" in request.path.parts


def _last_frames(walk, frame):
    return islice(walk(frame), STACK_FRAMES)


def _all_records(caplog) -> list[logging.LogRecord]:
    return caplog.get_records("setup") + caplog.get_records("call") + caplog.get_records("teardown")


async def _settled(before: set[asyncio.Task]) -> set[asyncio.Task]:
    """Return the tasks still running after SETTLE_S: a cancelled task needs an iteration of the loop to end."""

    def left() -> set[asyncio.Task]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    await comes_true(lambda: not left(), SETTLE_S)
    return left()


def _arena_files_after(before: dict[str, str]) -> dict[str, str]:
    """The arena files that were not there `before` and stay: one that another process is just making has no owner for a
    moment, and one of a store that a test of another pytest worker has killed none until that test ends."""
    left: dict[str, str] = {}

    def is_gone() -> bool:
        left.clear()
        left.update((name, why) for name, why in arena_files().items() if name not in before)
        return not left

    if comes_true_sync(is_gone, SETTLE_S) or "open" in left.values():
        return left
    if "PYTEST_XDIST_WORKER" in os.environ:
        comes_true_sync(is_gone, OTHER_TEST_S)
    return {} if left and other_runs() else left


def _still_open(before: dict[int, str]) -> list[str]:
    """The descriptors that are new, unless they were only waiting for the garbage collector, which warns of them."""
    if new_descriptors(before):
        gc.collect()
    return new_descriptors(before)
