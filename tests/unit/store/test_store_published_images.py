"""Reading published images, over real mover processes with a fake of NIXL that reads this process's memory."""

import asyncio
import gc
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fake_nixl import FakeMetadata
from medialane.arena import layout
from medialane.media import PIXMAP_HEADER_BYTES, PIXMAP_TYPE, MediaConfig, PublishedImage
from medialane.store import EncodedStore, PublishedImages
from medialane.transfer import Pulls
from medialane.transfer.nixl import Descriptor, RdmaMetadata, pack_agent_metadata
from medialane.types.errors import (
    InvalidImage,
    InvalidRequest,
    MediaFetchFailed,
    MediaFetchTimeout,
    Unavailable,
    UpstreamFailed,
)
from medialane.types.feature import Feature
from medialane.types.media import MediaRef, MediaSize
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.wire import RpcConfig
from nixl_hosts import FAKE, Host
from published import published_url
from waiting import eventually

HEIGHT, WIDTH = 40, 60
TIMEOUT_S = 10.0
SHORT_S = 0.2


class Client:
    """Publishes `pixels` of this process, or memory of the process `pid`."""

    def __init__(self, seed: int = 0, pid: int | None = None) -> None:
        self.pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        self._agent = msgspec.msgpack.encode(FakeMetadata("client", pid or os.getpid()))

    def ref(self, *, key="key", size=None, height=HEIGHT, salt="") -> MediaRef:
        descriptor = Descriptor("cpu", self.pixels.ctypes.data, size or self.pixels.nbytes)
        metadata = RdmaMetadata([descriptor], pack_agent_metadata(self._agent), key)
        return MediaRef("image", "p", url=published_url(metadata.encode(), height, WIDTH), salt=salt)


class World:
    def __init__(self, timeout_s: float = TIMEOUT_S, **settings: float) -> None:
        config = MediaConfig(allow_rdma=True, image_fetch_timeout_s=timeout_s)
        self.host = Host(factory=FAKE)
        self.pulls = Pulls(self.host.arena, RpcConfig(), self.host.mover)
        self.images = PublishedImages(self.host.arena, self.pulls, self.host.mover, config, **settings)
        self.store = EncodedStore(self.host.arena, config)

    def cached(self, ref: MediaRef, content: str) -> tuple[str, bytes]:
        with self.store.lookup(ref, content) as pin:
            return pin.value.media_type, bytes(self.store.bytes(pin.value))


@pytest.fixture
async def world(request):
    world = World(**getattr(request, "param", {}))
    await world.host.mover.offer(wait=True)
    yield world
    await world.images.close()
    await world.pulls.close()
    assert world.host.arena.stats().num_leases == 0
    await world.host.close()
    gc.collect()  # a traceback references frames, which reference views of the arena


@pytest.fixture
def stopped_process():
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    yield process.pid
    process.kill()
    process.wait()


async def test_pixels_are_cached_under_their_hash(world):
    client = Client()
    ref = client.ref()
    found = await world.images.fetch(ref)
    media_type, data = world.cached(ref, found)
    assert media_type == PIXMAP_TYPE
    assert data[PIXMAP_HEADER_BYTES:] == client.pixels.tobytes()
    assert await world.images.fetch(client.ref(key="other")) == found


async def test_image_is_read_once(world):
    """Its owner may reuse the memory after the first read."""
    client = Client()
    first, second = await asyncio.gather(*(world.images.fetch(client.ref()) for _ in range(2)))
    client.pixels[:] = 0
    third = await world.images.fetch(client.ref())
    assert first == second == third
    with pytest.raises(MediaFetchFailed, match="publish it anew"):
        await world.images.fetch(client.ref(), need_data=True)


async def test_tenants_do_not_share_what_was_read(world):
    client = Client()
    content = await world.images.fetch(client.ref(salt="a"))
    assert world.store.lookup(client.ref(salt="b"), content) is None


async def test_image_whose_read_failed_is_not_read_again(world):
    ref = Client(pid=2**22 + 1).ref()
    for error, message in ((UpstreamFailed, "could not be read"), (MediaFetchFailed, "publish it anew")):
        with pytest.raises(error, match=message):
            await world.images.fetch(ref)
    assert world.host.arena.stats().num_reservations == 0


@pytest.mark.parametrize("world", [{"timeout_s": SHORT_S}], indirect=True)
async def test_memory_of_a_read_that_has_not_ended_is_not_reused(world, stopped_process):
    await asyncio.to_thread(_wait_until_stopped, stopped_process)
    with pytest.raises(MediaFetchTimeout):
        await world.images.fetch(Client(pid=stopped_process).ref())
    assert world.pulls.stats.num_quarantined == 1
    assert world.host.arena.stats().num_reservations == 1
    world.host.kill()
    await eventually(lambda: world.pulls.stats.num_quarantined == 0)
    assert world.host.arena.stats().num_reservations == 0


def _wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"size": 5}, InvalidImage), ({"height": HEIGHT + 1}, InvalidImage), ({"key": ""}, InvalidImage)],
)
async def test_metadata_that_do_not_describe_the_image_are_refused(world, fields, error):
    with pytest.raises(error):
        await world.images.fetch(Client().ref(**fields))
    assert world.host.arena.stats().num_reservations == 0


def decoded(world, kind="decoded", shape=(HEIGHT, WIDTH, 3)):
    """Return a pin on a new entry of `kind` with one tensor."""
    spec = TensorSpec("uint8", shape)
    (offset,), num_bytes = layout((spec,))
    reservation = world.host.arena.reserve(num_bytes, kind)
    tensors = (TensorDescriptor(spec, reservation.range, offset),)
    return world.host.arena.publish(reservation, "k", Feature("image", "k", b"", tensors, MediaSize()))


def num_leases(world):
    return world.host.arena.stats().num_leases


async def test_published_image_describes_its_entry_and_is_held(world):
    with decoded(world) as pin:
        document = msgspec.json.decode(await world.images.publish(pin.range), type=PublishedImage)
    assert document.shape == (HEIGHT, WIDTH, 3)
    (descriptor,) = RdmaMetadata.decode(bytes(document.rdma_metadata)).descriptors
    assert descriptor.size == HEIGHT * WIDTH * 3
    assert num_leases(world) == 1
    await world.images.close()
    assert num_leases(world) == 0


@pytest.mark.parametrize("world", [{"hold_s": 0.01}], indirect=True)
async def test_published_image_that_is_not_read_is_released(world):
    with decoded(world) as pin:
        await world.images.publish(pin.range)
    await eventually(lambda: num_leases(world) == 0)


async def test_published_image_is_released_when_its_mover_process_has_exited(world):
    with decoded(world) as pin:
        await world.images.publish(pin.range)
    world.host.kill()
    await eventually(lambda: num_leases(world) == 0)


@pytest.mark.parametrize(
    ("kind", "shape"), [("processed", (100,)), ("decoded", (2, HEIGHT, WIDTH, 3)), ("decoded", (HEIGHT, WIDTH, 4))]
)
async def test_only_decoded_images_are_published(world, kind, shape):
    with decoded(world, kind, shape) as pin, pytest.raises(InvalidRequest):
        await world.images.publish(pin.range)
    assert num_leases(world) == 0


async def test_image_that_is_not_held_is_not_published(world):
    with decoded(world) as pin:
        entry = pin.range
    with pytest.raises(Unavailable):
        await world.images.publish(entry)


async def test_images_that_are_published_at_the_same_time_are_limited(world):
    with decoded(world) as pin:
        for _ in range(256):
            await world.images.publish(pin.range)
        with pytest.raises(Unavailable):
            await world.images.publish(pin.range)
