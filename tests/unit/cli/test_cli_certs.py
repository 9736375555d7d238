"""`medialane certs`: the files, that processes accept each other with them, and that nothing is overwritten."""

import os
import ssl
import stat
from pathlib import Path

import pytest

from medialane.cli import main
from medialane.types.errors import StartupFailed
from medialane.wire import RpcConfig, Security
from medialane.wire.certificate_authority import Authority


def certs(*words: object) -> int:
    return main(["certs", *map(str, words)])


def settings(folder: Path, **changed: object) -> RpcConfig:
    files = {f"tls_{name}": str(folder / f"{name}.pem") for name in ("cert", "key", "ca")}
    return RpcConfig(shared_secret="0123456789abcdef", **files | changed)


def connect(dialler: RpcConfig, listener: RpcConfig, host: str) -> dict[str, object]:
    """Return the certificate of the listener, after a handshake of TLS in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    contexts = [Security.load(config).tls.context(is_dialler=config is dialler) for config in (listener, dialler)]
    for context in contexts:
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of Python 3.13
    server = contexts[0].wrap_bio(to_server, to_client, server_side=True)
    client = contexts[1].wrap_bio(to_client, to_server, server_hostname=host)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_hosts_accept_each_other_by_all_of_their_names(tmp_path, capsys):
    folder = tmp_path / "certs"
    assert certs(folder, "--host", "node1,10.0.0.1", "--host", "fd00::2") == 0
    out = capsys.readouterr().out
    for flag in ("--rpc-tls-cert /etc/medialane/tls/cert.pem", "--rpc-tls-key", "--rpc-tls-ca", "--rpc-secret-file"):
        assert flag in out
    one, two = (settings(folder / name, tls_check_hostname=True) for name in ("node1", "fd00::2"))
    for host in ("node1", "10.0.0.1"):
        found = connect(two, one, host)
    assert found["subjectAltName"] == (("DNS", "node1"), ("IP Address", "10.0.0.1"))
    connect(one, two, "fd00::2")
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(one, two, "node1")


def test_keys_are_private_and_that_of_the_authority_is_in_no_folder_of_a_host(tmp_path):
    before = os.umask(0)
    try:
        assert certs(tmp_path / "certs", "--host", "node1") == 0
    finally:
        os.umask(before)
    assert {mode(path) for path in (tmp_path / "certs").rglob("*key.pem")} == {0o600}
    assert {mode(path) for path in (tmp_path / "certs", tmp_path / "certs" / "node1")} == {0o700}
    assert sorted(path.name for path in (tmp_path / "certs" / "node1").iterdir()) == ["ca.pem", "cert.pem", "key.pem"]


def test_second_call_adds_a_host_to_the_same_authority(tmp_path):
    assert certs(tmp_path, "--host", "node1") == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    assert certs(tmp_path, "--host", "node2") == 0
    assert {path: path.read_bytes() for path in before} == before
    connect(settings(tmp_path / "node1"), settings(tmp_path / "node2"), "node2")


def test_nothing_is_overwritten_without_force_which_renews_only_that_host(tmp_path, capsys):
    assert certs(tmp_path, "--host", "node1", "--host", "node2") == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    assert certs(tmp_path, "--host", "node3", "--host", "node1") == 2
    assert f"{tmp_path / 'node1'} exists: --force renews it" in capsys.readouterr().err
    assert not (tmp_path / "node3").exists()
    assert certs(tmp_path, "--host", "node1", "--force") == 0
    changed = {path.relative_to(tmp_path) for path in before if path.read_bytes() != before[path]}
    assert changed == {Path("node1/cert.pem"), Path("node1/key.pem")}
    connect(settings(tmp_path / "node1"), settings(tmp_path / "node2"), "node2")


def test_certificates_of_another_authority_are_refused(tmp_path):
    for name in ("a", "b"):
        assert certs(tmp_path / name, "--host", "node1") == 0
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(settings(tmp_path / "a/node1"), settings(tmp_path / "b/node1"), "node1")


def test_certificate_of_a_host_signs_nothing(tmp_path):
    """A host that has been taken over makes no further members."""
    assert certs(tmp_path, "--host", "node1") == 0
    (tmp_path / "node1" / "key.pem").rename(tmp_path / "node1" / "ca-key.pem")
    (tmp_path / "node1" / "cert.pem").rename(tmp_path / "node1" / "ca.pem")
    assert certs(tmp_path / "node1", "--host", "evil") == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--host", "a..b"], "--host a..b: 'a..b' is not a host name or IP address"),
        (["--host", "../up"], "is not a host name"),
        (["--host", "node1,"], "is not a host name"),
        (["--host", "fe80::1%eth0"], "cannot name an interface"),
        (["--host", "node1", "--host", "node1,10.0.0.1"], "the same name twice"),
        (["--host", "node1", "--days", "0"], "--days must be between"),
    ],
)
def test_unusable_arguments_are_refused_before_anything_is_made(tmp_path, capsys, words, reason):
    assert certs(tmp_path / "certs", *words) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_authority_whose_key_is_kept_elsewhere_is_not_replaced(tmp_path, capsys):
    assert certs(tmp_path, "--host", "node1") == 0
    (tmp_path / "ca-key.pem").unlink()
    ca = (tmp_path / "ca.pem").read_bytes()
    assert certs(tmp_path, "--host", "node2", "--force") == 2
    assert str(tmp_path / "ca-key.pem") in capsys.readouterr().err
    assert (tmp_path / "ca.pem").read_bytes() == ca


def test_file_at_the_place_of_the_folder_is_an_error(tmp_path, capsys):
    (tmp_path / "certs").write_text("")
    assert certs(tmp_path / "certs", "--host", "node1") == 2
    assert "medialane: error: " in capsys.readouterr().err


def test_renewed_certificate_is_used_without_a_restart(tmp_path):
    assert certs(tmp_path, "--host", "node1", "--host", "node2") == 0
    one, two = settings(tmp_path / "node1"), settings(tmp_path / "node2")
    first = connect(two, one, "node1")["serialNumber"]
    assert certs(tmp_path, "--host", "node1", "--force") == 0
    assert connect(two, one, "node1")["serialNumber"] != first


def test_expired_certificate_is_named_at_the_start(tmp_path):
    Authority.open(tmp_path).issue(["node1"], days=0, replace=False)
    with pytest.raises(StartupFailed, match=rf"--rpc-tls-cert {tmp_path}/node1/cert.pem .*expired"):
        Security.load(settings(tmp_path / "node1"))
