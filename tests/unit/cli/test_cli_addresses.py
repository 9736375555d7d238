"""All addresses of a command are checked before anything starts or is imported; errors name the setting."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from medialane.cli import main

MALFORMED = [
    "tcp://a..b:7000",
    "tcp://h:65536",
    "tcp://::1:7000",
    "tcp://[worker]:7000",
    "tcp://10.0.0.256:1",
    "10.0.0.256:1",
    "::1:7000",
    ":7000",
    "w.sock",
]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def taken():
    """A port at which another process listens; the one before it is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port - 1)).close()
            except OSError:
                continue
            yield port
            return


def error_of(words, capsys):
    """Return the one line with which a command fails to start."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("medialane: error: ")
    return line.removeprefix("medialane: error: ")


def gateway(*words, store="none"):
    return ["gateway", "m", "--port", "0", "--store", store, *words]


@pytest.mark.parametrize("address", [*MALFORMED, "tcp://worker:0", "worker:0"])
def test_worker_unreachable_from_gateways_fails_the_start(address, capsys):
    error = error_of(gateway("--worker", "unix:/run/w.sock", "--worker", address), capsys)
    assert error.startswith(f"--worker: {address!r}")


@pytest.mark.parametrize("address", MALFORMED)
@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_unusable_listen_address_fails_the_start(address, engine, capsys):
    error = error_of(["worker", "m", "--engine", engine, "--listen", address], capsys)
    assert error.startswith(f"--listen: {address!r}")


TCP_ONLY = [
    (["serve", "m"], "--join-listen"),
    (["serve", "m"], "--peer-listen"),
    (["serve", "m"], "--join"),
    (gateway(), "--join-listen"),
    (["store", "m", "--listen", "unix:/run/s.sock"], "--peer-listen"),
    (["worker", "m"], "--join"),
]


@pytest.mark.parametrize("address", [*MALFORMED, "unix:/run/a.sock"])
@pytest.mark.parametrize(("words", "flag"), TCP_ONLY)
def test_malformed_address_of_a_setting_is_named_with_a_right_one(words, flag, address, capsys):
    error = error_of([*words, flag, address], capsys)
    assert error.startswith(f"{flag}: {address!r}")
    assert "HOST:PORT, such as 10.0.0.1:7100" in error


@pytest.mark.parametrize(("words", "flag"), TCP_ONLY)
def test_address_without_tcp_is_accepted_and_needs_protection(words, flag, capsys, monkeypatch, model):
    monkeypatch.setenv("MEDIALANE_RPC_SECRET", "0123456789abcdef")
    words = [model if word == "m" else word for word in words]
    for address in ("10.77.0.1:7100", "tcp://10.77.0.1:7100"):
        error = error_of([*words, flag, address, *(["--port", "0"] if words[0] == "serve" else [])], capsys)
        assert "10.77.0.1 is not a loopback address: it needs TLS (--rpc-tls-cert" in error
        assert "medialane certs" in error
        assert "--rpc-insecure" in error
        assert error.startswith(flag)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["serve", "m", "--port", "0"], "--join-listen"),
        (["serve", "m", "--port", "0"], "--peer-listen"),
        (gateway(), "--join-listen"),
        (["store", "m", "--listen", "unix:/tmp/s.sock"], "--peer-listen"),
        (["worker", "m"], "--listen"),
        (["worker", "m", "--engine", "simulated"], "--listen"),
    ],
)
def test_port_that_is_in_use_is_reported_before_anything_starts(words, flag, taken, capsys):
    error = error_of([*words, flag, f"127.0.0.1:{taken}"], capsys)
    assert error == f"{flag}: cannot listen at tcp://127.0.0.1:{taken}: Address already in use"
    error = error_of([*words, flag, f"127.0.0.1:{taken}", "--rpc-insecure"], capsys)
    assert "Address already in use" in error


def test_address_of_another_machine_is_reported_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setenv("MEDIALANE_RPC_SECRET", "0123456789abcdef")
    error = error_of(gateway("--join-listen", "192.0.2.1:7100", "--rpc-insecure"), capsys)
    assert error == "--join-listen: cannot listen at tcp://192.0.2.1:7100: it is not an address of this machine"


def test_one_of_several_ports_in_use_is_enough(taken, capsys):
    words = ["worker", "m", "--join", "127.0.0.1:1"]
    error = error_of([*words, "--metrics-port", str(taken - 1), "--", "--data-parallel-size", "2"], capsys)
    assert error == f"--metrics-port: cannot listen at tcp://127.0.0.1:{taken}: Address already in use"
    for words in (
        ["--workers", "2", "--metrics-port", str(taken - 1)],
        ["--gateways", "2", "--join-listen", f"127.0.0.1:{taken - 1}"],
    ):
        assert f"127.0.0.1:{taken}" in error_of(["serve", "m", "--port", "0", *words], capsys)


def test_port_of_the_gateway_in_use_is_reported_before_anything_starts(taken, capsys):
    words = ["gateway", "m", "--store", "none", "--worker", "unix:/run/w.sock", "--port", str(taken)]
    assert "the port is already in use" in error_of(words, capsys)


@pytest.mark.parametrize("command", [["worker", "m"], ["store", "m"]])
def test_socket_that_cannot_be_made_is_reported_before_anything_starts(command, tmp_path, capsys):
    error = error_of([*command, "--listen", f"unix:{tmp_path}/no/such/w.sock"], capsys)
    assert error.endswith(f"the folder {tmp_path}/no/such does not exist")
    path = tmp_path / "w.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        assert "Address already in use" in error_of([*command, "--listen", f"unix:{path}"], capsys)
    path.unlink()
    path.write_text("a file of somebody else")
    assert "Address already in use" in error_of([*command, "--listen", f"unix:{path}"], capsys)
    assert path.exists()


def test_gateway_without_a_store_fails_at_once(capsys):
    error = error_of(["gateway", "m", "--worker", "unix:/run/w.sock"], capsys)
    assert "--store unix:/path" in error
    assert "--store none" in error


@pytest.mark.parametrize(
    "words",
    [
        ["gateway", "m", "--worker", "unix:/run/w.sock"],
        ["gateway", "m", "--store", "none", "--worker", "w.sock"],
        ["worker", "m", "--listen", "w.sock"],
        ["store", "m", "--listen", "unix:/no/such/folder/s.sock"],
    ],
)
def test_vllm_is_not_imported_for_an_error_of_an_address(words):
    script = (
        "import sys, json\nfrom medialane.cli.main import main\n"
        f"status = main({words!r})\nprint(json.dumps([status, 'torch' in sys.modules or 'vllm' in sys.modules]))"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=dict(os.environ), timeout=20
    )
    assert json.loads(done.stdout) == [2, False]
    assert time.monotonic() - started < 15  # 0.5 s on an idle machine; importing vLLM takes 20 s on a busy one


@pytest.mark.parametrize("command", ["serve", "gateway"])
@pytest.mark.parametrize("host", ["a..b", "", "::1::", "300.0.0.1", "http://h"])
def test_invalid_host_is_rejected_by_name(command, host, capsys):
    words = [command, "m", "--host", host] + (["--worker", "unix:/w.sock"] if command == "gateway" else [])
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("medialane: error: --host: ")


def test_invalid_media_domain_is_rejected_by_name(capsys):
    assert main(["serve", "m", "--allow-media-domain", "https://example.org"]) == 2
    assert "--allow-media-domain: 'https://example.org' is not a host name" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "gateway", "worker", "store"])
def test_help_shows_the_settings_of_connections_between_hosts(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    expected = ["--rpc-secret-file", "--rpc-tls-cert", "--rpc-tls-key", "--rpc-tls-ca", "--rpc-insecure"]
    expected += ["--join-listen"] if command in ("serve", "gateway") else []
    expected += ["--peer-listen"] if command in ("serve", "store") else []
    assert [flag for flag in expected if f"{flag} " not in shown and f"{flag}," not in shown] == []
