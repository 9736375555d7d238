"""One gateway under attack for the whole corpus, its media hosts, and concurrent requests."""

from __future__ import annotations

import itertools
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from attack import BUSY
from corpus import World, chat, data_url, media_part
from media_files import picture
from origin_routes import ROUTES
from tiny_families import FAMILIES

from gateway_process import GatewayProcess, gateway_process
from medialane.arena import ArenaConfig
from medialane.config import Config
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig
from medialane.testing.tiny_model import cache_folder
from origin import ORIGIN_HOST, MediaHosts, media_hosts

_numbers = itertools.count(1000)


@pytest.fixture(scope="session")
def hosts() -> Iterator[MediaHosts]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert(ORIGIN_HOST).configure_cert(tls)
    with media_hosts(ROUTES, tls) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder allowed for file: URLs, and files around and in it that are not."""
    folder = tmp_path_factory.mktemp("files")
    allowed = folder / "allowed"
    for path in (allowed / "inner", folder / "allowed-not"):
        path.mkdir(parents=True)
    for path in (folder / "secret.jpg", folder / "allowed-not" / "secret.jpg", allowed / "good.jpg"):
        path.write_bytes(picture(70))
    (allowed / "empty.jpg").touch()
    with (allowed / "large.jpg").open("wb") as large:
        large.truncate(30 << 20)
    os.mkfifo(allowed / "pipe")
    links = {
        "link.jpg": folder / "secret.jpg",
        "linked": folder,
        "loop.jpg": "loop.jpg",
        "inside.jpg": "good.jpg",
        "zero": "/dev/zero",
        "environ": "/proc/self/environ",
        "descriptor": "/proc/self/fd/0",
    }
    for name, target in links.items():
        (allowed / name).symlink_to(target)
    here = os.open(allowed, os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{here}/socket")  # a socket's whole path must be short
    finally:
        os.close(here)
    return folder


@pytest.fixture(scope="session")
def gateway(hosts: MediaHosts, folder: Path) -> Iterator[GatewayProcess]:
    config = Config(
        media=MediaConfig(
            allowed_media_networks=(f"{ORIGIN_HOST}/32",),
            # The canary's port is allowed, so that only its address protects it.
            allowed_media_ports=(80, 443, hosts.canary_port),
            allowed_local_media_path=str(folder / "allowed"),
            image_fetch_timeout_s=2.5,
        ),
        prepare=PrepareConfig(num_preparers=1, image_timeout_s=5.0),
        arena=ArenaConfig(size_bytes=256 << 20),
    )
    family = FAMILIES["qwen2_5_omni"]  # it takes all there is
    model = str(family.build(cache_folder(os.environ)))
    with gateway_process(model, config, folder, (*family.flags, "--enable-scale-out")) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def world(hosts: MediaHosts, folder: Path, gateway: GatewayProcess) -> World:
    return World(hosts, folder, gateway.model)


@pytest.fixture(autouse=True)
def _nothing_is_harmed(gateway: GatewayProcess, hosts: MediaHosts, world: World) -> Iterator[None]:
    """After every attack: the canary was not reached, and a request with a new image succeeds."""
    before = hosts.num_canary_hits
    yield
    assert hosts.num_canary_hits == before, "a forbidden connection was made"
    good = gateway.ask(chat(world.model, media_part(data_url(picture(next(_numbers))))))
    assert good.status == 200, good.body
    assert good.seconds < BUSY * 5
