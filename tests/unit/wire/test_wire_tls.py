"""Renewal of certificates: files that change are used by new connections, without a restart."""

import asyncio
import contextlib
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from certificates import tls_settings
from handshakes import GREETING_BYTES, PROOF_BYTES, handshake
from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import AuthenticationFailed
from medialane.wire import RpcConfig, Security

SECRET = "a secret of the tests"


@pytest.fixture
def ca():
    return trustme.CA()


@pytest.fixture
def worker(tmp_path, ca):
    return RpcConfig(shared_secret=SECRET, **tls_settings(tmp_path / "worker", ca))


@pytest.fixture
def gateway(tmp_path, ca):
    return RpcConfig(shared_secret=SECRET, **tls_settings(tmp_path / "gateway", ca))


def renew(config: RpcConfig, ca: trustme.CA) -> None:
    """Replace the files by a new certificate's of `ca`."""
    tls_settings(Path(config.tls_cert).parent, ca)


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def copy(data: bytes, path: str) -> None:
    Path(path).write_bytes(data)


def own(config: RpcConfig) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(config.tls_cert).read_text())


def where(net):
    host, _, port = net.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def tls_connection(net, config):
    context = Security.load(config).tls.context(is_dialler=True)
    return await asyncio.open_connection(*where(net), ssl=context, server_hostname="")


async def presented(net, config) -> bytes:
    """Return the certificate that a new connection gets from the server."""
    _, writer = await tls_connection(net, config)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()
    return found


async def test_renewed_certificate_is_used_by_new_connections_and_running_ones_stay(tcp_net, worker, gateway, ca):
    await tcp_net.serve(FakeHandler(), worker)
    before = await tcp_net.connect(gateway, gateway_id="before")
    assert await presented(tcp_net, gateway) == own(worker)
    for config in (worker, gateway):
        renew(config, ca)
        assert await presented(tcp_net, gateway) == own(worker)
        await tcp_net.connect(gateway, gateway_id=f"after {config.tls_cert}")
    assert not before.closed.is_set()


async def test_certificate_of_another_ca_is_accepted_once_both_sides_have_that(tcp_net, worker, gateway, tmp_path, ca):
    """How a CA is replaced: first all accept both, then certificates are renewed."""
    await tcp_net.serve(FakeHandler(), worker)
    new = trustme.CA()
    for config in (worker, gateway):
        copy(new.cert_pem.bytes() + content(config.tls_ca), config.tls_ca)
    bundle = content(worker.tls_ca)
    renew(worker, new)
    copy(bundle, worker.tls_ca)
    assert await presented(tcp_net, gateway) == own(worker)
    await tcp_net.connect(gateway)


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
async def test_unusable_new_file_is_logged_once_and_the_old_one_stays_in_use(
    tcp_net, worker, gateway, ca, caplog, name
):
    caplog.set_level(logging.INFO, "medialane")
    await tcp_net.serve(FakeHandler(), worker)
    first, path = own(worker), getattr(worker, name)
    copy(b"not a certificate", path)
    for number in range(3):
        await tcp_net.connect(gateway, gateway_id=f"g{number}")
    assert await presented(tcp_net, gateway) == first
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert path in errors[0].getMessage()
    renew(worker, ca)
    assert await presented(tcp_net, gateway) == own(worker) != first


async def test_new_certificate_without_its_key_waits_for_that(tcp_net, worker, gateway, tmp_path, ca):
    """Files are not replaced at once."""
    await tcp_net.serve(FakeHandler(), worker)
    first, renewed = own(worker), tls_settings(tmp_path / "renewed", ca)
    copy(content(renewed["tls_cert"]), worker.tls_cert)
    assert await presented(tcp_net, gateway) == first
    await tcp_net.connect(gateway)
    copy(content(renewed["tls_key"]), worker.tls_key)
    assert await presented(tcp_net, gateway) == own(worker) != first


async def test_handshake_in_flight_is_not_broken_by_a_renewal(tcp_net, worker, gateway, ca):
    """Between the handshake of TLS and the proofs, which are about the certificates of that handshake."""
    await tcp_net.serve(FakeHandler(), worker)
    reader, writer = await tls_connection(tcp_net, gateway)
    for config in (worker, gateway):
        renew(config, ca)
    await tcp_net.connect(gateway)
    ours = handshake(SECRET, writer)
    writer.write(ours.greeting + ours.receive(await reader.readexactly(GREETING_BYTES)))
    ours.receive(await reader.readexactly(PROOF_BYTES))
    assert ours.is_complete
    writer.close()


async def test_many_connections_during_renewals_all_succeed(tcp_net, worker, gateway, ca):
    await tcp_net.serve(FakeHandler(), worker)
    for number in range(5):
        connecting = [asyncio.create_task(tcp_net.connect(gateway, gateway_id=f"{number}.{each}")) for each in range(4)]
        await asyncio.sleep(0.002)  # time: in the middle of the handshakes
        renew((worker, gateway)[number % 2], ca)
        await asyncio.gather(*connecting)


async def test_replaced_ca_excludes_those_that_it_has_not_signed(tcp_net, worker, gateway):
    await tcp_net.serve(FakeHandler(), worker)
    await tcp_net.connect(gateway)
    renew(worker, trustme.CA())
    with pytest.raises(AuthenticationFailed):
        await tcp_net.connect(gateway)


def test_threads_get_the_renewed_certificate_once_it_is_there(worker, ca):
    tls = Security.load(worker).tls
    renew(worker, ca)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: tls.context(is_dialler=False), range(64)))
    assert {context.certificate for context in found} == {own(worker)}
    assert len(set(map(id, found))) == 1
