"""A store's start: it listens first, and ends if its model takes no media."""

import asyncio
import os
import secrets
import signal
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from medialane.cli import store
from medialane.cli.main import main
from medialane.cluster.process_spec import NOT_NEEDED
from medialane.config import Config, load_config
from medialane.core.media import MediaRef
from medialane.core.tensor import TensorDescriptor, TensorSpec
from medialane.peers.nixl.mover import NixlMover
from medialane.peers.nixl.rdma_metadata import Descriptor, RdmaMetadata, pack_agent_metadata
from medialane.prepare import NO_PROCESSOR_FACTORY, PreparerPool
from medialane.store import StoreLink
from medialane.store.messages import FindItem
from medialane.testing.fake_nixl import FakeMetadata
from medialane.wire.config import RpcConfig
from nixl_hosts import FAKE
from published import published_url
from waiting import eventually

SETTINGS = {"arena-size": "64MiB", "preparers": "1"}


@pytest.fixture
def config(tmp_path) -> Config:
    folder = Path("/dev/shm") / f"medialane-test-{secrets.token_hex(6)}"
    folder.mkdir()
    yield load_config({**SETTINGS, "arena-directory": str(folder)}, environ={})
    assert not list(folder.iterdir()), "the arena is removed"
    folder.rmdir()


@pytest.fixture
def address():
    path = Path(f"/tmp/medialane-test-{secrets.token_hex(6)}.sock")
    yield f"unix:{path}"
    assert not path.exists()


async def test_store_of_a_model_without_media_ends_as_not_needed(config, address, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(store, "PROCESSOR_FACTORY", NO_PROCESSOR_FACTORY)
    async with asyncio.timeout(30):
        assert await store.serve(config, str(tmp_path), [], address) == NOT_NEEDED
    assert "this model takes no media" in caplog.text


async def status(address):
    return await asyncio.to_thread(main, ["status", "--store", address])


async def test_state_of_a_store_that_is_not_there_is_one_clear_error(address, capsys):
    assert await status(address) == 2
    assert f"medialane: error: {address}: " in capsys.readouterr().err
    assert await status("tcp://127.0.0.1:1") == 2
    assert "--store: 'tcp://127.0.0.1:1' must be " in capsys.readouterr().err


async def test_store_that_hangs_does_not_answer(address, capsys):
    """As one that is stopped: the kernel accepts the connection."""
    path = address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert await status(address) == 2
    os.unlink(path)
    assert "the media store did not respond within 3 s" in capsys.readouterr().err


async def test_clients_connect_and_map_the_arena_while_the_processor_is_loaded(config, address, monkeypatch, capsys):
    may_load = asyncio.Event()

    class SlowPool(PreparerPool):
        async def start(self) -> None:
            await may_load.wait()
            await super().start()

    monkeypatch.setattr(store, "PreparerPool", SlowPool)
    config = msgspec.structs.replace(config, gateway=msgspec.structs.replace(config.gateway, stage="url"))
    serving = asyncio.create_task(store.serve(config, "model", [], address))
    link = StoreLink(address, rpc=RpcConfig(), arena_directory=config.arena.directory, wait_timeout_s=5)
    running = asyncio.create_task(link.run())
    await eventually(lambda: link.arena is not None and link.status is not None)
    ready = asyncio.create_task(link.ready())
    await eventually(lambda: _free(link) > 0)
    assert not ready.done()
    assert not link.status.has_started
    assert await status(address) == 1
    assert capsys.readouterr().out == "store: loading the model's processor\n"
    may_load.set()
    await asyncio.wait_for(ready, 30)
    assert await status(address) == 0
    assert capsys.readouterr().out == "store: ready\n"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 30) == 0
    running.cancel()
    await asyncio.wait([running])


class FakedNixlMover(NixlMover):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings, factory=FAKE)


async def test_store_reads_published_images_if_the_operator_allows_it(config, address, monkeypatch):
    monkeypatch.setattr(store, "NixlMover", FakedNixlMover)
    settings = {**SETTINGS, "stage": "url", "allow-media-rdma": "true", "peer-nixl": "on"}
    config = load_config({**settings, "arena-directory": config.arena.directory}, environ={})
    serving = asyncio.create_task(store.serve(config, "model", [], address))
    link = StoreLink(address, rpc=RpcConfig(), arena_directory=config.arena.directory, wait_timeout_s=5)
    running = asyncio.create_task(link.run())
    await asyncio.wait_for(link.ready(), 30)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    agent = msgspec.msgpack.encode(FakeMetadata("client", os.getpid()))
    descriptor = Descriptor("cpu", pixels.ctypes.data, pixels.nbytes)
    metadata = RdmaMetadata([descriptor], pack_agent_metadata(agent), "key")
    ref = MediaRef("image", "p", url=published_url(metadata.encode(), 40, 60))
    reply = await asyncio.wait_for(link.call(lambda call_id: FindItem(call_id, ref, "encoded"), _proceed), 30)
    spec = TensorSpec("uint8", (reply.encoded.num_bytes,))
    assert bytes(link.tensor(TensorDescriptor(spec, reply.range, reply.encoded.data_offset)))[64:] == pixels.tobytes()
    link.release(reply.hold_id, reply.range.arena)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 30) == 0
    running.cancel()
    await asyncio.wait([running])


async def _proceed(question) -> None:
    assert (question.width, question.height) == (60, 40)


def _free(link: StoreLink) -> int:
    return link.status.stats.arena.largest_hole_bytes
