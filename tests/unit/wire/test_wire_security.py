"""The files of secret and TLS, and which addresses need them."""

import asyncio
import os
import ssl
from contextlib import suppress

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from certificates import expired, tls_settings
from handshakes import handshake
from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import AuthenticationFailed, StartupFailed
from medialane.wire import Authentication, Role, RpcConfig, Security, check_address, dial, is_loopback
from medialane.worker import RpcServer

SECRET = "0123456789abcdef"
WITH_SECRET = RpcConfig(shared_secret=SECRET)
INSECURE = RpcConfig(shared_secret=SECRET, insecure=True)


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture
def secret_file(tmp_path):
    def write(content, mode=0o600):
        path = tmp_path / "secret"
        path.write_bytes(content)
        path.chmod(mode)
        return RpcConfig(secret_file=str(path))

    return write


def accepts(one: RpcConfig, other: RpcConfig) -> bool:
    """Whether a dialler's proof with the settings `one` is valid for a listener with `other`."""
    ends = Security.load(one).secrets, Security.load(other).secrets
    sides = [
        handshake(secrets, is_dialler=is_dialler, role=Role.STORE, peer_role=Role.STORE)
        for secrets, is_dialler in zip(ends, (True, False), strict=True)
    ]
    proof = sides[0].receive(sides[1].greeting)
    with suppress(AuthenticationFailed):
        sides[1].receive(sides[0].greeting + proof)
    return sides[1].is_complete


@pytest.mark.parametrize("content", [SECRET.encode(), f"  {SECRET} \r\n\n".encode()])
def test_secret_of_a_file_is_stripped_and_equal_to_that_of_the_variable(secret_file, content):
    assert accepts(secret_file(content, 0o640), WITH_SECRET)
    assert not accepts(secret_file(content), RpcConfig(shared_secret=SECRET.upper()))


def test_second_line_is_accepted_but_not_used(secret_file):
    both = secret_file(b"another secret of ours\n" + SECRET.encode())
    assert accepts(WITH_SECRET, both)
    assert not accepts(both, WITH_SECRET)


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"", 0o600, "0 lines"),
        (b"short secret\n", 0o600, "at least 16 bytes"),
        (SECRET.encode() + b"\nshort", 0o600, "at least 16 bytes"),
        (b"\n".join([SECRET.encode()] * 3), 0o600, "3 lines"),
        (SECRET.encode(), 0o644, "mode 0644"),
        (SECRET.encode(), 0o602, "mode 0602"),
    ],
)
def test_unusable_secret_file_is_named_and_its_content_is_not(secret_file, content, mode, reason):
    config = secret_file(content, mode)
    with pytest.raises(StartupFailed, match=rf"--rpc-secret-file {config.secret_file}.*{reason}") as failed:
        Security.load(config)
    assert SECRET not in failed.value.message
    assert "short" not in failed.value.message.replace(config.secret_file, "")


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "zero"])
def test_secret_that_is_no_file_is_an_error(tmp_path, kind):
    path = str(tmp_path / "secret") + ("\0" if kind == "zero" else "")
    if kind == "folder":
        os.mkdir(path)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    with pytest.raises(StartupFailed, match="--rpc-secret-file"):
        Security.load(RpcConfig(secret_file=path))


def test_short_secret_of_the_variable_is_refused_without_repeating_it():
    with pytest.raises(StartupFailed, match=r"MEDIALANE_RPC_SECRET: .* at least 16 bytes") as failed:
        Security.load(RpcConfig(shared_secret="hunter2"))
    assert "hunter2" not in failed.value.message


def test_secret_from_two_sources_is_refused(secret_file):
    config = msgspec.structs.replace(secret_file(SECRET.encode()), shared_secret=SECRET)
    with pytest.raises(StartupFailed, match="both set"):
        Security.load(config)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_no_secret(host):
    assert is_loopback(host)
    Security().check_host(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1", "worker-0", "localhost.example.com"]
)
def test_other_hosts_need_a_secret_and_tls_or_that_its_lack_is_accepted(tmp_path, ca, host):
    tls = tls_settings(tmp_path, ca)
    for config, missing, present in (
        (RpcConfig(), ("--rpc-secret-file or MEDIALANE_RPC_SECRET", "--rpc-tls-cert", "--rpc-insecure"), ()),
        (RpcConfig(insecure=True), ("--rpc-secret-file",), ("--rpc-tls-cert", "--rpc-insecure")),
        (RpcConfig(**tls), ("--rpc-secret-file",), ("--rpc-tls-cert", "--rpc-insecure")),
        (WITH_SECRET, ("--rpc-tls-cert", "medialane certs", "--rpc-insecure"), ("--rpc-secret-file",)),
    ):
        with pytest.raises(StartupFailed, match=f"{host} is not a loopback address: it needs") as refused:
            Security.load(config).check_host(host)
        assert all(word in refused.value.message for word in missing)
        assert not any(word in refused.value.message for word in present)
        assert len(refused.value.message.splitlines()) == 1
    Security.load(INSECURE).check_host(host)
    Security.load(RpcConfig(shared_secret=SECRET, **tls)).check_host(host)


