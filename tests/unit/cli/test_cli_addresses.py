"""Hosts and addresses are validated before anything starts; errors name the setting."""

import pytest

from medialane.cli.main import main

MALFORMED = [
    "tcp://a..b:7000",
    "tcp://h:65536",
    "tcp://::1:7000",
    "tcp://[worker]:7000",
    "tcp://10.0.0.256:1",
    "w.sock",
]


@pytest.mark.parametrize("address", [*MALFORMED, "tcp://worker:0"])
def test_worker_unreachable_from_gateways_fails_the_start(address, capsys):
    assert main(["gateway", "m", "--worker", "unix:/run/w.sock", "--worker", address]) == 2
    error = capsys.readouterr().err
    assert error.startswith("medialane: error: --worker: worker address ")
    assert repr(address) in error


@pytest.mark.parametrize("address", MALFORMED)
@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_unusable_listen_address_fails_the_start(address, engine, capsys):
    assert main(["worker", "m", "--engine", engine, "--listen", address]) == 2
    assert "worker address " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "gateway"])
@pytest.mark.parametrize("host", ["a..b", "", "::1::", "300.0.0.1", "http://h"])
def test_invalid_host_is_rejected_by_name(command, host, capsys):
    words = [command, "m", "--host", host] + (["--worker", "unix:/w.sock"] if command == "gateway" else [])
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("medialane: error: --host: ")


def test_invalid_media_domain_is_rejected_by_name(capsys):
    assert main(["serve", "m", "--allow-media-domain", "https://example.org"]) == 2
    assert "--allow-media-domain: 'https://example.org' is not a host name" in capsys.readouterr().err
