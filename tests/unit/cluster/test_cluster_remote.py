import asyncio
import socket
import stat
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from installed_packages import install, is_installed
from medialane.cluster.ray import RemoteProcess, RemoteSpec, remote_argv, remote_environ
from medialane.types.errors import StartupFailed
from waiting import eventually

SECRET = "0123456789abcdef" * 2
HOST = socket.gethostname()


def spec(**changes):
    return RemoteSpec(**{"name": "worker 0", "command": ("worker", "m"), "joins_as": "{host}/0", **changes})


def test_command_runs_on_the_host_under_its_name():
    found = remote_argv(spec(vllm_args=("--enforce-eager",)), "10.0.0.1")
    expected = [sys.executable, "-P", "-m", "medialane", "worker", "m", "--worker-name", f"{HOST}/0"]
    assert found == [*expected, "--", "--enforce-eager"]


def test_flags_of_a_host_are_used_only_there():
    placed = spec(node_flags={"10.0.0.1": ("--store", "unix:/run/store.sock"), "": ("--start-store",)})
    assert "unix:/run/store.sock" in remote_argv(placed, "10.0.0.1")
    assert "--start-store" not in remote_argv(placed, "10.0.0.1")
    assert "--store" not in remote_argv(placed, "10.0.0.2")
    assert "--start-store" in remote_argv(placed, "10.0.0.2")


def test_gateways_of_a_host_have_no_worker_name():
    assert "--worker-name" not in remote_argv(spec(joins_as="", node="10.0.0.1"), "10.0.0.1")


@pytest.fixture
def runtime_directory(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, as paths of sockets must be
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_processes_of_a_host_name_the_same_folder(runtime_directory):
    words = ("--store", "unix:{folder}/store.sock")
    found = remote_argv(spec(shared_folder="abc", node_flags={"": words}), "10.0.0.2")
    assert f"unix:{runtime_directory}/medialane-node-abc/store.sock" in found


async def test_shared_folder_is_private_and_removed_with_its_last_process(runtime_directory):
    process = RemoteProcess(spec(command=("--version",), joins_as="", shared_folder="abc"), node="10.0.0.2")
    running = asyncio.create_task(process.run())
    folder = runtime_directory / "medialane-node-abc"
    await eventually(folder.exists)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (await running).how == "exit status 0"
    assert not list(runtime_directory.glob("medialane-node-*"))


def test_secret_is_that_of_the_host():
    others = {"MEDIALANE_API_KEYS": "k", "RAY_AUTH_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s"}
    host = {"MEDIALANE_RPC_SECRET": SECRET, "MEDIALANE_PORT": "9000", "HOME": "/root", **others}
    found = remote_environ(spec(environ={"MEDIALANE_JOIN": "10.0.0.1:7100"}), host)
    assert found["MEDIALANE_RPC_SECRET"] == SECRET
    assert found["MEDIALANE_JOIN"] == "10.0.0.1:7100"
    assert found["HOME"] == "/root"
    assert "MEDIALANE_PORT" not in found, "settings of the host are of other processes"
    assert not found.keys() & others.keys()


def test_worker_without_reserved_gpus_sees_none():
    assert remote_environ(spec(), {"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("is_for_cpu", "reason"), [(True, "vLLM's build is for CPUs"), (False, "is empty")])
def test_reserved_gpus_that_vllm_cannot_use_are_an_error(monkeypatch, tmp_path, is_for_cpu, reason):
    if not is_for_cpu:
        install(monkeypatch, tmp_path, "vllm", "0.32.0")
    elif is_installed("vllm"):
        pytest.skip("the installed vLLM is not for CPUs")
    with pytest.raises(StartupFailed, match=f"1 GPU reserved on {HOST}, but .*{reason}"):
        remote_environ(spec(num_gpus=1), {"CUDA_VISIBLE_DEVICES": ""})


def test_gateways_of_a_host_see_its_gpus():
    found = remote_environ(spec(node="10.0.0.1"), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert found == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_worker_sees_the_gpus_that_are_reserved_for_it(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "vllm", "0.32.0")
    found = remote_environ(spec(num_gpus=2, vllm_args=("-tp", "2")), {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_spec_is_a_plain_message():
    sent = spec(environ={"MEDIALANE_JOIN": "10.0.0.1:7100"}, node_flags={"a": ("--store", "unix:/s")}, num_gpus=1)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=RemoteSpec) == sent


async def test_run_that_fails_reports_the_cause():
    process = RemoteProcess(spec(command=("no-such-command",)), node="10.0.0.1")
    assert process.location is None
    end = await process.run()
    assert end.how == "exit status 2"
    assert end.report.startswith(f"worker 0 on {HOST}: argument COMMAND: invalid choice: 'no-such-command'")
    assert process.location is None


async def test_stop_before_the_start_is_possible():
    await RemoteProcess(spec(), node="10.0.0.1").stop()
