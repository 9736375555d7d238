import msgspec
import pytest

from medialane.cluster import remote_workers
from medialane.cluster.remote_workers import with_join_addresses, worker_specs
from medialane.config import load_config
from medialane.core.errors import StartupFailed

SECRET = "0123456789abcdef" * 2


def config(environ=None, **flags):
    return load_config({name.replace("_", "-"): value for name, value in flags.items()}, environ=environ or {})


@pytest.fixture(autouse=True)
def vllm_for_gpus(monkeypatch):
    monkeypatch.setattr(remote_workers, "vllm_is_for_cpu", lambda: False)


@pytest.mark.parametrize(
    ("flags", "num_nodes", "listen", "join"),
    [
        ({}, 1, "tcp://127.0.0.1:7100", "127.0.0.1:7100"),
        ({}, 2, "tcp://10.0.0.1:7100", "10.0.0.1:7100"),
        ({"join_listen": "tcp://0.0.0.0:7200"}, 2, "tcp://0.0.0.0:7200", "10.0.0.1:7200"),
        ({"join_listen": "tcp://gateway.example:7200"}, 2, "tcp://gateway.example:7200", "gateway.example:7200"),
        ({"join": "10.0.0.9:7100"}, 2, "tcp://10.0.0.1:7100", "10.0.0.1:7100,10.0.0.9:7100"),
    ],
)
def test_workers_join_the_address_at_which_gateways_listen(flags, num_nodes, listen, join):
    found = with_join_addresses(config(**flags), node_address="10.0.0.1", num_nodes=num_nodes)
    assert (found.gateway.join_listen, found.worker.join) == (listen, join)


def test_workers_cannot_join_an_unknown_port():
    with pytest.raises(StartupFailed, match="--join-listen must be tcp://HOST:PORT, with the port"):
        with_join_addresses(config(join_listen="tcp://0.0.0.0:0"), node_address="10.0.0.1", num_nodes=2)


def specs(given, *vllm_args, has_gpus=True, **rest):
    return worker_specs(given, "m", vllm_args, has_gpus=has_gpus, node_flags={}, **rest)


def test_workers_differ_in_name_and_metrics_port():
    found = specs(config(workers="2", metrics_port="8001"), "--enforce-eager")
    assert [each.name for each in found] == ["worker 0", "worker 1"]
    assert [each.joins_as for each in found] == ["{host}/0", "{host}/1"]
    assert [each.command[-2:] for each in found] == [("--metrics-port", "8001"), ("--metrics-port", "8002")]
    assert {each.vllm_args for each in found} == {("--enforce-eager",)}


def test_given_name_replaces_the_host():
    (found,) = specs(config(worker_name="blue"))
    assert found.joins_as == "blue/0"
    assert "MEDIALANE_WORKER_NAME" not in found.environ


@pytest.mark.parametrize(
    ("flags", "vllm_args", "has_gpus", "num_gpus"),
    [
        ({}, ["--tensor-parallel-size", "2"], True, 2),
        ({}, ["--tensor-parallel-size", "2"], False, 0),
        ({"gpus_per_worker": "4"}, [], False, 4),
        ({"gpus_per_worker": "0"}, [], True, 0),
    ],
)
def test_gpus_are_those_that_the_flags_need(flags, vllm_args, has_gpus, num_gpus):
    (found,) = specs(config(**flags), *vllm_args, has_gpus=has_gpus)
    assert found.num_gpus == num_gpus


def test_cpus_are_as_set():
    (found,) = specs(config(cpus_per_worker="3.5"))
    assert found.num_cpus == 3.5


def test_secret_is_not_in_what_ray_is_given():
    secured = config({"MEDIALANE_RPC_SECRET": SECRET}, rpc_handshake_timeout="7")
    (found,) = specs(with_join_addresses(secured, node_address="10.0.0.1", num_nodes=2))
    assert SECRET.encode() not in msgspec.json.encode(found)
    assert SECRET not in repr(found)
    assert found.environ["MEDIALANE_RPC_HANDSHAKE_TIMEOUT"] == "7.0"
    assert found.environ["MEDIALANE_JOIN"] == "10.0.0.1:7100"


def test_file_of_the_secret_is_passed_by_its_name():
    (found,) = specs(config(rpc_secret_file="/etc/medialane/rpc-secret"))
    assert found.environ["MEDIALANE_RPC_SECRET_FILE"] == "/etc/medialane/rpc-secret"
