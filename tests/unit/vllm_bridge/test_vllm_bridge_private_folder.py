import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from vllm.utils.network_utils import get_open_zmq_ipc_path

from medialane.vllm_bridge.engine.plugin import PrivateFolder

HOLDER = """
import sys, time
from medialane.vllm_bridge.engine.plugin import PrivateFolder
print(PrivateFolder().path, flush=True)
time.sleep(60)  # time: a leftover of a failed test ends by itself
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A short path, unlike pytest's: sockets are created in it."""
    path = Path(tempfile.mkdtemp(prefix="ml-", dir="/tmp"))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(path))  # the operator's
    yield path
    shutil.rmtree(path)


def test_folder_is_private_and_removed():
    folder = PrivateFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_folders_of_killed_owners_are_removed_by_the_next_start(temporary):
    held = PrivateFolder()
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as process:
        killed = process.stdout.readline().strip()
        PrivateFolder().remove()
        assert os.path.exists(killed)
        process.send_signal(signal.SIGKILL)
    last = PrivateFolder()
    assert set(temporary.iterdir()) == {held.path, last.path}
    for folder in (held, last):
        folder.remove()


def test_foreign_folders_stay(temporary):
    file, link = temporary / "medialane-vllm-file", temporary / "medialane-vllm-link"
    file.write_text("x")
    target = temporary / "target"
    target.mkdir()
    link.symlink_to(target)
    PrivateFolder().remove()
    assert file.exists()
    assert link.exists()


def test_vllm_sockets_are_in_the_folder_until_removed(temporary):
    folder = PrivateFolder()
    folder.enter()
    address = get_open_zmq_ipc_path().removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
    assert set(os.listdir(folder.path)) == {"owner.lock", os.path.basename(address)}
    folder.remove()
    assert list(temporary.iterdir()) == []
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(temporary)


def test_folder_for_temporary_files_contains_ours_unless_the_operator_names_one(monkeypatch):
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    folder = PrivateFolder()
    folder.enter()
    assert folder.path.parent == Path(tempfile.gettempdir())
    folder.remove()
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_folder_with_too_long_path_is_created_in_tmp(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(long))
    folder = PrivateFolder()
    assert str(folder.path.parent) == "/tmp"
    folder.remove()
