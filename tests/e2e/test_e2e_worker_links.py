"""A gateway whose worker links fail: what it answers meanwhile, and how it ends when it cannot go on."""

import subprocess
import sys

import aiohttp
import pytest
from medialane_process import MedialaneProcess, _die_with_parent, _free_port, until

from medialane.rpc import FakeHandler, RpcConfig, RpcServer

pytestmark = pytest.mark.vllm

#: The gateway's own command, in which the task that connects to workers ends by itself once a file is there.
GATEWAY = """
import asyncio, pathlib, sys
from medialane.gateway import WorkerPool
file, connect = pathlib.Path(sys.argv.pop(1)), WorkerPool.run

async def run(pool):
    connecting = asyncio.create_task(connect(pool))
    while not file.exists():
        await asyncio.sleep(0.05)
    connecting.cancel()
    raise RuntimeError("a bug in the links")

WorkerPool.run = run
from medialane.cli.main import main
sys.exit(main())
"""


def spawn(words, port, model, environ, log):
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", GATEWAY, *words],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
    return MedialaneProcess(process, port, model, log)


async def health(gateway):
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.base_url}/health") as response:
        return response.status, await response.text()


async def test_health_tells_of_a_missing_worker_and_the_gateway_ends_when_nothing_connects_it(
    tiny_model, vllm_environ, tmp_path
):
    present, ended, port = f"unix:{tmp_path}/w.sock", tmp_path / "ended", _free_port()
    server = RpcServer(FakeHandler(), RpcConfig())
    await server.serve(present)
    words = ["gateway", str(tiny_model), "--port", str(port), "--stage", "url", "--arena-size", "64MiB"]
    words += ["--worker", present, "--worker", f"unix:{tmp_path}/nobody.sock"]
    gateway = spawn([str(ended), *words], port, str(tiny_model), vllm_environ, tmp_path / "gateway.log")
    try:
        await gateway.answers(120)
        assert await health(gateway) == (200, '{"status":"degraded","problems":["1 of 2 workers are ready"]}')
        await server.close()

        async def is_unavailable():
            return (await health(gateway))[0] == 503

        await until(is_unavailable, "the last worker's loss is told")
        ended.touch()
        await until(lambda: gateway.process.poll() is not None, "the gateway has ended", more=gateway.tail)
        assert gateway.process.returncode == 70
        assert "connecting to workers ended unexpectedly: this process stops" in gateway.log.read_text()
        assert "a bug in the links" in gateway.log.read_text()
    finally:
        gateway.stop()
        await server.close()
