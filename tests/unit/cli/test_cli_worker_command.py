"""The command lines of workers and gateways: who connects to whom."""

import pytest

from medialane.cli import COMMANDS, gateway_command, parse_words, worker_command
from medialane.cluster import local
from medialane.config import Config
from medialane.gateway import GatewayConfig
from medialane.types.errors import StartupFailed
from medialane.wire import RpcConfig, TcpAddress, consecutive_ports
from medialane.worker import WorkerConfig

SECRET = RpcConfig(shared_secret="0123456789abcdef" * 2)
INSECURE = RpcConfig(shared_secret="0123456789abcdef" * 2, insecure=True)


def run(module, name, *words):
    return module.run(parse_words(name, COMMANDS[name], module.add_arguments, ["model", *words]))


@pytest.mark.parametrize(
    ("join", "targets"),
    [
        ("gateways:7100", [TcpAddress("gateways", 7100)]),
        ("a:1, b.example:2,[::1]:3", [TcpAddress("a", 1), TcpAddress("b.example", 2), TcpAddress("::1", 3)]),
        ("", []),
    ],
)
def test_gateways_to_join_are_parsed(join, targets):
    assert WorkerConfig(join=join).gateways() == targets


@pytest.mark.parametrize("join", ["gateways", "a:1,", "a:0", "unix:/a", "a:b", "a:1;b:2", ","])
def test_malformed_gateways_are_refused_by_name(join):
    with pytest.raises(StartupFailed, match="join"):
        WorkerConfig(join=join).validate()


def test_worker_needs_an_address_or_gateways():
    with pytest.raises(StartupFailed, match="--join HOST:PORT, the gateways to connect to, or --listen"):
        run(worker_command, "worker")


def test_gateway_needs_workers_or_an_address_at_which_they_join():
    with pytest.raises(StartupFailed, match="--worker ADDRESS, or --join-listen"):
        run(gateway_command, "gateway")


def test_joining_beyond_loopback_needs_protection():
    joining = {"worker": ("--join", "gateways:7100"), "gateway": ("--join-listen", "0.0.0.0:7100", "--store", "none")}
    for name, words in joining.items():
        with pytest.raises(StartupFailed, match=f"{words[0]} .*: it needs a shared secret .* and TLS"):
            run(worker_command if name == "worker" else gateway_command, name, *words)
    for rpc in (RpcConfig(), SECRET):
        with pytest.raises(StartupFailed, match="TLS"):
            local.check_join(Config(worker=WorkerConfig(join="gateways:7100"), rpc=rpc))
        with pytest.raises(StartupFailed, match="TLS"):
            local.check_join_listen(Config(gateway=GatewayConfig(join_listen="0.0.0.0:0"), rpc=rpc))
    local.check_join(Config(worker=WorkerConfig(join="gateways:7100"), rpc=INSECURE))
    local.check_join_listen(Config(gateway=GatewayConfig(join_listen="0.0.0.0:0"), rpc=INSECURE))
    local.check_join(Config(worker=WorkerConfig(join="127.0.0.1:7100,localhost:7200")))


def test_gateways_of_a_host_have_ports_in_a_row():
    assert consecutive_ports("tcp://[::1]:70", 3, "--x") == ["tcp://[::1]:70", "tcp://[::1]:71", "tcp://[::1]:72"]
    assert consecutive_ports("tcp://h:0", 1, "--x") == ["tcp://h:0"]
    for address in ("tcp://h:0", "tcp://h:65534", "unix:/a"):
        with pytest.raises(StartupFailed, match="--x"):
            consecutive_ports(address, 3, "--x")


def test_join_listen_must_be_a_tcp_address():
    with pytest.raises(StartupFailed, match="--join-listen"):
        GatewayConfig(join_listen="unix:/a").validate()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "--role encoder needs --store unix:/path"),
        (("--store", "unix:/s", "--encode-cache", "off"), "--role encoder needs --encode-cache auto or on"),
        (("--store", "unix:/s", "--engine", "simulated"), "--role encoder is for --engine vllm"),
    ],
)
def test_encoder_that_could_not_keep_what_it_encodes_is_refused(words, reason):
    with pytest.raises(StartupFailed, match=reason):
        run(worker_command, "worker", "--listen", "unix:/e", "--role", "encoder", *words)
