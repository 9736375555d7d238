"""A store's start: it listens first, and ends if its model takes no media."""

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from fake_nixl import FakeMetadata
from medialane.arena import kept_arenas, reap
from medialane.cli import main, store
from medialane.cli.doctor import check_kept_arenas
from medialane.cluster import NOT_NEEDED
from medialane.config import Config, load_config
from medialane.media import MediaConfig
from medialane.prepare import NO_PROCESSOR_FACTORY, PreparerPool
from medialane.store import FindItem, PublishedImages, StoreConfig, StoreLink
from medialane.store.messages import AskLease, OpenDocument, Proceed, PutMedia
from medialane.testing.sample_media import sample_jpeg, sample_pdf
from medialane.transfer.nixl import Descriptor, RdmaMetadata, pack_agent_metadata
from medialane.types.errors import StartupFailed
from medialane.types.hashing import content_hash
from medialane.types.media import PDF_TYPE, DocumentOptions, MediaRef
from medialane.types.media_lease import MEDIA_SCHEME
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.wire import RpcConfig
from nixl_hosts import fake_mover
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


async def test_store_of_a_model_without_media_ends_as_not_needed(config, address, caplog, tmp_path):
    parts = store.StoreParts(processor=NO_PROCESSOR_FACTORY)
    async with asyncio.timeout(30):
        assert await store.serve(config, str(tmp_path), [], address, parts=parts) == NOT_NEEDED
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


async def test_recorded_holds_are_shown_and_logged(config, address, capsys, caplog):
    settings = {**SETTINGS, "arena-directory": config.arena.directory, "debug-holds": "true", "stage": "url"}
    config = load_config(settings, environ={})
    serving = asyncio.create_task(store.serve(config, "model", [], address))
    link = StoreLink(
        address, rpc=RpcConfig(), arena_directory=config.arena.directory, wait_timeout_s=5, writable=True,
        names_takers=True, scraped="gateway",
    )  # fmt: skip
    running = asyncio.create_task(link.run())
    try:
        await asyncio.wait_for(link.ready(), 30)
        await _upload(link, sample_jpeg(1, 64, 64))
        assert await status(address) == 0
        shown = capsys.readouterr().out
        assert re.search(r"held for \d\.\d s: published encoded entry at \d+ .*: gateway .*: FindItem for ", shown)
        os.kill(os.getpid(), signal.SIGUSR2)
        await eventually(lambda: "1 holds on entries of the arena, the oldest first" in caplog.text)
        assert "published encoded entry" in caplog.text
    finally:
        running.cancel()
        serving.cancel()
        await asyncio.wait([running, serving])


async def _upload(link, data):
    async def write(question):
        link.payload(question.range)[: len(data)] = data

    ref = MediaRef("image", "image", content=content_hash(data))
    await link.call(lambda call_id: FindItem(call_id, ref, "encoded", b"{}", len(data)), write)


