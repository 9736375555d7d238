"""One connection over a socket pair, with the test at the far end."""

import asyncio
import socket
import time

import pytest

from medialane.types.errors import ProtocolViolation, WorkerLost
from medialane.wire import Abort, Connection, FrameReader, Ping, RpcConfig, decode_to_worker
from waiting import DEADLINE_S, eventually, iterations


class Recorder:
    """A peer that records what it receives."""

    def __init__(self):
        self.frames, self.errors, self.num_beats = [], [], 0

    def opened(self, connection):
        self.connection = connection

    def received(self, frame):
        if bytes(frame) == b"bad":
            raise ProtocolViolation("bad")
        self.frames.append(bytes(frame))

    def beat(self):
        self.num_beats += 1

    def lost(self, error):
        self.errors.append(error)


class End:
    def __init__(self, connection, peer, far):
        self.connection, self.peer, self.far = connection, peer, far

    async def read_messages(self, number):
        frames, found = FrameReader(1 << 20), []
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < number:
                frames.receive(await asyncio.get_running_loop().sock_recv(self.far, 65536))
                while (frame := frames.next_frame()) is not None:
                    found.append(decode_to_worker(frame))
        return found

    async def send_raw(self, data):
        await asyncio.get_running_loop().sock_sendall(self.far, data)


@pytest.fixture
async def connect():
    ends = []

    async def make(config=None, *, max_frame_bytes=1000):
        near, far = socket.socketpair()
        far.setblocking(False)
        peer = Recorder()
        connection = Connection(peer, config or RpcConfig(), max_frame_bytes=max_frame_bytes)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=near)
        ends.append(End(connection, peer, far))
        return ends[-1]

    yield make
    for end in ends:
        end.connection.end(WorkerLost("the test is over"))
        await end.connection.closed.wait()
        end.far.close()


async def test_messages_arrive_in_order(connect):
    end = await connect()
    messages = [Abort(f"r{i}") for i in range(100)]
    for message in messages:
        end.connection.send(message)
    assert await end.read_messages(100) == messages


async def test_messages_of_one_loop_iteration_are_one_write():
    connection, transport = Connection(Recorder(), RpcConfig(), max_frame_bytes=1000), Written()
    connection.connection_made(transport)
    for i in range(100):
        connection.send(Ping(i))
    await iterations(3)
    (written,) = transport.writes
    frames = FrameReader(1 << 20)
    frames.receive(written)
    assert [decode_to_worker(frames.next_frame()) for _ in range(100)] == [Ping(i) for i in range(100)]


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, data):
        self.writes.append(bytes(data))

    def get_write_buffer_size(self):
        return 0


async def test_violation_closes_the_connection_after_earlier_frames(connect):
    end = await connect()
    await end.send_raw(b"\0\0\0\4fine" + b"\0\0\0\3bad" + b"\0\0\0\5never")
    await end.connection.closed.wait()
    assert end.peer.frames == [b"fine"]
    assert [type(error) for error in end.peer.errors] == [ProtocolViolation]


async def test_large_frames_are_accepted_after_the_handshake(connect):
    end = await connect(RpcConfig(max_frame_bytes=10_000), max_frame_bytes=10)
    end.connection.accept_large_frames()
    await end.send_raw((9000).to_bytes(4, "big") + bytes(9000))
    await eventually(lambda: end.peer.frames == [bytes(9000)])


async def test_paused_connection_resumes_when_the_peer_reads(connect):
    end = await connect()
    while not end.connection.paused:
        end.connection.send(Abort("x" * 300_000))
    waiting = asyncio.create_task(end.connection.writable())
    await iterations(3)
    assert not waiting.done()
    async with asyncio.timeout(DEADLINE_S):
        while not waiting.done():
            await asyncio.get_running_loop().sock_recv(end.far, 1 << 20)
    assert not end.connection.paused


async def test_lost_connection_wakes_pending_writers(connect):
    end = await connect()
    while not end.connection.paused:
        end.connection.send(Abort("x" * 300_000))
    waiting = asyncio.create_task(end.connection.writable())
    await asyncio.sleep(0)
    end.connection.end(WorkerLost("enough"))
    async with asyncio.timeout(DEADLINE_S):
        await waiting


async def test_send_buffer_is_bounded(connect):
    end = await connect(RpcConfig(max_write_buffer_bytes=1_000_000, max_frame_bytes=400_000))
    for _ in range(100):
        end.connection.send(Abort("x" * 300_000))
    assert end.connection.num_buffered_bytes < 2_500_000
    await end.connection.closed.wait()
    assert [error.message for error in end.peer.errors] == ["the peer does not read"]


async def test_close_delivers_pending_messages(connect):
    end = await connect()
    end.connection.send(Abort("last words"))
    end.connection.close()
    assert await end.read_messages(1) == [Abort("last words")]
    await end.connection.closed.wait()


async def test_sending_on_a_lost_connection_is_a_no_op(connect):
    end = await connect()
    end.far.close()
    await end.connection.closed.wait()
    end.connection.send(Abort("r"))
    assert end.connection.num_buffered_bytes == 0
    assert len(end.peer.errors) == 1


async def test_heartbeats_are_sent_until_the_connection_is_lost(connect):
    end = await connect(RpcConfig(heartbeat_interval_s=0.02, heartbeat_timeout_s=60.0))
    end.connection.start_heartbeat()
    await eventually(lambda: end.peer.num_beats >= 3)
    end.connection.end(WorkerLost("enough"))
    await end.connection.closed.wait()
    beats = end.peer.num_beats
    await asyncio.sleep(0.08)  # time: four intervals without a heartbeat
    assert end.peer.num_beats == beats


async def test_silent_peer_is_lost(connect):
    end = await connect(RpcConfig(heartbeat_interval_s=0.02, heartbeat_timeout_s=0.1))
    end.connection.start_heartbeat()
    async with asyncio.timeout(DEADLINE_S):
        await end.connection.closed.wait()
    assert [error.message for error in end.peer.errors] == ["missed heartbeats of the peer"]


async def test_local_stall_is_not_mistaken_for_a_silent_peer(connect):
    end = await connect(RpcConfig(heartbeat_interval_s=0.2, heartbeat_timeout_s=0.4))
    end.connection.start_heartbeat()
    await asyncio.sleep(0.1)  # time: less than an interval
    await end.send_raw(b"\0\0\0\4fine")
    time.sleep(0.7)  # noqa: ASYNC251 - time: the stall, longer than the timeout
    await eventually(lambda: end.peer.frames == [b"fine"])
    assert not end.connection.closed.is_set()
