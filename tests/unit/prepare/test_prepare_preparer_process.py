import asyncio
import os
import signal
import socket
import subprocess

import pytest

from medialane.prepare.forkserver_process import PreparerLost, PreparerProcess
from medialane.prepare.messages import MAX_FRAME_BYTES, Done, FreeTensors, PreparerReady, encode_frame
from medialane.runtime.stop import PidfdProcess
from medialane.wire import HEADER


@pytest.fixture
def peer():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield mine, theirs


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    with process:
        yield process
        process.kill()


@pytest.fixture
def handle(peer, sleeper):
    def handle(on_exit=lambda: None) -> PreparerProcess:
        return PreparerProcess(1, peer[0], PidfdProcess(sleeper.pid, os.pidfd_open(sleeper.pid)), on_exit)

    return handle


async def test_report_is_read_however_it_is_fragmented(peer, handle):
    preparer = handle()
    reading = asyncio.create_task(preparer.receive())
    for byte in encode_frame(Done(7)):
        peer[1].send(bytes([byte]))
        await asyncio.sleep(0)
    assert await reading == Done(7)
    await preparer.stop(0)


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(MAX_FRAME_BYTES + 1),
        HEADER.pack(3) + b"abc",
        encode_frame(FreeTensors(1)),
        HEADER.pack(100) + b"the end comes too early",
        b"",
    ],
)
async def test_protocol_violation_kills_the_preparer(peer, handle, data):
    preparer = handle()
    peer[1].send(data)
    peer[1].close()
    with pytest.raises(PreparerLost):
        await preparer.receive()
    await preparer.stop(0)


async def test_first_message_must_be_hello(peer, handle):
    preparer = handle()
    peer[1].send(encode_frame(Done(1)) + encode_frame(PreparerReady(1)))
    with pytest.raises(PreparerLost, match="Done"):
        await preparer.wait_ready()
    await preparer.wait_ready()
    await preparer.stop(0)


async def test_request_to_a_closed_channel_kills_the_preparer(peer, handle):
    preparer = handle()
    peer[1].close()
    with pytest.raises(PreparerLost):
        await preparer.send(FreeTensors(1))
    await preparer.stop(0)


async def test_stop_kills_after_the_grace_period_and_confirms_the_exit(handle, sleeper):
    exits = []
    preparer = handle(lambda: exits.append(preparer.gone))
    assert not preparer.gone
    assert await preparer.stop(0.05)
    assert sleeper.wait() == -signal.SIGKILL
    assert exits == [True]
    assert await preparer.stop(0)
