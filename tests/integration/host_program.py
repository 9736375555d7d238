"""A host without vLLM whose parts are processes, supervised as by `serve`: `python host_program.py host FOLDER`.

The store is the real one with real preparers, a fake processor, and poisoned ranges (tests/poison.py). Workers have the
fake engine, whose tokens depend on the bytes of the media; gateways answer on unix sockets. All of them stop at gates.

A host alone has everything. One of several hosts has a `Place`, in its folder: the stores copy from each other.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
from gates import PULL, Gates

from medialane.cluster import ProcessSpec, SocketExists, Supervisor
from medialane.config import ClusterConfig, load_config
from medialane.runtime.phase import watched
from medialane.runtime.stop import stopped_by_signals
from medialane.types.errors import MedialaneError
from medialane.types.feature import EmbeddingUse, MediaPrompt, StagedItem
from medialane.types.media import MediaRef
from medialane.types.request import EngineRequest, OutputDelta
from medialane.wire import RpcConfig
from medialane.worker import serve_worker
from supervised import running

GATEWAYS = ("gateway-0", "gateway-1")
WORKERS = ("worker-0", "worker-1")
NAMES = ("store", *WORKERS, *GATEWAYS)
SETTINGS = {"arena-size": "16MiB", "preparers": "2", "allow-media-network": "127.0.0.0/8"}
#: Tokens of an answer; the gate "mid-stream" is after the second.
NUM_TOKENS = 6
MAX_LINE_BYTES = 1 << 20
#: A worker waits a second for another one that encodes the same image: until the store knows that it has been killed.
ENCODER_MS_PER_TOKEN = 12.0
#: Larger than the messages of stores.
PAYLOAD_BYTES = 20_000
FIRST_PORT = 7000
SECRET = "a secret of the tests of several hosts"


class Place(msgspec.Struct, frozen=True):
    """One of several hosts: its `address` for the others, its processes, the workers of its gateways, and the settings
    of TLS."""

    address: str = ""
    names: tuple[str, ...] = NAMES
    workers: tuple[str, ...] = ()
    tls: dict[str, str] = {}

    def rpc(self) -> RpcConfig:
        return RpcConfig(shared_secret=SECRET, **self.tls) if self.address else RpcConfig()

    def worker_address(self, folder: Path, name: str) -> str:
        """Where a worker of this host listens."""
        if not self.address:
            return address(folder, name)
        return f"tcp://{self.address}:{FIRST_PORT + WORKERS.index(name)}"


def place_of(folder: Path) -> Place:
    path = folder / "place.json"
    return msgspec.json.decode(path.read_bytes(), type=Place) if path.exists() else Place()


class Question(msgspec.Struct, frozen=True):
    """What a gateway is asked, as one line of JSON: about an image of `url` or `data`; about itself without one."""

    url: str | None = None
    data: bytes | None = None


class Line(msgspec.Struct, frozen=True):
    """Its answer: a line for each token, then one with the code of the error, if any. About itself: whether it has
    `num_mapped` workers that map the arena of its store, or whose store may copy from it."""

    tokens: list[int] = []
    ended: bool = False
    error: str | None = None
    num_mapped: int = 0


def address(folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}.sock"


class Quiet:
    """Observes nothing: the logs of the processes are in the folder."""

    def __getattr__(self, name):
        return lambda *_: None


async def host(folder: Path) -> int:
    specs = [
        ProcessSpec(
            name,
            (sys.executable, __file__, name, str(folder)),
            dict(os.environ),
            SocketExists(folder / f"{name}.sock"),
            layer=int(name in GATEWAYS),
        )
        for name in place_of(folder).names
    ]
    config = ClusterConfig(restart_initial_s=0.05, restart_reset_s=0.01)
    with stopped_by_signals() as stop:
        async with running(Supervisor(specs, config=config, logs=folder, observer=Quiet())):
            (folder / "ready").touch()
            await stop.asked.wait()
    return 0


def store(folder: Path) -> int:
    import poison
    from medialane.cli import store as command
    from medialane.cli.settings import Reloading

    poison.install()
    command.PROCESSOR_FACTORY = "gates:build_processor"
    place, settings, environ = place_of(folder), {**SETTINGS, "arena-directory": str(folder)}, {}
    if place.address:
        stop_pulls_at_the_gate(Gates(folder))
        settings["peer-listen"] = f"tcp://{place.address}:0"
        settings |= {f"rpc-{name.replace('_', '-')}": path for name, path in place.tls.items()}
        environ["MEDIALANE_RPC_SECRET"] = SECRET
    if not set(GATEWAYS) & set(place.names):
        settings |= {"stage": "url", "preparers": "1"}  # as `medialane worker --start-store`
    config = load_config(settings, environ=environ)
    return command.run_store(Reloading(config), str(folder), [], address(folder, "store"))


def stop_pulls_at_the_gate(gates: Gates) -> None:
    from medialane.transfer.peer_connection import PeerConnection

    receive = PeerConnection.receive_into

    async def receive_into(self: PeerConnection, payload: memoryview) -> None:
        if len(payload) > PAYLOAD_BYTES:
            await gates.passed(PULL)
        await receive(self, payload)

    PeerConnection.receive_into = receive_into


async def worker(folder: Path, name: str) -> int:
    from host_store import StoreClientTask

    from embedding_memory import ENCODER_CARD, ArenaEmbeddings
    from fake_engine import FakeEngine
    from medialane.store import StoreEntries
    from medialane.worker import WorkerConfig

    gates = Gates(folder)
    memory = ArenaEmbeddings(str(folder), partial(gates.passed, "write embedding"))

    class GatedEngine(FakeEngine):
        async def generate(
            self,
            request: EngineRequest,
            tensors: Sequence[Sequence[memoryview]],
            embeddings: Sequence[EmbeddingUse | None] = (),
        ) -> AsyncGenerator[OutputDelta, None]:
            await gates.passed("before first token")
            num_sent = 0
            async with aclosing(super().generate(request, tensors, embeddings)) as deltas:
                async for delta in deltas:
                    yield delta
                    num_sent += 1
                    if num_sent == 2:
                        await gates.passed("mid-stream")

    client, place = StoreClientTask(address(folder, "store"), str(folder), rpc=RpcConfig()), place_of(folder)
    if place.address:  # it listens at another one: this only shows that it is ready
        socket.socket(socket.AF_UNIX).bind(address(folder, name).removeprefix("unix:"))
    try:
        return await serve_worker(
            WorkerConfig(),
            place.rpc(),
            GatedEngine(card=ENCODER_CARD, memory=memory),
            place.worker_address(folder, name),
            arena_directory=str(folder),
            host_arena=StoreEntries(client.link),
        )
    finally:
        await client.close()


async def gateway(folder: Path, name: str) -> int:
    from gateway_parts import MEDIA, Parts
    from host_store import StoreClientTask

    from medialane.gateway import GatewayConfig, StoreItems
    from medialane.routing import RoutingConfig
    from medialane.runtime.tasks import LoopFairness
    from medialane.store import SendData, StoreLink
    from medialane.testing.fake_processor import FakeProcessor
    from medialane.types.hashing import digest

    gates = Gates(folder)

    class GatedItems(StoreItems):
        async def processed(self, ref: MediaRef, *arguments, **options) -> StagedItem:
            await gates.passed("before find")
            return await super().processed(ref, *arguments, **options)

    class GatedLink(StoreLink):
        async def call(self, make, answer=None, **options):
            async def gated(question):
                if isinstance(question, SendData):
                    await gates.passed("upload")
                return await answer(question)

            return await super().call(make, answer and gated, **options)

    settings = dict(FakeProcessor.settings)
    client = StoreClientTask(
        address(folder, "store"),
        str(folder),
        link=GatedLink,
        rpc=RpcConfig(),
        wait_timeout_s=60.0,
        writable=True,
        processor=settings,
    )
    fairness = LoopFairness()
    store_items = GatedItems(client.link, processor_digest=digest(settings), fairness=fairness, media=MEDIA)
    place = place_of(folder)
    addresses = place.workers or [address(folder, found) for found in WORKERS]
    workers = [SimpleNamespace(address=found, attaches=True) for found in addresses]
    config = GatewayConfig(stage="features", reconnect_initial_s=0.01, reconnect_max_s=0.05)
    beside = SimpleNamespace(store=SimpleNamespace(link=client.link, store_items=store_items))
    with stopped_by_signals() as stop:
        routing = RoutingConfig(encoder_ms_per_token=ENCODER_MS_PER_TOKEN)
        async with Parts(None, None, workers, rpc=place.rpc(), config=config, beside=beside, routing=routing) as parts:
            path = address(folder, name).removeprefix("unix:")
            server = await asyncio.start_unix_server(
                lambda *streams: serve(parts, *streams), path, limit=MAX_LINE_BYTES
            )
            async with watched():
                await stop.asked.wait()
            server.close()
        await client.close()
    fairness.close()
    return 0


async def serve(parts, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one question."""
    question = msgspec.json.decode(await reader.readline(), type=Question)
    if question.url is None and question.data is None:
        _send(
            writer,
            Line(ended=True, num_mapped=sum(link.same_host or link.can_pull for link in parts.links.links.values())),
        )
    else:
        try:
            async with aclosing(answer(parts, question)) as deltas:
                async for delta in deltas:
                    _send(writer, Line(delta.completions[0].token_ids))
            _send(writer, Line(ended=True))
        except MedialaneError as error:
            _send(writer, Line(ended=True, error=error.code))
    await writer.drain()
    writer.close()


async def answer(parts, question: Question) -> AsyncGenerator[OutputDelta, None]:
    from gateway_parts import PLACEHOLDER_TOKEN, request

    from medialane.gateway import open_scope

    image = MediaRef("image", "image", url=question.url, data=question.data)
    with open_scope():
        prepared = await parts.gateway.prepare(MediaPrompt([1, 2, PLACEHOLDER_TOKEN], (image,), b"{}"))
        wanted = request("r", prepared.token_ids, max_tokens=NUM_TOKENS)
        async with aclosing(parts.gateway.generate(wanted, prepared)) as deltas:
            async for delta in deltas:
                yield delta


def _send(writer: asyncio.StreamWriter, line: Line) -> None:
    writer.write(msgspec.json.encode(line) + b"\n")


def main(name: str, folder: Path) -> int:
    signal.signal(signal.SIGRTMIN, lambda *_: time.sleep(3600))  # time: the loop of this process is blocked
    if name == "store":
        return store(folder)
    run = host(folder) if name == "host" else worker(folder, name) if name in WORKERS else gateway(folder, name)
    return asyncio.run(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
