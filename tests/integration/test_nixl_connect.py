"""Readable operations as NVIDIA Dynamo's `nixl_connect` exchanges them: between two of our movers, and with Dynamo's
own code from PyPI; and images that a client has published so, through a gateway."""

import asyncio
import gc
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gateway_parts import Parts
from PIL import Image as PILImage

from medialane.arena import describe, layout
from medialane.gateway import GatewayConfig, open_scope
from medialane.gateway.intake import ExtractedMedia
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.transfer.nixl import NixlMover, RdmaMetadata
from medialane.types.errors import (
    InvalidRequest,
    MediaFetchTimeout,
    MediaUrlForbidden,
    TransferFailed,
    UpstreamFailed,
)
from medialane.types.feature import MediaPrompt
from medialane.types.media import MediaRef
from medialane.types.tensor import TensorSpec
from nixl_hosts import Host, require_nixl
from published import published_url
from waiting import eventually

pytestmark = pytest.mark.timeout(90)

PROGRAM = str(Path(__file__).with_name("nixl_connect_program.py"))
DYNAMO = "ai-dynamo-runtime==1.6.1"
MODULE = "dynamo/nixl_connect/__init__.py"
#: Of the decoded frames of a video, and their timestamps.
SPECS = (TensorSpec("uint8", (8, 336, 336, 3)), TensorSpec("float64", (8,)))
SIZES = [spec.nbytes for spec in SPECS]


@pytest.fixture
async def hosts(monkeypatch):
    require_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    made = [Host() for _ in range(2)]
    await asyncio.gather(*(host.mover.offer(wait=True) for host in made))
    yield made
    for host in made:
        await host.close()
    gc.collect()  # a traceback references frames, which reference views of the arena


def tensors_of(host):
    """Return a new range for tensors of SPECS, and their descriptors."""
    _, num_bytes = layout(SPECS)
    destination = host.destination(num_bytes)
    return destination, describe(destination.range, SPECS)


def data_of(host, tensors) -> bytes:
    return b"".join(bytes(host.arena.view.tensor(tensor)) for tensor in tensors)


async def test_published_tensors_are_read_once_and_their_owner_is_notified(hosts):
    owner, reader = hosts
    written, tensors = tensors_of(owner)
    written.payload[:] = os.urandom(len(written.payload))
    published = await owner.mover.publish(tensors)
    metadata = RdmaMetadata.decode(published.metadata.encode())
    assert not published.completed.done()
    _, destinations = tensors_of(reader)
    await reader.mover.read_published(metadata, destinations, deadline_s=30)
    assert data_of(reader, destinations) == data_of(owner, tensors)
    await asyncio.wait_for(published.completed, 10)


async def test_tensors_of_other_sizes_are_not_read(hosts):
    owner, reader = hosts
    _, tensors = tensors_of(owner)
    published = await owner.mover.publish(tensors)
    _, destinations = tensors_of(reader)
    with pytest.raises(TransferFailed, match="sizes"):
        await reader.mover.read_published(published.metadata, destinations[:1], deadline_s=30)
    published.completed.cancel()


@pytest.fixture(scope="session")
def dynamo(request):
    """A folder with `dynamo.nixl_connect`, which needs only torch, nixl and pydantic of the package's dependencies."""
    folder = Path(request.config.cache.mkdir(DYNAMO.replace("=", "-")))
    if not (folder / MODULE).exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), DYNAMO]
        try:
            subprocess.run(command, capture_output=True, timeout=60, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"NOT TESTED against Dynamo: {DYNAMO} cannot be downloaded: {error}")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(MODULE, folder)
            wheel.unlink()
    check = [sys.executable, "-c", "import dynamo.nixl_connect"]
    found = subprocess.run(check, env=environment(folder), capture_output=True, text=True, timeout=60, check=False)
    if found.returncode:
        pytest.skip(f"NOT TESTED against Dynamo: it cannot be imported: {found.stderr[-300:]}")
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "NIXL_LOG_LEVEL": "WARN", "UCX_TLS": "tcp"}


