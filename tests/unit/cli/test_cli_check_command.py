"""The command as a user runs it, with a small Python server in place of vLLM's."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import medialane
from medialane.cli import main
from waiting import wait_until

#: Answers /health and /v1/models, but never the question for its routes.
SERVER = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/openapi.json":
            print("asked", flush=True)
            time.sleep(60)  # time: until it is killed
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
port = int(sys.argv[sys.argv.index("--port") + 1])
print("arguments", sys.argv[1:], flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def check(tmp_path):
    """Start `medialane check` with `source` as plain vLLM's server."""

    def check(source, *flags):
        package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        for folder in (package, package.parent, package.parent.parent):
            (folder / "__init__.py").touch()
        (package / "api_server.py").write_text(source)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        path = f"{tmp_path / 'path'}:{Path(medialane.__file__).parents[1]}"
        words = ["check", str(tmp_path / "model"), "--logs", str(tmp_path / "logs"), *flags]
        return subprocess.Popen(
            [sys.executable, "-m", "medialane", *words],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return check


def log_of(folder):
    with suppress(FileNotFoundError):
        return (folder / "logs" / "plain.log").read_text()
    return ""


def servers(folder):
    """The processes that serve the model of this test."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().decode(errors="replace").replace("\0", " ").split()
            if str(folder / "model") in words and "check" not in words:
                found.append(int(entry.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_no_server_behind(check, tmp_path, number):
    command = check(SERVER)
    try:
        wait_until(lambda: "asked" in log_of(tmp_path), "it asks plain vLLM", 15)
        assert servers(tmp_path)
        command.send_signal(number)
        output, _ = command.communicate(timeout=15)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 130
    assert output.index("stopping the servers") < output.index("interrupted: all servers are stopped")
    assert "Traceback" not in output
    assert not servers(tmp_path)


def test_server_that_does_not_start_is_reported_with_the_end_of_its_log(check):
    command = check("raise SystemExit('no memory for this model' + 9999 * '.')", "--", "--max-model-len", "99")
    output, _ = command.communicate(timeout=15)
    assert command.returncode == 2
    assert "medialane: error: plain vLLM exited before it was ready" in output
    assert "no memory for this model" in output
    assert "there is nothing to compare" in output
    assert len(output) < 2000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./no-such-folder/model"], "no-such-folder"),
        (["MODEL", "--", "--max-num-seqs", "many"], "--max-num-seqs many"),
        (["MODEL", "--", "--ssl-keyfile", "KEY"], "leave out --ssl-"),
        (["MODEL", "--json", "no-such-folder/report.json"], "there is no folder no-such-folder"),
        (["MODEL", "--port", "8000"], "leave out --host and --port"),
        (["MODEL", "--only", "image", "--only", "smell"], "--only smell: no case has that in its name"),
        (["MODEL", "--tolerance", "-1"], "--tolerance must not be negative"),
        (["MODEL", "--tensors", "--only", "damaged"], "--only damaged: no case has that in its name"),
        (["MODEL", "--tensors", "--quick"], "--tensors starts no server: leave out --quick"),
        (["MODEL", "--workers", "0", "--join-listen", "tcp://127.0.0.1:7100"], "leave out --ray and --workers 0"),
    ],
)
def test_unusable_arguments_are_reported_before_anything_starts(tmp_path, capsys, words, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "key").touch()
    places = {"MODEL": str(tmp_path), "KEY": str(tmp_path / "key")}
    assert main(["check", *(places.get(word, word) for word in words)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "starting" not in captured.err


def test_help_teaches_the_verdicts_and_exit_statuses(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(
        word in shown
        for word in ("equal", "close", "refused", "skipped", "differs", "--at-once", "--json", "--tensors")
    )
    assert "Exit status: 0" in shown
