"""The membership of a gateway without the rest of it: what workers join."""

from prometheus_client import CollectorRegistry

from medialane.gateway import GatewayConfig, WorkerLink, WorkerPool, health_of
from medialane.gateway.workers import JoinServer
from medialane.observability import Metrics
from medialane.wire import Hello, RpcConfig, parse_address

RPC = RpcConfig(release_timeout_s=1.0, connect_timeout_s=3.0)
PROCESSOR = {"model": "files 1", "dtype": "bfloat16", "vllm": "0.32.0", "processor": "QwenProcessor"}


class Gateway:
    """The membership of one gateway process, which can be killed and started again with the same ports."""

    def __init__(self, config=None, rpc=RPC):
        self._rpc = rpc
        self.address = "tcp://127.0.0.1:0"
        self.config = config or GatewayConfig(forget_worker_s=0.3)
        self.ports = []

    async def start(self):
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.hello = Hello(gateway_id=f"gateway-{id(self.registry)}", processor=PROCESSOR, join_ports=self.ports)
        self.pool = WorkerPool([], new_link=self.new_link, processor=PROCESSOR, config=self.config)
        self.metrics.watch_workers(self.pool.endpoints)
        self.server = JoinServer(self._rpc, self.pool.serve_joined)
        self.address = await self.server.serve(self.address)
        return self

    def new_link(self, name, _address=""):
        return WorkerLink(name, self.hello, rpc=self._rpc, config=self.config, metrics=self.metrics)

    @property
    def port(self):
        return parse_address(self.address).port

    @property
    def ready(self):
        return {name for name, link in self.pool.links.items() if link.client is not None}

    def problems(self):
        return health_of(self.pool).problems

    async def close(self):
        await self.server.close()
