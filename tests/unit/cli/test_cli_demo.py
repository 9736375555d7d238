"""The demo compares, says so, and with --keep serves until Ctrl-C: here with servers that only record what is done."""

import asyncio
import os
import re
import shlex
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from medialane.cli import demo
from medialane.tools.check import ServerProcess
from waiting import eventually, iterations

MODEL = "/cache/a model"
ANSWERS = [demo.DemoAnswer([1, 2], 0.1, "total;dur=3.0")] * 4


@pytest.fixture
def done(monkeypatch):
    """What the demo does, in order."""
    done = []

    @asynccontextmanager
    async def medialane(model):
        done.append("medialane starts")
        yield ServerProcess("http://127.0.0.1:18000/v1", model, 1, None)
        done.append("medialane stops")

    async def ask_all(_base_url, _model, _questions):
        done.append("medialane answers")
        return ANSWERS

    async def ask_plain(_model, _questions):
        done.append("plain vLLM answers")
        return ANSWERS

    monkeypatch.setattr(demo, "build_tiny_model", lambda _folder: MODEL)
    monkeypatch.setattr(demo, "_medialane", medialane)
    monkeypatch.setattr(demo, "_ask_all", ask_all)
    monkeypatch.setattr(demo, "_ask_plain", ask_plain)
    return done


async def test_demo_compares_and_ends_with_lines_to_paste(done, capsys):
    assert await demo.compared([b"1", b"2"], keep=False) == 0
    assert done == ["plain vLLM answers", "medialane starts", "medialane answers", "medialane stops"]
    compared, _, rest = capsys.readouterr().out.partition("token-identical: yes\n")
    assert "Ctrl-C" not in compared + rest
    assert f"\n  . {sys.prefix}/bin/activate\n" in rest
    command = shlex.split(rest.splitlines()[-1])
    assert command[:3] == ["medialane", "serve", MODEL]
    assert "--enforce-eager" in command


async def test_demo_that_keeps_serving_compares_first_and_ends_at_once(done, capsys):
    running = asyncio.create_task(demo.compared([b"1", b"2"], keep=True))
    printed = []

    def all_printed():
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    await eventually(lambda: "URL=" in all_printed())
    out = "".join(printed)
    assert "token-identical: yes" in out
    assert re.search(r"^  URL=http://127\.0\.0\.1:18000 MODEL='/cache/a model'$", out, re.MULTILINE)
    assert done == ["plain vLLM answers", "medialane starts", "medialane answers"]
    await iterations(2)  # until the signal is awaited
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(10):
        assert await running == 0
    assert done[3:] == ["medialane stops"]
