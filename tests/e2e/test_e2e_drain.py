"""Both workers of `serve` are restarted by `workers drain --all` while clients stream, and nothing is lost."""

import asyncio
import sys

import pytest
from openai_http import assert_same, chat, picture, text

pytestmark = pytest.mark.vllm

#: Longer than a drain, so that some answers move.
LONG = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
SHORT = {"max_tokens": 50, "ignore_eos": True, "stream": True}
RESTART_S = 240


async def test_rolling_restart_under_load_loses_nothing(ours):
    bodies = [
        chat(text("Tell a long story."), **LONG),
        chat(picture(310), text("Describe the picture."), **SHORT),
        chat(text("Tell a short story."), **SHORT),
    ]
    expected = [await ours.succeed(body) for body in bodies]
    answers = [[] for _ in bodies]
    is_over = asyncio.Event()

    async def client(number):
        while not is_over.is_set():
            answers[number].append(await ours.post(bodies[number]))

    clients = [asyncio.create_task(client(number)) for number in range(len(bodies))]
    draining = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "medialane",
            "workers",
            "drain",
            "--all",
            "--gateway",
            ours.base_url,
            "--timeout",
            str(RESTART_S),
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await draining.communicate()
    is_over.set()
    await asyncio.gather(*clients)
    assert draining.returncode == 0, output
    assert output.count(b"ready again after") == 2
    for right, given in zip(expected, answers, strict=True):
        for answer in given:
            assert answer.status == 200
            assert not [event for event in answer.events if "error" in event]
            assert_same(answer.ids, right.ids)
    page = await ours.metrics()
    assert page.value("medialane_worker_state", state="ready") == 2
