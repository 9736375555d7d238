"""Which processes have an operator's secrets. Processes that handle hostile bytes have none in their memory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from process_tree import command_of, descendants, suspended

from medialane.arena import Arena, ArenaConfig
from medialane.cli import store
from medialane.config import load_config
from nixl_hosts import fake_mover
from planted_secrets import VARIABLES, planted, secrets_of
from waiting import wait_until

START_S = 60
PROGRAM = Path(__file__).parent / "warm_store_program.py"
SECRETS = planted(*VARIABLES, "--api-key", "--hf-token", "--config", "--kv-transfer-config")


@pytest.fixture
def model(tmp_path):
    """A folder that passes for a model: in stage `url` nothing reads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    return folder


@pytest.fixture
def socket_folder():
    """A short path, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@contextmanager
def started(command, model, folder, *flags, vllm_args, prefix=()):
    """Start a process with all secrets planted; its log is the file `log` of the folder."""
    words = [*prefix, sys.executable, "-m", "medialane", command, str(model), *flags, "--", *vllm_args]
    environ = os.environ | {name: SECRETS[name] for name in VARIABLES}
    with open(folder / "log", "wb") as log, subprocess.Popen(words, env=environ, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.terminate()


def vllm_args_with_secrets(folder):
    file = folder / "flags.yaml"
    file.write_text(f"seed: 1\napi-key: [{SECRETS['--config']}]\n")
    return ["--api-key", SECRETS["--api-key"], f"--hf_token={SECRETS['--hf-token']}", "--config", str(file)]


def store_flags(folder):
    return [f"--listen=unix:{folder}/s.sock", "--stage=url", "--preparers=2", "--arena-size=16MiB"]


def check_preparers(store_pid, process, log):
    """Wait until the store is ready; then neither its fork servers nor its preparers have a secret."""
    wait_until(lambda: "store is ready" in log() or process.poll() is not None, "the store is ready", START_S)
    assert process.poll() is None, log()
    expected = ["medialane forkserver"] * 2 + ["medialane preparer 1", "medialane preparer 2"]  # with the spare

    def titles():
        commands = sorted(map(command_of, descendants(store_pid())))
        return [title.rpartition(" of store ")[0] or title for title in commands]

    wait_until(lambda: titles() == expected, "its processes run", more=titles)
    below = descendants(store_pid())
    assert {pid: secrets_of(pid, SECRETS) for pid in below} == {pid: set() for pid in below}
    assert not any(secret in log() for secret in SECRETS.values())


def test_fork_server_and_preparers_have_no_secret(model, tmp_path, socket_folder):
    flags = store_flags(socket_folder)
    with started("store", model, tmp_path, *flags, vllm_args=vllm_args_with_secrets(tmp_path)) as process:
        check_preparers(lambda: process.pid, process, (tmp_path / "log").read_text)


def test_fork_server_that_a_store_has_forked_has_no_secret_of_it(model, tmp_path, socket_folder):
    words = [sys.executable, str(PROGRAM), str(model), *store_flags(socket_folder)]
    environ = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    given = json.dumps({name: SECRETS[name] for name in VARIABLES}).encode()
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
    ):
        process.stdin.write(given)
        process.stdin.close()
        try:
            check_preparers(lambda: store_below(process.pid), process, (tmp_path / "log").read_text)
            assert secrets_of(store_below(process.pid), SECRETS) >= {"MEDIALANE_RPC_SECRET", "HF_TOKEN"}
            assert "prebuilt processor is not used" not in (tmp_path / "log").read_text()
        finally:
            os.kill(store_below(process.pid), signal.SIGTERM)


def store_below(pid):
    return min(descendants(pid))


@pytest.mark.timeout(90)
def test_each_process_has_the_secrets_that_it_uses_and_shows_none_in_its_command_line(model, tmp_path):
    flags = ["--workers=1", "--port=0", "--arena-size=16MiB"]
    connector = json.dumps({"kv_connector_extra_config": {"password": SECRETS["--kv-transfer-config"]}})
    vllm_args = [*vllm_args_with_secrets(tmp_path), "--kv-transfer-config", connector]
    with started("serve", model, tmp_path, *flags, vllm_args=vllm_args) as process:
        shared = {"MEDIALANE_RPC_SECRET", "--hf-token"}
        expected = {
            "warm": set(),
            "store": shared,
            "worker": shared | {"--kv-transfer-config"},
            "gateway": shared | {"VLLM_API_KEY", "--api-key", "--kv-transfer-config"},
        }
        found = {}

        def all_seen():
            for pid in descendants(process.pid):
                _, role, *words = [*command_of(pid).split(), "", ""]
                # It has its environment when its title has its arguments. Without a model it soon fails.
                if role in expected.keys() - found.keys() and str(model) in words:
                    with suppress(ProcessLookupError, FileNotFoundError), suspended(pid):
                        found[role] = secrets_of(pid, SECRETS), command_of(pid)
            return found.keys() == expected.keys()

        wait_until(all_seen, "all processes have been started", START_S)
    for role, (known, command) in found.items():
        assert known == expected[role], role
        assert not any(secret in command for secret in SECRETS.values())


async def test_mover_has_no_secret(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, SECRETS[name])
    arena = Arena.create(ArenaConfig(size_bytes=16 << 20))
    mover = store.nixl_mover(load_config({"peer-nixl": "on"}), arena.id, arena.slot, fake_mover)
    try:
        assert await mover.offer(wait=True) is not None
        assert secrets_of(mover.pid, SECRETS) == set()
    finally:
        await mover.close()
        arena.close()


def test_reader_of_memory_finds_what_is_there():
    """The test of the tests: a secret in the environment, on the heap, and nowhere."""
    secrets = planted("environment", "heap", "nowhere")
    program = f"held = '{secrets['heap'][:9]}' + '{secrets['heap'][9:]}'; print(1, flush=True); input()"
    environ = os.environ | {"SOME": secrets["environment"]}
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert secrets_of(process.pid, secrets) == {"environment", "heap"}
        process.kill()


def test_processes_with_secrets_show_no_memory_to_preparers(model, tmp_path, socket_folder):
    """Also where Landlock is missing. Their own memory is the store's to read."""
    flags = store_flags(socket_folder)
    without = [sys.executable, "-c", AS_OTHER_USERS]  # root's capabilities would protect it, too
    with started("store", model, tmp_path, *flags, vllm_args=[], prefix=without) as process:
        log = (tmp_path / "log").read_text
        wait_until(lambda: "store is ready" in log() or process.poll() is not None, "the store is ready", START_S)
        below = descendants(process.pid)
        words = [sys.executable, "-c", READ_MEMORY, *map(str, [process.pid, *below])]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["False", *["True"] * len(below)]


AS_OTHER_USERS = """\
import os, sys
from medialane.prepare import sandbox
sandbox.drop_privileges()
sandbox.drop_capabilities()
os.execv(sys.argv[1], sys.argv[1:])
"""
#: As a preparer without Landlock: without capabilities, of the same user.
READ_MEMORY = """\
import os, sys
from medialane.prepare import sandbox
sandbox.drop_privileges()
sandbox.drop_capabilities()
for pid in sys.argv[1:]:
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
        print(True)
    except PermissionError:
        print(False)
"""
