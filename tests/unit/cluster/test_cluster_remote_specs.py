import sys

import msgspec
import pytest

from installed_packages import install, is_installed
from medialane.cluster.ray import Nodes, gateway_specs, with_join_addresses, worker_specs
from medialane.config import load_config
from medialane.types.errors import StartupFailed

SECRET = "0123456789abcdef" * 2


def config(environ=None, **flags):
    return load_config({name.replace("_", "-"): value for name, value in flags.items()}, environ=environ or {})


@pytest.fixture(autouse=True)
def vllm_for_gpus(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "vllm", "0.32.0")
    return tmp_path


def remove(vllm_for_gpus):
    """Leave the one that is installed in truth."""
    sys.path.remove(str(vllm_for_gpus))
    if is_installed("vllm"):
        pytest.skip("the installed vLLM is not for CPUs")


OTHERS = ["10.0.0.2", "10.0.0.3"]
NODES = Nodes("10.0.0.1", OTHERS, "unix:/run/a/store.sock")


def joined(given, others=OTHERS):
    return with_join_addresses(given, "10.0.0.1", others)


@pytest.mark.parametrize(
    ("flags", "others", "listen", "join"),
    [
        ({}, [], "tcp://127.0.0.1:7100", "127.0.0.1:7100"),
        ({}, OTHERS, "tcp://10.0.0.1:7100", "10.0.0.1:7100"),
        ({"join_listen": "tcp://0.0.0.0:7200"}, OTHERS, "tcp://0.0.0.0:7200", "10.0.0.1:7200"),
        ({"join_listen": "tcp://gateway.example:7200"}, OTHERS, "tcp://gateway.example:7200", "gateway.example:7200"),
        ({"join": "10.0.0.9:7100"}, OTHERS, "tcp://10.0.0.1:7100", "10.0.0.1:7100,10.0.0.9:7100"),
        (
            {"ray": "true", "gateway_nodes": "each"},
            OTHERS,
            "tcp://10.0.0.1:7100",
            "10.0.0.1:7100,10.0.0.2:7100,10.0.0.3:7100",
        ),
        ({"ray": "true", "gateway_nodes": "each"}, [], "tcp://127.0.0.1:7100", "127.0.0.1:7100"),
        ({"gateways": "2"}, OTHERS, "tcp://10.0.0.1:7100", "10.0.0.1:7100,10.0.0.1:7101"),
    ],
)
def test_workers_join_the_addresses_at_which_gateways_listen(flags, others, listen, join):
    found = joined(config(**flags), others)
    assert (found.gateway.join_listen, found.worker.join) == (listen, join)


def test_workers_cannot_join_an_unknown_port():
    with pytest.raises(StartupFailed, match=r"--join-listen: .* needs the port that is listened on"):
        joined(config(join_listen="0.0.0.0:0"))


def test_workers_of_other_nodes_cannot_join_at_loopback():
    given = config(join_listen="tcp://127.0.0.1:7200")
    assert joined(given, []).worker.join == "127.0.0.1:7200"
    with pytest.raises(StartupFailed, match="workers on other nodes cannot connect to loopback"):
        joined(given)


@pytest.mark.parametrize(
    ("flags", "others", "listen"),
    [
        ({}, [], ""),
        ({}, OTHERS, "tcp://10.0.0.1:7099"),
        ({"join_listen": "tcp://0.0.0.0:7200"}, OTHERS, "tcp://10.0.0.1:7199"),
        ({"peer_listen": "tcp://10.0.0.1:9"}, OTHERS, "tcp://10.0.0.1:9"),
    ],
)
def test_store_listens_for_those_of_other_nodes(flags, others, listen):
    assert joined(config(**flags), others).store.peer_listen == listen


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"join_listen": "tcp://10.0.0.9:7100"}, r"--join-listen tcp://0\.0\.0\.0:7100, as all nodes use it"),
        ({"peer_listen": "tcp://10.0.0.1:9"}, "no --peer-listen"),
        ({"host": "10.0.0.1"}, r"--host 10\.0\.0\.1 is of one node; use 0\.0\.0\.0, or loopback"),
    ],
)
def test_addresses_of_one_node_are_refused_if_each_has_gateways(flags, reason):
    with pytest.raises(StartupFailed, match=reason):
        joined(config(ray="true", gateway_nodes="each", **flags))


def test_gateways_of_each_other_node_have_its_addresses_and_no_workers():
    given = joined(
        config({"MEDIALANE_RPC_SECRET": SECRET}, ray="true", gateway_nodes="each", host="0.0.0.0", workers="4")
    )
    found = gateway_specs(given, "m", ["--enforce-eager"], NODES, folder="abc")
    assert [each.node for each in found] == OTHERS
    assert [each.ready_url for each in found] == ["http://127.0.0.1:8000/health"] * 2
    assert all(each.layer > worker.layer for each in found for worker in specs(given))
    environ = load_config({}, environ=dict(found[0].environ))
    environ.cluster.validate()
    assert (environ.cluster.num_workers, environ.cluster.ray) == (0, False)
    assert (environ.gateway.join_listen, environ.store.peer_listen) == ("tcp://10.0.0.2:7100", "tcp://10.0.0.2:7099")
    assert (environ.worker.join, environ.server.host) == ("", "0.0.0.0")
    assert SECRET not in repr(found)


