"""Every test of this package runs on asyncio's loop and on uvloop; servers and clients that a test makes are closed."""

import asyncio

import msgspec
import pytest
import trustme
import uvloop
from rpc_raw_gateway import RawGateway

from certificates import tls_settings
from medialane.gateway.workers import RpcClient
from medialane.testing.fake_worker import FakeHandler
from medialane.wire import Hello, RpcConfig, Welcome
from medialane.worker import RpcServer


def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Net:
    """Servers and clients at one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.config = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)
        self._open: list[RpcServer | RpcClient] = []

    @property
    def path(self) -> str:
        return self.address.removeprefix("unix:")

    async def serve(self, handler: FakeHandler, config: RpcConfig | None = None) -> RpcServer:
        server = RpcServer(handler, config or self.config)
        self._open.append(server)
        self.address = await server.serve(self.address)
        return server

    async def connect(self, config: RpcConfig | None = None, **hello: object) -> RpcClient:
        client = await RpcClient.connect(
            self.address, Hello(**{"gateway_id": "gateway", **hello}), config or self.config
        )
        self._open.append(client)
        return client

    async def close(self) -> None:
        for one in reversed(self._open):
            await one.close()


@pytest.fixture
async def net(tmp_path):
    net = Net(f"unix:{tmp_path}/w.sock")
    yield net
    await net.close()


@pytest.fixture
async def tcp_net():
    net = Net("tcp://127.0.0.1:0")
    yield net
    await net.close()


@pytest.fixture(params=["unix", "tls"])
async def unix_or_tls_net(request, tmp_path):
    net = Net(f"unix:{tmp_path}/w.sock" if request.param == "unix" else "tcp://127.0.0.1:0")
    if request.param == "tls":
        files = tls_settings(tmp_path, trustme.CA())
        net.config = msgspec.structs.replace(net.config, shared_secret="a secret of the tests", **files)
    yield net
    await net.close()


@pytest.fixture
async def raw(net):
    opened = []

    async def connect(*, hello: bool = True) -> RawGateway:
        gateway = await RawGateway.connect(net.path)
        opened.append(gateway)
        if hello:
            gateway.send(Hello(gateway_id=f"raw-{len(opened)}"))
            await gateway.next(Welcome)
        return gateway

    yield connect
    for gateway in opened:
        await gateway.close()
