"""`serve .` in a folder that somebody has cloned: of its files only the model's own are read, and none is imported."""

import ctypes
import os
import select
import shutil
import struct
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from medialane_process import MedialaneProcess
from openai_http import OpenAiHttp, chat, picture

from medialane.testing.tiny_model import TINY_MODEL_FLAGS

#: Modules that our processes, vLLM's and Ray's import, of Python and of others, some of them late.
MODULES = (
    "json", "sitecustomize", "usercustomize", "typing_extensions", "numpy", "torch", "vllm", "medialane", "msgspec",
    "transformers", "triton", "yaml", "PIL", "regex", "zmq", "secrets", "random", "tokenize", "pickle", "runpy",
    "pkgutil", "multiprocessing", "llvmlite", "numba", "setproctitle",
)  # fmt: skip
#: What libraries look for in the working directory, and what is nobody's business.
FILES = (
    ".env", ".netrc", ".pdbrc", ".python-version", "id_rsa", "credentials.yaml", "requirements.txt", "pyproject.toml",
    "setup.cfg", "pydistutils.cfg", "uv.toml", "matplotlibrc", "nccl.conf", "ray.yaml", "logging.conf", "config.yaml",
)  # fmt: skip
_IN_OPEN, _IN_NONBLOCK = 0x20, 0o4000
_EVENT = struct.Struct("iIII")


@contextmanager
def opened_files(folder: Path):
    """Yield a set; at the end it has the names of the files in the folder that any process has opened (inotify(7))."""
    libc, names = ctypes.CDLL(None, use_errno=True), set()
    descriptor = libc.inotify_init1(_IN_NONBLOCK)
    assert libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_OPEN) >= 0
    yield names
    while select.select([descriptor], [], [], 0)[0]:
        events = os.read(descriptor, 1 << 20)
        while events:
            length = _EVENT.unpack_from(events)[3]
            names.add(events[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode())
            events = events[_EVENT.size + length :]
    os.close(descriptor)


@pytest.fixture
def cloned(tmp_path, tiny_model) -> Path:
    folder = tmp_path / "cloned"
    shutil.copytree(tiny_model, folder)
    marker = tmp_path / "imported"
    for name in MODULES:
        (folder / f"{name}.py").write_text(
            f"open({str(marker)!r}, 'a').write(__file__ + chr(10))\nraise SystemExit(9)\n"
        )
    (folder / "_json.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")
    for name in FILES:
        (folder / name).write_text("[")
    return folder


@pytest.mark.timeout(400)
async def test_only_the_model_is_read_in_the_working_directory(cloned, tmp_path, tiny_model, vllm_environ, monkeypatch):
    monkeypatch.chdir(cloned)
    ours = {path.name for path in tiny_model.iterdir()} | {""}
    planted = {path.name for path in cloned.iterdir()} - ours
    script = str(Path(sys.executable).with_name("medialane"))
    with opened_files(cloned) as opened:
        served = MedialaneProcess.spawn(
            "serve", ".",
                ["--workers", "1", "--arena-size", "64MiB", "--preparers", "1"],
                [*TINY_MODEL_FLAGS, "--trust-request-mm-kwargs"],
            environ=vllm_environ, log=tmp_path / "log", program=(script,),
        )  # fmt: skip
        try:
            await served.answers()
            client = OpenAiHttp(served.base_url, ".")
            await client.succeed(chat(picture(1), max_tokens=4))
            await client.succeed(chat(picture(2), max_tokens=4, mm_processor_kwargs={"max_pixels": 28 * 28 * 64}))
        finally:
            served.stop()
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert opened & ours - {""}, "the model's files are read"
    assert not opened & planted
