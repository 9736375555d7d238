"""Where a worker listens."""

import asyncio
import os
import socket
import stat

import pytest
from rpc_requests import engine_request, tokens_of

from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import StartupFailed
from medialane.wire import Listener, RpcConfig
from medialane.worker import RpcServer


async def test_close_is_idempotent_and_removes_the_socket(net):
    server = await net.serve(FakeHandler())
    assert stat.S_IMODE(os.stat(net.path).st_mode) == 0o600
    await server.close()
    await server.close()
    with pytest.raises(FileNotFoundError):
        os.stat(net.path)


async def test_address_in_use_is_rejected_without_affecting_its_owner(net, tcp_net):
    for one in (net, tcp_net):
        await one.serve(FakeHandler([1]))
        with pytest.raises(StartupFailed, match="in use"):
            await RpcServer(FakeHandler(), RpcConfig()).serve(one.address)
        assert await tokens_of((await one.connect()).requests.submit(engine_request("r"))) == [1]


async def test_socket_of_a_dead_worker_is_replaced(net):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(net.path)
    await net.serve(FakeHandler([1]))
    assert await tokens_of((await net.connect()).requests.submit(engine_request("r"))) == [1]


async def test_non_socket_file_is_left_alone(net):
    os.mknod(net.path)
    with pytest.raises(StartupFailed, match="in use"):
        await RpcServer(FakeHandler(), RpcConfig()).serve(net.address)
    assert stat.S_ISREG(os.stat(net.path).st_mode)


@pytest.mark.parametrize("iterations", range(4))
async def test_no_connection_outlives_close_however_far_it_was(net, iterations):
    """A server of asyncio may make one after it was closed, which nothing ends."""
    made = []

    class Counted(asyncio.Protocol):
        def connection_made(self, transport):
            made.append(transport)

    listener = await Listener.listen(net.address, Counted)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)
        peer.connect(net.path)
        for _ in range(iterations):
            await asyncio.sleep(0)
        await listener.close()
        known = list(made)
        await asyncio.sleep(0.05)  # time: in which one would be made
        assert made == known
        for transport in made:
            transport.abort()
