"""SIGTERM ends everything; runs last, since it stops the shared servers."""

import asyncio
import json
import os
import re
import signal
from collections import Counter

import pytest
from openai_http import chat, in_flight, load, long_chat, picture, text
from process_tree import descendants, is_alive

from waiting import eventually

LAST_ID = "of-the-last-answer"

pytestmark = [pytest.mark.vllm, pytest.mark.thread]


async def test_sigterm_ends_a_worker_cleanly_with_a_request_in_flight(serve, ours, runtime_directory):
    body = long_chat(picture(201), text("Tell a long story."), stream=True)
    request = asyncio.create_task(ours.post(body, headers={"X-Request-Id": "of-a-client-that-goes"}))
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
    last = await ours.post(chat(picture(200), text("Describe the picture.")), headers={"X-Request-Id": LAST_ID})
    assert (last.status, last.headers["x-request-id"]) == (200, LAST_ID)
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


async def test_whole_log_is_json_with_one_line_for_each_request(serve):
    """Of everything that was printed in this session, by all processes: vLLM, its engines, and their libraries in C."""
    written = serve.log.read_text()
    assert not any(secret in written for secret in ("Tell a long story.", "Describe the picture.", "/9j/4AAQ"))
    lines = [json.loads(line) for line in written.splitlines()]
    for line in lines:
        assert line.keys() >= {"ts", "level", "logger", "msg", "component"}, line
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"]), line
    components = {line["component"] for line in lines}
    assert components >= {"serve", "warm", "store", "worker-0", "worker-1", "gateway"}
    assert {line["component"] for line in lines if line.get("process") == "EngineCore"} >= {"worker-0", "worker-1"}
    requests = [line for line in lines if line["logger"] == "medialane.access"]
    assert Counter(line["request_id"] for line in requests).most_common(1)[0][1] == 1
    by_id = {line["request_id"]: line for line in requests}
    aborted, answered = by_id["of-a-client-that-goes"], by_id[LAST_ID]
    assert aborted["error"] == "client_disconnected"
    assert (answered["status"], answered["generated_tokens"]) == (200, 10)
    assert (answered["items"][0]["modality"], answered["items"][0]["outcome"]) == ("image", "new")
    assert answered["worker"].endswith(("/0", "/1"))
    assert answered["stages_ms"].keys() >= {"intake", "decode", "process", "route", "prefill", "answer"}
