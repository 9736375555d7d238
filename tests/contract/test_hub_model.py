"""A model on a hub that asks for a token: the store downloads the files, and preparers, which build the processor from
them, have neither the token nor any other secret."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from process_tree import command_of, descendants

from planted_secrets import planted, secrets_of
from waiting import wait_until

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

NAME, COMMIT = "org/gated", "0" * 40
START_S = 150
PREPARING = ("medialane forkserver", "medialane preparer")
SECRETS = planted("HF_TOKEN", "MEDIALANE_RPC_SECRET", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "file")


class Hub(ThreadingHTTPServer):
    """Has the files of a folder as model NAME, for those who send the token."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path for path in folder.iterdir() if path.is_file()}
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        name = path.rpartition("/")[2]
        if self.headers.get("authorization") != f"Bearer {SECRETS['HF_TOKEN']}":
            self._answer(401, b"")
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            found = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in self.server.files.items()
            ]
            self._answer(200, json.dumps(found).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            files = [{"rfilename": file} for file in self.server.files]
            self._answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": files}).encode())
        elif path.startswith(f"/{NAME}/resolve/") and name in self.server.files:
            self._answer(200, self.server.files[name].read_bytes())
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tiny_model):
    server = Hub(Path(tiny_model))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def home(tmp_path):
    """A home in which a token was left by `hf auth login`."""
    folder = tmp_path / "huggingface"
    folder.mkdir()
    (folder / "token").write_text(SECRETS["file"])
    return folder


def test_preparers_of_a_gated_model_have_no_token(hub, home, tmp_path):
    given = {name: secret for name, secret in SECRETS.items() if name != "file"}
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | given
    environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, open(tmp_path / "log", "wb") as log:
        words = [sys.executable, "-m", "medialane", "store", NAME, f"--listen=unix:{folder}/s.sock", "--preparers=1"]
        words += ["--arena-size=64MiB", "--", "--max-model-len=8192", "--api-key", SECRETS["VLLM_API_KEY"]]
        with subprocess.Popen(words, env=environ, stdout=log, stderr=log) as process:
            try:
                _check(process, tmp_path / "log")
            finally:
                process.terminate()
    assert not any(path.endswith(".safetensors") for path in hub.asked)


def _check(process: subprocess.Popen, log: Path) -> None:
    def has_started() -> bool:
        return "store is ready" in log.read_text() or process.poll() is not None

    wait_until(has_started, "the store is ready", START_S, more=log.read_text)
    assert process.poll() is None, log.read_text()
    below = [pid for pid in descendants(process.pid) if command_of(pid).startswith(PREPARING)]
    assert len(below) >= 2
    assert {pid: secrets_of(pid, SECRETS) for pid in below} == {pid: set() for pid in below}
