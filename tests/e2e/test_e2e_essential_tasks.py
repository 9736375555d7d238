"""A gateway exits, for its service manager to restart it, when something ends that must not."""

import json
import os
import signal

import pytest
from gateway_variants import ENDINGS, GATEWAYS
from medialane_process import STOP_S
from openai_http import chat, picture, text

from waiting import eventually

pytestmark = pytest.mark.vllm

#: What the log calls them.
NAMES = {"links": "connecting to workers", "server": "the HTTP server"}


async def test_gateway_exits_when_an_essential_task_ends(serve, ours, gateways, starting_gateways):
    """Runs after all other tests of these gateways: when two of them have failed, their program stops the others."""
    body = chat(picture(89), text("Describe the picture."))
    right, store, arenas = await ours.succeed(body), serve.store_pid(), serve.arenas()
    program = starting_gateways["url"].process
    os.kill(program.pid, signal.SIGUSR1)
    await eventually(lambda: program.poll() is not None, "all have exited", STOP_S)
    printed = (starting_gateways["url"].log.parent / "program.log").read_text().splitlines()[-1]
    assert dict(zip(GATEWAYS, json.loads(printed), strict=True)) == {name: 70 * (name in ENDINGS) for name in GATEWAYS}
    for name, ending in ENDINGS.items():
        log = starting_gateways[name].log.read_text()
        assert f"{NAMES[ending]} exited unexpectedly: this process stops" in log
        assert ("an injected error" in log) == (ending == "links")
    assert (serve.store_pid(), serve.arenas()) == (store, arenas), "the store goes on without them"
    again = await ours.succeed(body)
    assert (again.cache, again.copied_bytes, again.ids) == ("hit", 0, right.ids)
