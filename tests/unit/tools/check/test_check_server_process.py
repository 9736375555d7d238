"""Lifetime of the subprocess, with small Python servers replacing vLLM."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from medialane.tools.check import free_port, plain_vllm
from medialane.types.errors import StartupFailed
from waiting import comes_true, eventually

#: Answers /health and starts a child that ignores SIGTERM, as a stuck engine would.
SERVER = """
import http.server, subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"  # time: then it ends by itself
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

#: Starts that server and waits.
OWNER = """
import asyncio, os, pathlib, sys
from medialane.tools.check import plain_vllm
async def use():
    async with plain_vllm("model", environ=os.environ, log=pathlib.Path(sys.argv[1])) as server:
        print(server.process_id, flush=True)
        await asyncio.Event().wait()
asyncio.run(use())
"""


@pytest.fixture
def serve(tmp_path):
    """Start `source` as if it were vLLM's server."""

    def serve(source: str, **options):
        package = tmp_path / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").touch()
        (package / "api_server.py").write_text(source)
        environ = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
        return plain_vllm("model", environ=environ, log=tmp_path / "log", **options)

    return serve


def child_of(log: Path) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def log_of(folder: Path) -> str:
    with suppress(FileNotFoundError):
        return (folder / "log").read_text()
    return ""


def is_alive(process_id: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


async def gone(process_id: int) -> bool:
    return await comes_true(lambda: not is_alive(process_id))


async def test_ready_server_is_yielded_and_leaves_no_process(serve):
    async with serve(SERVER, flags=["--enforce-eager"]) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert "'--model', 'model'" in server.log.read_text()
        assert "'--enforce-eager']" in server.log.read_text()
        assert is_alive(server.process_id)
        child = child_of(server.log)
        assert is_alive(child)
    assert await gone(server.process_id)
    assert await gone(child)


async def test_cancellation_leaves_no_process(serve, tmp_path):
    async def use() -> None:
        async with serve(SERVER):
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await eventually(lambda: "child" in log_of(tmp_path))
    child = child_of(tmp_path / "log")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(child)


async def test_killed_owner_leaves_no_process(serve, tmp_path):
    """Not even one that ignores SIGTERM, which the kernel sends to the server alone."""
    serve(SERVER)  # writes the server's source
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    argv = (sys.executable, script, tmp_path / "log")
    owner = await asyncio.create_subprocess_exec(*argv, env=environ, stdout=asyncio.subprocess.PIPE)
    try:
        server = int(await owner.stdout.readline())
        child = child_of(tmp_path / "log")
        assert is_alive(child)
    finally:
        owner.kill()
        await owner.wait()
    assert await gone(server)
    assert await gone(child)


async def test_early_exit_reports_its_reason(serve):
    with pytest.raises(StartupFailed, match="no such model"):
        async with serve("raise SystemExit('no such model')"):
            pass


async def test_server_that_never_becomes_ready_times_out_and_is_killed(serve, tmp_path):
    source = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN)\n"
        "print('child', os.getpid(), flush=True); time.sleep(60)"  # time: a leftover of a failed test ends by itself
    )
    with pytest.raises(StartupFailed, match=r"not ready after 1\.5 s"):
        async with serve(source, start_s=1.5, stop_s=0.2):
            pass
    assert await gone(child_of(tmp_path / "log"))


@pytest.mark.timeout(60)  # a process that imports the whole room, on a busy machine
async def test_port_is_given_out_once_on_this_host():
    """Also by other processes, before a server listens."""
    first = free_port(3)
    source = f"""
from medialane.tools.check import free_port
print(free_port(ports=range({first}, {first + 4})))
input()
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", source, env=environ, stdin=pipe, stdout=pipe)
    try:
        assert int(await other.stdout.readline()) == first + 3
        with pytest.raises(OSError, match="no port"):
            free_port(ports=range(first, first + 4))
    finally:
        await other.communicate(b"\n")
    assert free_port(ports=range(first, first + 4)) == first + 3  # its process has ended
