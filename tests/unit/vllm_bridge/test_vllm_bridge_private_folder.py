import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from medialane.vllm_bridge.private_folder import PrivateFolder

HOLDER = """
import sys, time
from medialane.vllm_bridge.private_folder import PrivateFolder
print(PrivateFolder().path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_folder_is_private_and_goes():
    folder = PrivateFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_folder_of_the_living_stays_and_of_the_killed_goes_with_the_next(temporary):
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


def test_what_is_not_our_folder_stays(temporary):
    file, link = temporary / "medialane-kv-file", temporary / "medialane-kv-link"
    file.write_text("x")
    target = temporary / "target"
    target.mkdir()
    link.symlink_to(target)
    PrivateFolder().remove()
    assert file.exists()
    assert link.exists()
