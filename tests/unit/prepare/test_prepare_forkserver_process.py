import asyncio
import os
import signal
import subprocess
import sys

import pytest

from medialane.prepare.forkserver_process import ForkserverProcess
from medialane.prepare.messages import MAX_CONTROL_BYTES, Forked
from medialane.runtime.stop import PidfdProcess
from medialane.wire.child_channel import child_channel, send


@pytest.fixture
def sleepers():
    """Two processes: a fork server that does nothing, and what it is said to have forked."""
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]  # time: runs until it is killed
    with subprocess.Popen(argv) as forkserver, subprocess.Popen(argv) as forked:
        yield forkserver, forked
        forkserver.kill()
        forked.kill()


@pytest.mark.parametrize("is_spare", [False, True])
@pytest.mark.parametrize("is_forked_first", [False, True])
async def test_process_whose_fork_was_cancelled_is_killed(sleepers, is_spare, is_forked_first):
    owner, forked = sleepers
    mine, theirs = child_channel()
    server = ForkserverProcess(PidfdProcess(owner.pid, os.pidfd_open(owner.pid)), mine, "0" * 32)
    forking = asyncio.create_task(server.fork_spare() if is_spare else server.fork(lambda: None))
    await asyncio.sleep(0)
    report = Forked(0 if is_spare else 1, forked.pid)
    if is_forked_first:
        send(theirs, report, [os.pidfd_open(forked.pid)], max_bytes=MAX_CONTROL_BYTES)
        server.has_ended()  # the task is resumed only after it was cancelled
    forking.cancel()
    await asyncio.wait([forking])
    assert forking.cancelled()
    if not is_forked_first:
        send(theirs, report, [os.pidfd_open(forked.pid)], max_bytes=MAX_CONTROL_BYTES)
        server.has_ended()
    assert await asyncio.to_thread(forked.wait, 5) == -signal.SIGKILL
    theirs.close()
    await server.close(grace_s=0)