class Dynamo:
    """A process of `nixl_connect_program`."""

    def __init__(self, folder: Path, command: str, sizes: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, command, *map(str, sizes)],
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        """Return its next line that is not NIXL's own output."""
        while found := await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), 60):
            if " NIXL " not in found:
                return found.strip()
        raise AssertionError("Dynamo's end has exited")

    def write(self, line: bytes) -> None:
        self._process.stdin.write(line.decode() + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start_dynamo(dynamo):
    made = []

    def start(command, *sizes):
        made.append(Dynamo(dynamo, command, sizes or SIZES))
        return made[-1]

    yield start
    for process in made:
        process.close()


async def test_we_read_what_dynamo_publishes(hosts, start_dynamo):
    _, reader = hosts
    peer = start_dynamo("publish")
    metadata = RdmaMetadata.decode((await peer.line()).encode())
    _, destinations = tensors_of(reader)
    await reader.mover.read_published(metadata, destinations, deadline_s=30)
    assert await peer.line() == "completed", "it has received the notification"
    assert hashlib.sha256(data_of(reader, destinations)).hexdigest() == await peer.line()


async def test_dynamo_reads_what_we_publish(hosts, start_dynamo):
    owner, _ = hosts
    written, tensors = tensors_of(owner)
    written.payload[:] = os.urandom(len(written.payload))
    published = await owner.mover.publish(tensors)
    peer = start_dynamo("read")
    peer.write(published.metadata.encode())
    assert await peer.line() == "completed"
    assert await peer.line() == hashlib.sha256(data_of(owner, tensors)).hexdigest()
    await asyncio.wait_for(published.completed, 10)


HEIGHT, WIDTH = 480, 640


@pytest.fixture
async def parts(arena, preparers, worker, monkeypatch):
    """Returns a gateway and its store, which reads published images, by stage."""
    require_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with AsyncExitStack() as stack:

        async def make(stage):
            mover = NixlMover(
                arena.id,
                str(arena.path.parent),
                slot=arena.slot,
                max_given_up_bytes=arena.size_bytes,
                environ=os.environ,
            )
            config = GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.05, stage=stage)
            return await stack.enter_async_context(Parts(arena, preparers, [worker], config=config, mover=mover))

        yield make


def pixels() -> np.ndarray:
    """What `nixl_connect_program` publishes."""
    return np.arange(HEIGHT * WIDTH * 3, dtype=np.int64).astype(np.uint8).reshape(HEIGHT, WIDTH, 3)


def png_of(found: np.ndarray) -> bytes:
    file = io.BytesIO()
    PILImage.fromarray(found).save(file, "PNG")
    return file.getvalue()


def asking(**source) -> MediaPrompt:
    return MediaPrompt([1, 2, PLACEHOLDER_TOKEN], (MediaRef("image", "p", **source),))


@pytest.mark.parametrize("stage", ["features", "decoded"])
async def test_published_image_is_answered_like_a_file_with_its_pixels(parts, worker, hosts, start_dynamo, stage):
    gateway = await parts(stage)
    peer = start_dynamo("publish", HEIGHT * WIDTH * 3)
    published = asking(url=published_url((await peer.line()).encode(), HEIGHT, WIDTH))
    with open_scope():
        answer = await gateway.answer(published)
        assert await peer.line() == "completed", "it has received the notification"
    peer.close()
    with open_scope():
        again = await gateway.answer(published, "again")
    with open_scope():
        assert again == answer == await gateway.answer(asking(data=png_of(pixels())), "file")


async def test_image_that_another_of_our_stores_publishes_is_answered(parts, hosts):
    gateway, (owner, _) = await parts("decoded"), hosts
    spec = TensorSpec("uint8", (HEIGHT, WIDTH, 3))
    written = owner.destination(spec.nbytes)
    written.payload[:] = pixels().tobytes()
    published = await owner.mover.publish(describe(written.range, [spec]))
    with open_scope():
        answer = await gateway.answer(asking(url=published_url(published.metadata.encode(), HEIGHT, WIDTH)))
    await asyncio.wait_for(published.completed, 10)
    with open_scope():
        assert answer == await gateway.answer(asking(data=png_of(pixels())), "file")


async def test_published_image_that_cannot_be_read_fails_its_request(parts, start_dynamo):
    gateway = await parts("features")
    peer = start_dynamo("publish", HEIGHT * WIDTH * 3)
    published = asking(url=published_url((await peer.line()).encode(), HEIGHT, WIDTH))
    peer.close()
    with open_scope(), pytest.raises((UpstreamFailed, MediaFetchTimeout)) as raised:
        await gateway.gateway.prepare(published)
    assert raised.value.param == "p"


async def test_dynamo_reads_an_image_that_a_gateway_has_decoded(parts, start_dynamo):
    gateway = await parts("features")
    ref = MediaRef("image", "p", data=png_of(pixels()))
    with open_scope() as scope:
        scope.extracted = ExtractedMedia((ref,))
        (image,) = msgspec.json.decode(await gateway.gateway.publish_images())["images"]
    assert (image["shape"], image["dtype"]) == ([HEIGHT, WIDTH, 3], "uint8")
    await eventually(lambda: gateway.num_held == 1, "until it has been read")
    peer = start_dynamo("read", HEIGHT * WIDTH * 3)
    peer.write(msgspec.json.encode(image["rdma_metadata"]))
    assert await peer.line() == "completed"
    assert await peer.line() == hashlib.sha256(pixels().tobytes()).hexdigest()
    await eventually(lambda: gateway.num_held == 0)


@pytest.mark.parametrize("modality", ["video", None])
async def test_only_images_are_published(parts, modality):
    gateway = await parts("features")
    with open_scope() as scope:
        scope.extracted = ExtractedMedia((MediaRef(modality, "p", data=b"1"),) if modality else ())
        with pytest.raises(InvalidRequest):
            await gateway.gateway.publish_images()


async def test_store_publishes_nothing_unless_the_operator_allows_it(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as gateway:
        with open_scope() as scope:
            scope.extracted = ExtractedMedia((MediaRef("image", "p", data=png_of(pixels())),))
            with pytest.raises(MediaUrlForbidden):
                await gateway.gateway.publish_images()
