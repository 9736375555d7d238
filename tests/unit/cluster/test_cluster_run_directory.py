import stat
import subprocess
import sys
import tempfile

import pytest

from medialane.cluster.run_directory import RunDirectory, parent_directory, reap
from medialane.core.errors import StartupFailed


def test_folder_is_private_and_gone_after_close(tmp_path):
    folder = RunDirectory.create(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "worker-0.log").write_text("hello")
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_living_owner_is_left_alone(tmp_path):
    folder = RunDirectory.create(tmp_path)
    assert reap(tmp_path) == []
    assert folder.path.is_dir()
    folder.close()


def test_folder_of_a_killed_owner_is_removed_by_the_next_one(tmp_path):
    script = (
        "import os, pathlib, signal, sys; from medialane.cluster.run_directory import RunDirectory;"
        "f = RunDirectory.create(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    folder = RunDirectory.create(tmp_path)
    assert not left.exists()
    folder.close()


def test_kept_folder_stays_for_a_reader_until_the_next_start(tmp_path):
    folder = RunDirectory.create(tmp_path)
    folder.close(keep=True)
    assert folder.path.is_dir()
    assert reap(tmp_path) == [folder.path]


def test_folders_and_links_of_others_are_left_alone(tmp_path):
    (tmp_path / "medialane-run-without-lock").mkdir()
    target = tmp_path / "precious"
    target.mkdir()
    (target / "owner.lock").touch()
    (tmp_path / "medialane-run-link").symlink_to(target)
    assert reap(tmp_path) == []
    assert target.is_dir()


def test_parent_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StartupFailed, match="absent"):
        RunDirectory.create(tmp_path / "absent")


def test_runtime_folder_of_the_user_is_preferred_unless_too_long_for_sockets(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        assert str(parent_directory({"XDG_RUNTIME_DIR": short})) == short
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    assert str(parent_directory({"XDG_RUNTIME_DIR": str(deep)})) == "/tmp"
    assert parent_directory({"TMPDIR": "relative"}).is_absolute()