def test_gateways_of_the_head_need_no_other_node():
    assert gateway_specs(joined(config()), "m", (), NODES, folder="abc") == []


def specs(given, *vllm_args, has_gpus=True):
    return worker_specs(given, "m", vllm_args, NODES, has_gpus=has_gpus, folder="abc")


def test_first_worker_of_another_node_starts_its_store():
    (found,) = specs(joined(config()))
    shared = ("--store", "unix:{folder}/store.sock", "--start-store")
    assert found.node_flags == {"10.0.0.1": ("--store", "unix:/run/a/store.sock"), "": shared}
    assert found.shared_folder == "abc"
    assert "MEDIALANE_PEER_LISTEN" not in found.environ, "that is an address of this host"


def test_workers_use_the_store_of_the_gateways_of_their_node():
    given = joined(config(ray="true", gateway_nodes="each"))
    (found,) = specs(given)
    (gateways, _) = gateway_specs(given, "m", (), NODES, folder="abc")
    assert found.node_flags["10.0.0.2"] == ("--store", "unix:{folder}/store.sock")
    assert gateways.command[-2:] == ("--store-socket", "{folder}/store.sock")
    assert gateways.shared_folder == found.shared_folder
    assert found.node_flags[""][-1] == "--start-store", "of a node that has joined Ray later"


def test_workers_differ_in_name_and_metrics_port():
    found = specs(config(workers="2", metrics_port="8001"), "--enforce-eager")
    assert [each.name for each in found] == ["worker 0", "worker 1"]
    assert [each.joins_as for each in found] == ["{host}/0", "{host}/1"]
    assert [each.command[-2:] for each in found] == [("--metrics-port", "8001"), ("--metrics-port", "8002")]
    assert {each.vllm_args for each in found} == {("--enforce-eager",)}


def test_workers_that_prefill_and_decode_have_their_roles_and_gateways_of_other_nodes_start_none():
    given = joined(config(ray="true", gateway_nodes="each", prefill="1", decode="2"))
    found = specs(given)
    assert [each.name for each in found] == ["prefill 0", "decode 1", "decode 2"]
    assert [each.command[2:4] for each in found] == [("--role", role) for role in ("prefill", "decode", "decode")]
    gateways, _ = gateway_specs(given, "m", (), NODES, folder="abc")
    assert load_config({}, environ=dict(gateways.environ)).cluster.roles == []


def test_given_name_replaces_the_host():
    (found,) = specs(config(worker_name="blue"))
    assert found.joins_as == "blue/0"
    assert "MEDIALANE_WORKER_NAME" not in found.environ


@pytest.mark.parametrize(
    ("flags", "vllm_args", "num_gpus"),
    [
        ({}, ["--tensor-parallel-size", "2"], 2),
        ({"gpus_per_worker": "4"}, ["--tensor-parallel-size", "2"], 4),
    ],
)
def test_gpus_are_those_that_the_flags_need(flags, vllm_args, num_gpus):
    (found,) = specs(config(**flags), *vllm_args)
    assert found.num_gpus == num_gpus


@pytest.mark.parametrize("given", ["auto", "0"])
def test_vllm_for_cpus_needs_no_gpus(vllm_for_gpus, given):
    remove(vllm_for_gpus)
    (found,) = specs(config(gpus_per_worker=given), "--tensor-parallel-size", "2")
    assert found.num_gpus == 0


@pytest.mark.parametrize(
    ("given", "is_for_cpu", "has_gpus", "reason"),
    [
        ("1", True, True, "--gpus-per-worker 1: the installed vLLM is a build for CPUs"),
        ("0", False, True, "--gpus-per-worker 0, but the installed vLLM needs one"),
        ("auto", False, False, "no node of the Ray cluster has a GPU, but the installed vLLM needs one"),
        ("1", False, True, "--gpus-per-worker 1: the vLLM flags after `--` need 2"),
    ],
)
def test_gpus_that_vllm_cannot_run_with_are_an_error(vllm_for_gpus, given, is_for_cpu, has_gpus, reason):
    if is_for_cpu:
        remove(vllm_for_gpus)
    with pytest.raises(StartupFailed, match=reason):
        specs(config(gpus_per_worker=given), "-tp", "2", has_gpus=has_gpus)


def test_cpus_are_as_set():
    (found,) = specs(config(cpus_per_worker="3.5"))
    assert found.num_cpus == 3.5


def test_secret_is_not_in_what_ray_is_given():
    secured = config({"MEDIALANE_RPC_SECRET": SECRET, "MEDIALANE_API_KEYS": SECRET}, rpc_handshake_timeout="7")
    (found,) = specs(joined(secured), "--middleware", "m", "--seed=1")
    assert SECRET.encode() not in msgspec.json.encode(found)
    assert SECRET not in repr(found)
    assert found.vllm_args == ("--seed=1",)
    assert found.environ["MEDIALANE_RPC_HANDSHAKE_TIMEOUT"] == "7.0"
    assert found.environ["MEDIALANE_JOIN"] == "10.0.0.1:7100"


def test_file_of_the_secret_is_passed_by_its_name():
    (found,) = specs(config(rpc_secret_file="/etc/medialane/rpc-secret"))
    assert found.environ["MEDIALANE_RPC_SECRET_FILE"] == "/etc/medialane/rpc-secret"
