import os
import stat
import subprocess
import sys
import threading
import uuid
from contextlib import suppress

import pytest

from medialane.runtime.private_files import (
    OwnedFolder,
    SharedFolder,
    abandoned,
    has_one_owner,
    reap_folders,
    try_lock,
)
from medialane.types.errors import StartupFailed
from races import before

PREFIX = "medialane-test-"


def create(parent):
    return OwnedFolder.create(parent, PREFIX)


def test_folder_is_private_and_removed_by_close(tmp_path):
    folder = create(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "worker-0.log").write_text("hello")
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_live_owner_is_left_alone(tmp_path):
    folder = create(tmp_path)
    assert reap_folders(tmp_path, PREFIX) == []
    assert folder.path.is_dir()
    folder.close()


def test_folder_of_a_killed_owner_is_removed_by_the_next(tmp_path):
    script = (
        "import os, pathlib, signal, sys; from medialane.runtime.private_files import OwnedFolder;"
        "f = OwnedFolder.create(pathlib.Path(sys.argv[1]), sys.argv[2]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path), PREFIX], check=False)
    (left,) = tmp_path.iterdir()
    folder = create(tmp_path)
    assert not left.exists()
    folder.close()


def test_kept_folder_stays_for_a_reader_until_the_next_start(tmp_path):
    folder = create(tmp_path)
    folder.close(keep=True)
    assert folder.path.is_dir()
    assert reap_folders(tmp_path, PREFIX) == [folder.path]


def test_folders_of_another_prefix_are_left_alone(tmp_path):
    folder = create(tmp_path)
    folder.close(keep=True)
    OwnedFolder.create(tmp_path, "medialane-other-").close()
    assert folder.path.is_dir()


def test_folders_and_links_of_others_are_left_alone(tmp_path, become_another_user):
    (tmp_path / f"{PREFIX}without-lock").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    target = tmp_path / "precious"
    target.mkdir()
    (target / "owner.lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    foreign = create(tmp_path)
    foreign.close(keep=True)
    become_another_user()
    assert reap_folders(tmp_path, PREFIX) == []
    assert target.is_dir()


def test_unwritable_parent_folder_is_named(tmp_path):
    with pytest.raises(StartupFailed, match="absent"):
        create(tmp_path / "absent")


def test_lock_has_a_single_holder(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with path.open() as held, path.open() as other:
        assert try_lock(held.fileno())
        assert not try_lock(other.fileno())
        with abandoned(path) as found:
            assert found is None
    with abandoned(path) as found:
        assert found is not None


def test_file_replaced_after_the_open_is_not_considered_abandoned(tmp_path):
    path = tmp_path / "file"
    path.touch()

    def replace():
        path.unlink()
        path.touch()

    with before("fcntl.flock", replace), abandoned(path) as found:
        assert found is None


def test_shared_folder_is_private_and_removed_by_the_last_of_its_users(tmp_path):
    path = tmp_path / f"{PREFIX}shared"
    first, second = SharedFolder.join(path), SharedFolder.join(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    first.close()
    first.close()
    assert path.is_dir()
    assert reap_folders(tmp_path, PREFIX) == []
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_shared_folder_of_killed_users_is_removed(tmp_path):
    path = tmp_path / f"{PREFIX}shared"
    script = (
        "import os, pathlib, signal, sys; from medialane.runtime.private_files import SharedFolder;"
        "f = SharedFolder.join(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert path.is_dir()
    assert reap_folders(tmp_path, PREFIX) == [path]


def test_shared_folder_that_is_removed_meanwhile_is_made_again(tmp_path):
    path = tmp_path / f"{PREFIX}shared"
    earlier = SharedFolder.join(path)
    with before("fcntl.flock", earlier.close):
        folder = SharedFolder.join(path)
    assert (path / "owner.lock").exists()
    folder.close()
    assert not path.exists()


def test_folder_of_another_user_is_not_shared(tmp_path, become_another_user):
    (tmp_path / "folder").mkdir()
    become_another_user()
    with pytest.raises(StartupFailed, match="belongs to another user"):
        SharedFolder.join(tmp_path / "folder")


def test_newest_folders_of_owners_that_exited_may_be_kept(tmp_path):
    for age in range(4):
        folder = OwnedFolder.create(tmp_path, PREFIX, num_kept=9)
        os.utime(folder.path, (1e9 - age, 1e9 - age))
        folder.path.rename(tmp_path / f"{PREFIX}{age}")
        folder.close(keep=True)
    removed = reap_folders(tmp_path, PREFIX, num_kept=2)
    assert sorted(path.name for path in removed) == [f"{PREFIX}2", f"{PREFIX}3"]


def test_folder_has_one_owner_unless_it_is_shared_or_its_owner_has_gone(tmp_path):
    owned, shared = OwnedFolder.create(tmp_path, "owned-"), SharedFolder.join(tmp_path / "shared")
    lock = str(owned.path / "owner.lock")
    assert has_one_owner(lock)
    assert not has_one_owner(str(shared.path / "owner.lock"))
    assert not has_one_owner("")
    owned.close()
    assert not has_one_owner(lock)
    shared.close()


def test_folder_in_which_an_ending_process_still_creates_sockets_is_removed(tmp_path):
    for _ in range(20):
        folder, has_ended = OwnedFolder.create(tmp_path, PREFIX), threading.Event()
        (folder.path / "inside").mkdir()

        def keep_creating(path=folder.path, has_ended=has_ended):
            while not has_ended.is_set():
                with suppress(OSError), open(path / uuid.uuid4().hex, "w"):
                    pass

        process = threading.Thread(target=keep_creating)
        process.start()
        folder.close()
        has_ended.set()
        process.join()
        assert list(tmp_path.iterdir()) == []
