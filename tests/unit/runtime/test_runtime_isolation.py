"""Nothing is imported from the working directory, and processes without capabilities read no memory of ours."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from medialane.runtime.linux import refuse_library_settings
from medialane.types.errors import StartupFailed

PRINT_PATHS = """\
import json, os, subprocess, sys
from medialane.runtime.linux import import_nothing_from_here
import_nothing_from_here()
program = "import sys; print(*sys.path, sep=chr(10))"
children = [[sys.executable, "-c", program], [sys.executable, "-m", "planted"]]
ended = [subprocess.run(words, capture_output=True, text=True) for words in children]
print(json.dumps([os.environ.get("PYTHONPATH"), sys.path, ended[0].stdout.splitlines(), ended[1].stderr]))
"""


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (None, None), ("", None), (":", None), (".", None), ("sub::", None), (":/absolute", "/absolute"),
        ("/absolute:.:/other", "/absolute:/other"), ("./sub:../x", None),
    ],
)  # fmt: skip
def test_python_path_has_no_working_directory(tmp_path, given, left):
    (tmp_path / "sub").mkdir()
    (tmp_path / "planted.py").write_text("")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [sys.executable, "-c", PRINT_PATHS]
    environ |= {} if given is None else {"PYTHONPATH": given}
    ended = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    variable, own, of_child, refusal = json.loads(ended.stdout)
    assert variable == left
    assert "No module named planted" in refusal
    for path in (*own, *of_child):
        assert path.startswith("/")
        assert not Path(path).is_relative_to(tmp_path)


def test_absolute_path_of_the_working_directory_stays(tmp_path):
    """It was named."""
    environ = os.environ | {"PYTHONPATH": f".:{tmp_path}"}
    words = [sys.executable, "-c", PRINT_PATHS]
    ended = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    variable, own, of_child, _ = json.loads(ended.stdout)
    assert variable == str(tmp_path)
    assert str(tmp_path) in own
    assert str(tmp_path) in of_child


def test_module_of_ours_imports_nothing_from_the_working_directory(tmp_path):
    """Also if it is started by `python -m`, which puts the folder first."""
    for name in ("json", "argparse", "typing", "msgspec", "setproctitle", "ctypes"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for words in (["--version"], ["serve", "--help"], ["certs", "--help"]):
        argv = [sys.executable, "-m", "medialane", *words]
        ended = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("name", [".numba_config.yaml", "ucx.conf"])
def test_settings_of_libraries_in_the_working_directory_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refuse_library_settings()
    (tmp_path / name).symlink_to("elsewhere")
    with pytest.raises(StartupFailed, match=name):
        refuse_library_settings()


WITHOUT_CAPABILITIES = """\
from medialane.prepare import sandbox
sandbox.drop_privileges()
sandbox.drop_capabilities()
"""
READ = """\
import json, os, sys
from medialane.runtime.linux import libc
pid, tried = int(sys.argv[1]), {}
for name in ("environ", "mem", "maps", "auxv", "fd/0", "root/etc/hostname"):
    try:
        os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        tried[name] = True
    except OSError:
        tried[name] = False
PIDFD_GETFD = 438
tried["pidfd_getfd"] = libc.syscall(PIDFD_GETFD, os.pidfd_open(pid), 0, 0) >= 0
print(json.dumps(tried))
"""


@contextmanager
def holding_a_secret(calls):
    # Root's capabilities would keep those without from reading it, too.
    program = f"""\
from medialane.runtime.linux import hide_memory, show_memory
{WITHOUT_CAPABILITIES}
{calls}
print("ready", flush=True)
input()
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("calls", "is_readable"),
    [("", True), ("hide_memory()", False), ("hide_memory(); show_memory()", True)],
)
def test_memory_is_hidden_from_processes_without_capabilities(calls, is_readable):
    with holding_a_secret(calls) as pid:
        ended = subprocess.run(
            [sys.executable, "-c", WITHOUT_CAPABILITIES + READ, str(pid)], capture_output=True, text=True, check=True
        )
    tried = json.loads(ended.stdout)
    if tried["environ"] is False and is_readable:
        pytest.skip("this machine lets no process read another one")  # kernel.yama.ptrace_scope
    assert set(tried.values()) == {is_readable}, tried
