"""A gateway exits, for its service manager to restart it, when something ends that must not."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from medialane_process import STOP_S, free_port, launch
from process_tree import arenas_of, descendants

from medialane.vllm_bridge.tiny_model import TINY_MODEL_FLAGS
from waiting import eventually

pytestmark = pytest.mark.vllm

#: What ends, and what the log calls it.
ENDINGS = {"links": "connecting to workers", "server": "the HTTP server"}


async def is_ready(port):
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_gateway_exits_when_an_essential_task_ends(tiny_model, vllm_environ, tmp_path):
    """The worker is simulated, and stage `url` needs no processor: vLLM is imported once, for both gateways."""
    logs = {ending: tmp_path / f"{ending}.log" for ending in ENDINGS}
    ports = {ending: free_port() for ending in ENDINGS}
    worker = f"unix:{tmp_path}/w-{{}}.sock"
    store = f"unix:{tmp_path}/store.sock"
    own = ["--worker", worker.format(0), "--store", store, "--stage", "url"]
    commands = [
        (ending, str(logs[ending]), [str(tiny_model), "--port", str(ports[ending]), *own, "--", *TINY_MODEL_FLAGS])
        for ending in ENDINGS
    ]
    program = Path(__file__).with_name("ending_gateways_program.py")
    medialane = [sys.executable, "-m", "medialane"]
    store_flags = ["--listen", store, "--stage", "url", "--preparers", "1", "--arena-size", "64MiB"]
    worker_flags = ["--engine", "simulated", "--simulated-workers", "1", "--listen", worker]
    with ExitStack() as stack:

        def start(argv, log):
            process = launch(argv, environ=vllm_environ, log=log)
            stack.callback(process.wait, STOP_S)
            stack.callback(process.terminate)
            return process

        owner = start([*medialane, "store", str(tiny_model), *store_flags], tmp_path / "store.log")
        start([*medialane, "worker", str(tiny_model), *worker_flags], tmp_path / "worker.log")
        gateways = start([sys.executable, str(program), json.dumps(commands)], tmp_path / "statuses")
        for ending, port in ports.items():
            await eventually(lambda port=port: is_ready(port), f"{ending} is ready", 300, more=logs[ending].read_text)
        arenas = {path for pid in descendants(gateways.pid) for path in arenas_of(pid)}
        os.kill(gateways.pid, signal.SIGUSR1)
        await eventually(lambda: gateways.poll() is not None, "both have exited", STOP_S)
        assert len(arenas) == 1
        assert arenas == arenas_of(owner.pid), "the store goes on without them"
    assert json.loads((tmp_path / "statuses").read_text().splitlines()[-1]) == [70, 70]
    assert owner.returncode == 0
    assert not [path for path in arenas if path.exists()]
    for ending, name in ENDINGS.items():
        log = logs[ending].read_text()
        assert f"{name} exited unexpectedly: this process stops" in log
        assert ("an injected error" in log) == (ending == "links")
