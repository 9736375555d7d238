import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from preparer_pools import children, eventually, make_pool

from medialane.core.errors import StartupFailed
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool
from medialane.prepare.fake import build_processor
from medialane.prepare.forkserver import load_factory
from medialane.prepare.forkserver_process import ForkserverProcess
from medialane.prepare.messages import Forked, encode_control
from medialane.prepare.pidfd_process import PidfdProcess


def test_factory_is_found_by_module_and_function():
    assert load_factory("medialane.prepare.fake:build_processor") is build_processor


@pytest.mark.parametrize(
    "name",
    ["no_such_module:f", "medialane.prepare.fake:no_such_function", "medialane.prepare.fake:PATCH_SIDE", "medialane"],
)
def test_missing_factory_is_rejected_by_name(name):
    with pytest.raises(StartupFailed, match=name):
        load_factory(name)


async def test_pool_with_an_unknown_factory_reports_it(arena):
    config = PrepareConfig(num_preparers=1)
    pool = PreparerPool(config, factory="nowhere:f", factory_config=b"", arena=arena, media=MediaConfig())
    with pytest.raises(StartupFailed, match="nowhere:f"):
        await pool.start()
    assert not children()


async def test_close_during_processor_construction_stops_it(arena):
    pool = make_pool(arena, b'{"warm_s": 30}')
    starting = asyncio.create_task(pool.start())
    await eventually(lambda: bool(children()))
    await pool.close()
    with pytest.raises(StartupFailed, match="closed"):
        await starting
    assert not children()


async def test_cancelled_start_leaves_no_process(arena):
    pool = make_pool(arena, b'{"warm_s": 30}')
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await pool.start()
    assert not children()


@pytest.fixture
def sleepers():
    """Two processes: a fork server that does nothing, and what it is said to have forked."""
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(argv) as forkserver, subprocess.Popen(argv) as forked:
        yield forkserver, forked
        forkserver.kill()
        forked.kill()


@pytest.mark.parametrize("is_spare", [False, True])
@pytest.mark.parametrize("is_forked_first", [False, True])
async def test_process_whose_fork_was_cancelled_is_killed(sleepers, is_spare, is_forked_first):
    owner, forked = sleepers
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setblocking(False)
    server = ForkserverProcess(PidfdProcess(owner.pid, os.pidfd_open(owner.pid)), mine, "0" * 32)
    forking = asyncio.create_task(server.fork_spare() if is_spare else server.fork(lambda: None))
    await asyncio.sleep(0)
    report = encode_control(Forked(0 if is_spare else 1, forked.pid))
    if is_forked_first:
        socket.send_fds(theirs, [report], [os.pidfd_open(forked.pid)])
        server.poll()  # the task is resumed only after it was cancelled
    forking.cancel()
    await asyncio.wait([forking])
    assert forking.cancelled()
    if not is_forked_first:
        socket.send_fds(theirs, [report], [os.pidfd_open(forked.pid)])
        server.poll()
    assert await asyncio.to_thread(forked.wait, 5) == -signal.SIGKILL
    theirs.close()
    await server.close(grace_s=0)
