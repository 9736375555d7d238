"""SIGTERM ends everything; runs last, since it stops the shared servers."""

import asyncio
import os
import signal

import pytest
from openai_http import chat, in_flight, load, long_chat, picture, text
from process_tree import descendants, is_alive

from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.thread]


async def test_sigterm_ends_a_worker_cleanly_with_a_request_in_flight(serve, ours, runtime_directory):
    request = asyncio.create_task(ours.post(long_chat(picture(201), text("Tell a long story."), stream=True)))
    await eventually(lambda: in_flight(ours, 1), "the request runs", 60)
    (address,) = [a for a, n in (await load(ours)).items() if n == 1]
    stopped = serve.worker_pid(address)
    family, folders = [stopped, *descendants(stopped)], set(runtime_directory.iterdir())
    os.kill(stopped, signal.SIGTERM)
    await eventually(lambda: not any(map(is_alive, family)), "all that it started has ended", 90)
    assert not request.done(), "its answer goes on at the other worker"
    request.cancel()
    await asyncio.wait([request])
    await eventually(lambda: "exited (exit status 0)" in serve.log.read_text(), "its exit is clean", 20)
    assert folders - set(runtime_directory.iterdir()), "it removes its engine's sockets"


async def test_sigterm_leaves_no_process_arena_or_socket_while_a_worker_restarts(serve, ours, runtime_directory):
    await ours.succeed(chat(picture(200), text("Describe the picture.")))
    everyone = descendants(serve.pid)
    # A worker and its engine, the worker that restarts, the gateway, the store, its fork server and preparers.
    assert len(everyone) >= 2 + 1 + 1 + 1 + 1 + 2
    arenas = serve.arenas()
    assert arenas
    assert list(runtime_directory.iterdir())
    assert serve.stop() == 0, serve.tail()
    await eventually(lambda: not any(map(is_alive, everyone)), "everyone has ended", 10, more=lambda: everyone)
    assert not [path for path in arenas if path.exists()]
    assert not list(runtime_directory.iterdir())