def test_unix_sockets_need_no_secret():
    check_address("unix:/run/worker.sock", "--worker", RpcConfig())


def test_files_are_checked_for_unix_sockets_too(secret_file):
    with pytest.raises(StartupFailed, match="16 bytes"):
        check_address("unix:/run/worker.sock", "--worker", secret_file(b"x"))


def test_tls_and_its_absence_are_not_both_asked_for(tmp_path, ca):
    with pytest.raises(StartupFailed, match="insecure is for connections without TLS"):
        RpcConfig(insecure=True, **tls_settings(tmp_path, ca)).validate()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
async def test_listening_beyond_loopback_without_protection_is_refused(host):
    for config in (RpcConfig(), WITH_SECRET):
        server = RpcServer(FakeHandler(), config)
        with pytest.raises(StartupFailed, match="is not a loopback address"):
            await server.serve(f"tcp://{host}:0")
    server = RpcServer(FakeHandler(), INSECURE)
    assert (await server.serve(f"tcp://{host}:0")).startswith("tcp://")
    await server.close()


async def test_dialling_beyond_loopback_without_protection_is_refused_before_connecting(resolve_names):
    """Names are resolved first: this one is an address of another host."""
    resolve_names(("192.0.2.1", 7000))
    for config in (RpcConfig(), WITH_SECRET):
        authentication = Authentication(Security.load(config), "rpc", Role.GATEWAY, Role.WORKER)
        with pytest.raises(StartupFailed, match=r"192\.0\.2\.1 is not a loopback address"):
            await dial("tcp://worker:7000", asyncio.Protocol(), authentication)


def test_tls_settings_are_all_or_none(tmp_path, ca):
    files = tls_settings(tmp_path, ca)
    RpcConfig(**files).validate()
    for name in files:
        partial = RpcConfig(**{**files, name: ""})
        for check in (partial.validate, lambda config=partial: Security.load(config)):
            with pytest.raises(StartupFailed, match="tls_cert, tls_key and tls_ca"):
                check()
    with pytest.raises(StartupFailed, match="tls_check_hostname"):
        RpcConfig(tls_check_hostname=True).validate()


def broken(kind, folder, ca):
    """Return settings with one unusable file, and its setting."""
    files = tls_settings(folder, ca)
    other = tls_settings(folder / "other", ca)
    match kind:
        case "key of another certificate":
            return {**files, "tls_key": other["tls_key"]}, "tls_key"
        case "certificate of another CA":
            return {**files, "tls_cert": (more := tls_settings(folder / "o", trustme.CA()))["tls_cert"]} | {
                "tls_key": more["tls_key"]
            }, "tls_cert"
        case "expired":
            return tls_settings(folder, ca, **expired()), "tls_cert"
        case "readable key":
            os.chmod(files["tls_key"], 0o644)
            return files, "tls_key"
    name, _, how = kind.partition(" ")
    if how == "missing":
        os.unlink(files[name])
    else:
        with open(files[name], "w") as file:
            file.write(
                {"empty": "", "garbage": "-----BEGIN CERTIFICATE-----\nnot base64\n-----END CERTIFICATE-----\n"}[how]
            )
    return files, name


@pytest.mark.parametrize(
    "kind",
    [
        *(f"{name} {how}" for name in ("tls_cert", "tls_key", "tls_ca") for how in ("missing", "empty", "garbage")),
        "key of another certificate", "certificate of another CA", "expired", "readable key",
    ],
)  # fmt: skip
def test_unusable_tls_file_is_named_at_startup(tmp_path, ca, kind):
    files, name = broken(kind, tmp_path, ca)
    with pytest.raises(StartupFailed, match=f"--rpc-{name.replace('_', '-')} {files[name]}"):
        Security.load(RpcConfig(**files))


def test_encrypted_key_is_refused_instead_of_asking_for_its_password(tmp_path, ca):
    files = tls_settings(tmp_path, ca)
    with open(files["tls_key"], "rb+") as file:
        key = serialization.load_pem_private_key(file.read(), None)
        file.seek(0)
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"password"),
            )
        )
        file.truncate()
    with pytest.raises(StartupFailed, match=f"--rpc-tls-key {files['tls_key']}"):
        Security.load(RpcConfig(**files))


def test_tls_verifies_both_sides_in_recent_versions_only(tmp_path, ca):
    tls = Security.load(RpcConfig(**tls_settings(tmp_path, ca), tls_check_hostname=True)).tls
    server, client = tls.context(is_dialler=False), tls.context(is_dialler=True)
    for context in (server, client):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert (client.check_hostname, server.check_hostname) == (True, False)