@pytest.mark.timeout(120)  # two processes start
async def test_leased_document_is_taken_over_from_a_store_that_was_killed_without_its_name(config, address, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    words = [sys.executable, "-m", "medialane", "store", str(tmp_path), f"--listen={address}", "--stage=url"]
    words += ["--preparers=1", "--arena-size=64MiB", f"--arena-directory={config.arena.directory}"]
    data = sample_pdf(["first", "second"])

    async def write(question):
        link.payload(question.range)[: len(data)] = data
        return Proceed(question.call_id, len(data), content_hash(data))

    async def opened():
        """Open the document by its lease, and render its last page; return its texts, and the names of files."""
        reply = await link.call(lambda call_id: OpenDocument(call_id, ref, DocumentOptions(dpi=18)))
        *_, last = reply.document.pages
        page = replace(ref, content=reply.document.content_hash, io=msgspec.json.encode(last.io))
        found = await link.call(lambda call_id: FindItem(call_id, page, "decoded"), _look)
        assert (found.feature.size.width, found.feature.size.height) == (last.io.width, last.io.height)
        listed = await link.call(lambda call_id: AskLease(call_id, "owner", None, "find"))
        return [page.text for page in reply.document.pages], [file.name for file in listed.media]

    process = await asyncio.create_subprocess_exec(*words)
    link = StoreLink(address, rpc=RpcConfig(), arena_directory=config.arena.directory, wait_timeout_s=60, writable=True)
    running = asyncio.create_task(link.run())
    try:
        await asyncio.wait_for(link.ready(), 60)
        file = PutMedia(0, "owner", "", len(data), 30, modality="document", name="paper.pdf", purpose="user_data")
        (leased,) = (await link.call(lambda call_id: replace(file, call_id=call_id), write)).media
        assert (leased.modality, leased.media_type, leased.name) == ("document", PDF_TYPE, "paper.pdf")
        ref = MediaRef("image", "p", url=f"{MEDIA_SCHEME}{leased.hash}", media_type=PDF_TYPE, owner="owner")
        assert await opened() == (["first", "second"], ["paper.pdf"])
        process.kill()
        await process.wait()
        process = await asyncio.create_subprocess_exec(*words)
        assert await opened() == (["first", "second"], [])
    finally:
        process.terminate()
        running.cancel()
        await asyncio.wait([running, asyncio.create_task(process.wait())])


async def _look(_question) -> None:
    pass


async def test_clients_connect_and_map_the_arena_while_the_processor_is_loaded(config, address, capsys):
    may_load = asyncio.Event()

    class SlowPool(PreparerPool):
        async def start(self) -> None:
            await may_load.wait()
            await super().start()

    config = msgspec.structs.replace(config, gateway=msgspec.structs.replace(config.gateway, stage="url"))
    serving = asyncio.create_task(
        store.serve(config, "model", [], address, parts=store.StoreParts(store.PROCESSOR_FACTORY, pool=SlowPool))
    )
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


async def test_store_reads_published_images_if_the_operator_allows_it(config, address):
    parts = store.StoreParts(store.PROCESSOR_FACTORY, mover=fake_mover)
    settings = {**SETTINGS, "stage": "url", "allow-media-rdma": "true", "peer-nixl": "on"}
    config = load_config({**settings, "arena-directory": config.arena.directory}, environ={})
    serving = asyncio.create_task(store.serve(config, "model", [], address, parts=parts))
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


# `medialane store`: help, and addresses that are rejected before anything starts.


def shown(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_usual_settings_and_help_all_every_one(capsys):
    usual, every = shown(["store", "--help"], capsys), shown(["store", "--help-all"], capsys)
    for flag in ("--listen", "--preparers", "--arena-size"):
        assert flag in usual
    for flag in ("--store-max-uuids", "--store-uuid-ttl", "--store-max-connections", "--store-wait-timeout"):
        assert flag not in usual
        assert flag in every
    assert "medialane gateway ./model" in usual


@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_clients_of_a_store_take_its_address(command, capsys):
    assert "--store ADDRESS" in shown([command, "--help"], capsys)


REMOTE = "tcp://10.0.0.2:7000"
START = {
    "store": ["store", "m", "--listen"],
    "gateway": ["gateway", "m", "--worker", "unix:/run/w.sock", "--store"],
    "worker": ["worker", "m", "--listen", "unix:/run/w.sock", "--store"],
    "simulated": ["worker", "m", "--engine", "simulated", "--listen", "unix:/tmp/w-{}.sock", "--store"],
}


@pytest.mark.parametrize("address", [REMOTE, "store.sock", "tcp://a..b:7000", ""])
@pytest.mark.parametrize("command", START)
def test_store_on_anything_but_a_unix_socket_fails_the_start(command, address, capsys):
    assert main([*START[command], address]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"medialane: error: {START[command][-1]}: ")
    assert len(error.splitlines()) == 1


def test_model_that_does_not_exist_is_reported_before_anything_starts(capsys):
    assert main(["store", "/no/such/model", "--listen", "unix:/run/s.sock"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


TLS = RpcConfig(tls_cert="cert.pem", tls_key="key.pem", tls_ca="ca.pem")


@pytest.mark.parametrize(
    ("setting", "rpc", "has_rdma", "expected"),
    [
        ("auto", RpcConfig(), True, True),
        ("auto", RpcConfig(), False, False),
        ("auto", TLS, True, False),
        ("on", TLS, False, True),
        ("off", RpcConfig(), True, False),
    ],
)
def test_nixl_is_used_over_rdma_where_entries_need_not_be_encrypted_or_where_it_is_set(
    setting, rpc, has_rdma, expected, tmp_path
):
    if has_rdma:
        (tmp_path / "mlx5_0").mkdir()
    config = Config(store=StoreConfig(nixl=setting), rpc=rpc)
    assert (store.nixl_mover(config, "0" * 32, 1, devices=tmp_path) is not None) == expected


def test_missing_nixl_is_logged_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nixl", None)  # absent
    with caplog.at_level(logging.INFO):
        assert store.nixl_mover(Config(store=StoreConfig(nixl="on")), "0" * 32, 1) is None
    assert len(caplog.records) == 1


def test_published_images_need_nixl():
    config = Config(media=MediaConfig(allow_rdma=True), store=StoreConfig(nixl="on"))
    mover = store.nixl_mover(config, "0" * 32, 1)
    assert isinstance(store.published_images(config.media, None, None, mover), PublishedImages)
    assert store.published_images(MediaConfig(), None, None, mover) is None
    with pytest.raises(StartupFailed, match="--peer-nixl on"):
        store.published_images(config.media, None, None, None)


async def test_kept_arena_is_adopted_by_the_next_store_and_named_until_then(config, address, capfd):
    folder = config.arena.directory
    kept = load_config({**SETTINGS, "stage": "url", "arena-directory": folder, "keep-arena": "true"}, environ={})

    async def run(config, address) -> str:
        """Run a store; return the id of its arena."""
        serving = asyncio.create_task(store.serve(config, "model", [], address))
        link = StoreLink(address, rpc=RpcConfig(), arena_directory=folder, wait_timeout_s=5)
        running = asyncio.create_task(link.run())
        await asyncio.wait_for(link.ready(), 30)
        arena = link.arena
        running.cancel()
        await asyncio.wait([running])
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(serving, 30) == 0
        return arena

    first = await run(kept, address)
    (one,) = kept_arenas(folder)
    assert first in one.path
    assert f"arena kept: {one.path}, 64 MiB; remove it with: rm {one.path}" in capfd.readouterr().err
    assert not reap(folder), "another store spares it"
    assert next(finding.text for _, finding in check_kept_arenas(kept)).startswith(f"{one.path} occupies ")
    assert await run(kept, address + "2") == first, "whatever its address"
    other = msgspec.structs.replace(kept, media=msgspec.structs.replace(kept.media, max_image_pixels=1000))
    third = await run(other, address)
    assert third != first
    (one,) = kept_arenas(folder)
    assert third in one.path, "the earlier one is replaced"
    os.unlink(one.path)
