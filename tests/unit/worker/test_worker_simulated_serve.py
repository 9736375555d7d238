import asyncio
import os
import signal

import msgspec
import pytest

from medialane.gateway.workers import RpcClient
from medialane.testing.simulated import SimulatedConfig, serve_simulated
from medialane.testing.simulated.engine import addresses_of
from medialane.types.errors import NoWorkerReady, StartupFailed
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.wire import Hello, RpcConfig
from medialane.worker import WorkerConfig
from waiting import retried

RPC = RpcConfig(release_timeout_s=2.0)


async def connect(address, processor):
    hello = Hello(gateway_id="g", processor=processor)
    return await retried(lambda: RpcClient.connect(address, hello, RPC), NoWorkerReady)


async def test_workers_of_one_process_serve_every_gateway(tmp_path):
    config = SimulatedConfig(num_workers=3, speedup=100.0, block_size=32)
    listen = f"unix:{tmp_path}/w-{{}}"
    serving = asyncio.create_task(
        serve_simulated(config, WorkerConfig(), RPC, model="m", listen=listen, arena_directory="/dev/shm")
    )
    clients = [await connect(f"unix:{tmp_path}/w-{number}", {"dtype": str(number)}) for number in range(3)]
    assert len({client.welcome.worker_id for client in clients}) == 3
    for number, client in enumerate(clients):
        card = client.welcome.card
        assert (card.model, card.block_size, card.processor) == ("m", 32, {"dtype": str(number)})
        asked = EngineRequest(
            "r", ExpandedPrompt([1, 2, 3]), msgspec.msgpack.encode({"max_tokens": 2, "output_kind": 1})
        )
        assert sum([len(delta.completions[0].token_ids) async for delta in client.requests.submit(asked)]) == 2
        await client.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0


async def test_unusable_address_stops_all_workers(tmp_path):
    (tmp_path / "w-1").mkdir()
    serving = serve_simulated(
        SimulatedConfig(num_workers=2),
        WorkerConfig(),
        RPC,
        model="m",
        listen=f"unix:{tmp_path}/w-{{}}",
        arena_directory="/dev/shm",
    )
    with pytest.raises(StartupFailed):
        await serving


def test_each_worker_has_its_own_address():
    assert addresses_of("unix:/a/w", 1) == ["unix:/a/w"]
    assert addresses_of("unix:/a/w-{}", 2) == ["unix:/a/w-0", "unix:/a/w-1"]
    assert addresses_of("tcp://h:70", 2) == ["tcp://h:70", "tcp://h:71"]
    with pytest.raises(StartupFailed, match="different addresses"):
        addresses_of("unix:/a/w", 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"speedup": 0.0},
        {"num_workers": 0},
        {"step_ms": -1.0},
        {"num_kv_blocks": 2048},
    ],
)
def test_invalid_settings_are_named(wrong):
    with pytest.raises(StartupFailed, match=next(iter(wrong))):
        SimulatedConfig(**wrong).validate()
