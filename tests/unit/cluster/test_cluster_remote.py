import socket
import sys

import msgspec

from medialane.cluster.remote import RemoteProcess, RemoteSpec, remote_argv, remote_environ

SECRET = "0123456789abcdef" * 2
HOST = socket.gethostname()


def spec(**changes):
    return RemoteSpec(**{"name": "worker 0", "command": ("worker", "m"), "joins_as": "{host}/0", **changes})


def test_command_runs_on_the_host_under_its_name():
    found = remote_argv(spec(vllm_args=("--enforce-eager",)), "node a")
    expected = [sys.executable, "-m", "medialane", "worker", "m", "--worker-name", f"{HOST}/0"]
    assert found == [*expected, "--", "--enforce-eager"]


def test_flags_of_a_node_are_used_only_there():
    placed = spec(node_flags={"node a": ("--store", "unix:/run/store.sock")})
    assert remote_argv(placed, "node a")[-2:] == ["--store", "unix:/run/store.sock"]
    assert "--store" not in remote_argv(placed, "node b")


def test_secret_is_that_of_the_host():
    host = {"MEDIALANE_RPC_SECRET": SECRET, "MEDIALANE_PORT": "9000", "HOME": "/root"}
    found = remote_environ(spec(environ={"MEDIALANE_JOIN": "10.0.0.1:7100"}), host)
    assert found["MEDIALANE_RPC_SECRET"] == SECRET
    assert found["MEDIALANE_JOIN"] == "10.0.0.1:7100"
    assert found["HOME"] == "/root"
    assert "MEDIALANE_PORT" not in found, "settings of the host are of other processes"


def test_worker_without_reserved_gpus_sees_none():
    assert remote_environ(spec(), {"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == ""


def test_worker_sees_the_gpus_that_are_reserved_for_it():
    assert remote_environ(spec(num_gpus=2), {"CUDA_VISIBLE_DEVICES": "4,5"})["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_spec_is_a_plain_message():
    sent = spec(environ={"MEDIALANE_JOIN": "10.0.0.1:7100"}, node_flags={"a": ("--store", "unix:/s")}, num_gpus=1)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=RemoteSpec) == sent


async def test_run_that_fails_reports_the_cause():
    process = RemoteProcess(spec(command=("no-such-command",)), node_id="node a")
    assert process.location is None
    end = await process.run()
    assert end.how == "exit status 2"
    assert end.report.startswith(f"worker 0 on {HOST}: argument COMMAND: invalid choice: 'no-such-command'")
    assert process.location is None


async def test_stop_before_the_start_is_possible():
    await RemoteProcess(spec(), node_id="node a").stop()
