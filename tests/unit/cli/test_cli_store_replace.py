"""A store replaces another one at its address; what cannot replace it leaves it alone."""

import asyncio
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from medialane.cli.main import main
from medialane.core.hashing import content_hash
from medialane.core.media import Alias, MediaRef
from medialane.store import StoreLink
from medialane.store.messages import FindItem, ResolveAlias
from medialane.testing.sample_images import sample_jpeg
from medialane.wire.config import RpcConfig

pytestmark = pytest.mark.timeout(120)  # processes that are started from scratch


@pytest.fixture
def host(tmp_path):
    """A folder of /dev/shm for arenas, an address, and a model."""
    (tmp_path / "config.json").write_text("{}")
    shm = Path("/dev/shm") / f"medialane-test-{secrets.token_hex(6)}"
    shm.mkdir()
    address = f"unix:/tmp/medialane-test-{secrets.token_hex(6)}.sock"
    yield shm, address, str(tmp_path)
    Path(address.removeprefix("unix:")).unlink(missing_ok=True)
    left = list(shm.iterdir())
    for path in left:
        path.unlink()
    shm.rmdir()
    assert not left, "the arena is removed by the last store"


def arguments(host, *flags: str) -> list[str]:
    shm, address, model = host
    settings = ["--stage", "url", "--preparers", "1", "--arena-size", "64MiB", "--arena-directory", str(shm)]
    return ["store", model, "--listen", address, *settings, *flags]


def start(host, *flags: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "medialane", *arguments(host, *flags)], stderr=subprocess.PIPE)


async def ended(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    return process.returncode, errors.decode()


async def test_next_store_takes_over_all_that_is_cached(host):
    shm, address, _ = host
    old, running, processes = start(host), None, []
    try:
        link = StoreLink(address, rpc=RpcConfig(), arena_directory=str(shm), wait_timeout_s=30, writable=True)
        running = asyncio.create_task(link.run())
        await asyncio.wait_for(link.ready(), 60)
        data, arena = sample_jpeg(0, 64, 48), link.arena
        named = MediaRef("image", "p", alias=Alias("a client's uuid", "image"))
        ref = MediaRef("image", "p", content=content_hash(data), alias=named.alias)

        async def write(question) -> None:
            link.payload(question.range)[: len(data)] = data

        item = await link.call(lambda call_id: FindItem(call_id, ref, "encoded", num_bytes=len(data)), write)

        refused = start(host, "--replace", "--media-max-image-pixels", "1000")
        processes.append(refused)
        status, errors = await ended(refused)
        assert status == 2
        assert "the running store was started with another model, other settings" in errors
        assert old.poll() is None
        assert link.arena == arena

        new = start(host, "--replace")
        processes.append(new)
        status, errors = await ended(old)
        assert (status, "the next store takes over" in errors) == (0, True), errors
        again = await link.call(lambda call_id: FindItem(call_id, ref, "encoded"))
        assert (again.range, link.arena) == (item.range, arena), "the bytes were not sent again"
        resolved = await link.call(lambda call_id: ResolveAlias(call_id, named))
        assert resolved.ref.content == ref.content
        await asyncio.wait_for(link.ready(), 60)
        link.release(item.hold_id, arena)
        link.release(again.hold_id, arena)
        new.terminate()
        status, errors = await ended(new)
        assert status == 0
        assert "entries of an earlier store's arena" in errors
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        for process in (old, *processes):
            if process.poll() is None:
                process.kill()
                process.wait()


def test_replacing_needs_a_store_that_runs(host, capsys):
    assert main(arguments(host, "--replace")) == 2
    assert f"no store runs at {host[1]}" in capsys.readouterr().err


def test_store_of_serve_is_not_replaced_by_hand(host, tmp_path, capsys):
    (tmp_path / "owner.lock").touch()
    address = f"unix:{tmp_path}/store.sock"
    assert main(arguments((host[0], address, host[2]), "--replace")) == 2
    assert "`medialane serve` runs the store" in capsys.readouterr().err
